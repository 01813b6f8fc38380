"""``draft_model`` behind the host loop, with tiny random models: rows B86, B87, B89, B93, B95, B136 and more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specplug import LLM, MethodSpec, RequestStep, SamplingParams, StepOutcome, hookimpl
from specplug.draft_space import IdentityDraftSpace
from specplug.hooks import ProcessManager
from specplug.methods import PluginConfig, PluginContext
from specplug.models.runner import TargetRunner
from specplug.proposers.autoregressive import AutoregressiveProposer
from specplug.proposers.draft_sampling import DraftSampler
from specplug.proposers.model_proposer import Slots
from specplug.testing.architectures import SUPPORTED_ARCHITECTURES, tiny_model
from specplug.testing.conformance import ProposerConformance
from specplug.testing.models import tiny_llama, toy_tokenizer
from specplug.testing.proposers import MethodPlugin, as_method
from specplug.testing.rig import Rig
from specplug.types import Batch, Draft, Indirect, Law, OneHot

PROMPTS = [[5, 6] * 5, [1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 3]]
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
Save = Callable[..., str]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Save a model, and a tokenizer where one is given, to a folder of that name."""

    def run(model: Any, name: str = "draft", tokenizer: Any = None) -> str:
        model.save_pretrained(tmp_path / name)
        if tokenizer is not None:
            tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return run


def draft_model(folder: str, k: int = 3, **keys: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": folder, "num_speculative_tokens": k, **keys}


def runner(model: Any, *, max_num_seqs: int = 8, max_model_len: int = 64, max_query_tokens: int = 16) -> TargetRunner:
    return TargetRunner(
        model, max_num_seqs=max_num_seqs, max_model_len=max_model_len, max_query_tokens=max_query_tokens
    )


def prompts_of(rows: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": list(row)} for row in rows]


class Watcher:
    """Keeps every step's rows."""

    def __init__(self) -> None:
        self.outcomes: list[StepOutcome] = []

    @hookimpl
    def specplug_accept_metrics(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    @property
    def rows(self) -> Iterator[RequestStep]:
        return (row for outcome in self.outcomes for row in outcome.rows)


def decode(
    target: Any,
    config: Mapping[str, Any] | None = None,
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    params: Any = None,
    proposer: object | None = None,
    k: int = 3,
    **engine: Any,
) -> tuple[list[list[int]], Watcher]:
    """Output ids of each prompt, and what a watcher saw."""
    watcher, manager = Watcher(), ProcessManager()

    def make_watcher(config: PluginConfig, context: PluginContext) -> Watcher:
        return watcher

    manager.register(MethodPlugin(MethodSpec("watcher", "observer", make_watcher)), name="watcher")
    if proposer is not None:
        made = proposer
        manager.register(as_method("under_test", lambda context: made(context)), name="under_test")  # type: ignore[operator]
        config = {"method": "under_test", "num_speculative_tokens": k}
    engine = {"strict": True, "seed": 0} | engine
    with LLM(target, speculative_config=config, plugins=["watcher"], manager=manager, **engine) as llm:
        outputs = llm.generate(prompts_of(prompts), params or SamplingParams(**GREEDY))
    return [list(output.outputs[0].token_ids) for output in outputs], watcher


# --- greedy equality ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral", "gpt2"])
def test_B27_greedy_text_is_the_plain_text_whatever_k(save: Save, name: str, k: int) -> None:
    """The draft is another model of the family, and the very model: nothing accepted, and everything."""
    plain, _ = decode(tiny_model(name))
    other = tiny_model(name, seed=1)
    for draft, is_same in ((other, False), (tiny_model(name), True)):
        text, watcher = decode(tiny_model(name), draft_model(save(draft), k))
        assert text == plain
        accepted = [row.num_accepted_tokens == row.num_draft_tokens for row in watcher.rows if row.num_draft_tokens]
        assert accepted
        assert all(accepted) or not is_same


def test_every_supported_architecture_can_draft_for_another(save: Save) -> None:
    plain, _ = decode(tiny_model("llama"))
    for name in SUPPORTED_ARCHITECTURES:
        text, watcher = decode(tiny_model("llama"), draft_model(save(tiny_model(name, seed=2), name), 2))
        assert text == plain
        assert any(row.num_draft_tokens for row in watcher.rows)


def test_B31_an_unrelated_draft_changes_no_text(save: Save) -> None:
    plain, _ = decode(tiny_llama())
    text, watcher = decode(tiny_llama(), draft_model(save(tiny_llama(seed=9, hidden_size=16)), 5))
    assert text == plain
    assert sum(row.num_accepted_tokens for row in watcher.rows) < 10


# --- B86: the cache follows the text ----------------------------------------------------------------------------


class CacheWatcher(AutoregressiveProposer):
    """Notes what each draft's first forward had to read, and compares the cache with a fresh forward of the text."""

    texts: dict[str, list[int]]
    num_read: list[int]

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        self.texts = {
            request_id: ids.tolist() for request_id, ids in zip(batch.request_ids, batch.token_ids, strict=True)
        }
        return super().propose(batch, limits)

    def draw(self, rows: Sequence[Slots], sampler: DraftSampler) -> None:
        for row in rows:
            text = self.texts[row.request_id]
            # one behind: what is read now ends with the newest token, and all before it is in the cache
            assert row.reading.num_past + len(row.reading.token_ids) == len(text)
            assert list(row.reading.token_ids) == text[row.reading.num_past :]
            assert self.cache.length(row.request_id) == row.reading.num_past
            self.num_read.append(len(row.reading.token_ids))
        super().draw(rows, sampler)
        for row in rows:
            self._check_entries(row.request_id)

    def _check_entries(self, request_id: str) -> None:
        text, draft = self.texts[request_id], self.draft
        fresh = runner(draft.model)
        fresh.cache.acquire()
        for start in range(0, len(text), 16):
            piece = torch.tensor(text[start : start + 16])
            fresh.forward(piece, [len(piece)], torch.tensor([len(piece) - 1]))
        row = self.cache.row(request_id)
        for held, wanted in zip(draft.cache.ragged_layers, fresh.cache.ragged_layers, strict=True):  # type: ignore[attr-defined]
            torch.testing.assert_close(held.keys[row, :, : len(text)], wanted.keys[0, :, : len(text)])
        fresh.close()


def watching(found: list[int], model: Any = None, **how: Any) -> Callable[[PluginContext], CacheWatcher]:
    def make(context: PluginContext) -> CacheWatcher:
        made = CacheWatcher(runner(model or tiny_llama()), context, name="draft_model", **how)
        made.num_read = found
        return made

    return make


def test_B86_self_draft_accepts_all_at_every_step() -> None:
    found: list[int] = []
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    prompts = [[5, 6, 7], [1, 2]]
    text, watcher = decode(tiny_llama(), proposer=watching(found), prompts=prompts, params=params)
    assert text == decode(tiny_llama(), prompts=prompts, params=params)[0]
    drafted = [row for row in watcher.rows if row.num_draft_tokens]
    assert drafted
    assert all(row.num_accepted_tokens == row.num_draft_tokens for row in drafted)
    # the first draft reads the short prompt; a draft that was accepted whole leaves its last token and the bonus
    assert sorted(found)[-2:] == [3, 4]
    assert set(found) == {2, 3, 4}


def test_B90_a_request_that_repeats_a_prompt_is_drafted_as_well_as_the_first() -> None:
    """One row in turn: what the first request left behind in the draft's cache must not serve the second."""
    prefix = list(range(3, 19))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [[*prefix, 20], [*prefix, 21]]
    text, watcher = decode(tiny_llama(), proposer=watching([]), prompts=prompts, params=params, max_num_seqs=1)
    assert text == decode(tiny_llama(), prompts=prompts, params=params)[0]
    drafted: dict[str, list[bool]] = {}
    for row in watcher.rows:
        if row.num_draft_tokens:
            drafted.setdefault(row.request_id, []).append(row.num_accepted_tokens == row.num_draft_tokens)
    assert len(drafted) == 2
    assert all(all(whole) for whole in drafted.values())


def test_B86_after_rejections_only_the_newest_token_is_read() -> None:
    found: list[int] = []
    decode(tiny_llama(), proposer=watching(found, tiny_llama(seed=1)), prompts=[[5, 6, 7]])
    assert found[0] == 4
    assert set(found[1:]) <= {1, 2}
    assert found.count(1) > 10


def test_B86_after_steps_without_drafts_prompt_chunks_and_strangers() -> None:
    """Plans of 0, prompts in chunks, requests that join and leave: accepted whole wherever there is a draft."""
    found: list[int] = []

    class Plans:
        num_steps = 0

        @hookimpl
        def specplug_plan(self, batch: Batch) -> list[int]:
            self.num_steps += 1
            return [3 if (self.num_steps + row) % 3 else 0 for row in range(len(batch))]

    make = watching(found)
    manager, watcher, plans = ProcessManager(), Watcher(), Plans()
    manager.register(as_method("under_test", make), name="under_test")
    for name, instance in (("watcher", watcher), ("plans", plans)):
        spec = MethodSpec(name, "observer", lambda config, context, instance=instance: instance)
        manager.register(MethodPlugin(spec), name=name)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(60, (length,), generator=generator).tolist() for length in (3, 40, 1, 22, 33, 9)]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in (9, 20, 2, 14, 7, 24)]
    with LLM(
        tiny_llama(),
        speculative_config={"method": "under_test", "num_speculative_tokens": 3},
        plugins=["watcher", "plans"],
        manager=manager,
        strict=True,
        max_num_seqs=3,
        max_num_batched_tokens=12,
    ) as llm:
        outputs = llm.generate(prompts_of(prompts), params)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    assert texts == decode(tiny_llama(), prompts=prompts, params=params)[0]
    drafted = [row for row in watcher.rows if row.num_draft_tokens]
    assert len(drafted) > 10
    assert all(row.num_accepted_tokens == row.num_draft_tokens for row in drafted)
    assert max(found) < 32 + 12  # a prompt is read while the target reads it


def test_B86_after_pause_and_resume(save: Save) -> None:
    watcher, manager = Watcher(), ProcessManager()
    manager.register(MethodPlugin(MethodSpec("watcher", "observer", lambda config, context: watcher)), name="watcher")
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    config = draft_model(save(tiny_llama()), 3)
    with LLM(tiny_llama(), speculative_config=config, plugins=["watcher"], manager=manager, strict=True) as llm:
        texts: dict[str, list[int]] = {}
        for name in ("a", "b", "c"):
            llm.add_request(name, {"prompt_token_ids": [ord(name) % 60, 5]}, params)
        for number in range(40):
            if number in (2, 5):
                llm.pause("a")
            if number in (4, 9):
                llm.resume("a")
            if number == 6:
                llm.abort("b")  # its row goes to another
            for output in llm.step():
                texts[output.request_id] = list(output.outputs[0].token_ids)
    plain, _ = decode(tiny_llama(), prompts=[[ord("a") % 60, 5], [ord("c") % 60, 5]], params=params)
    assert [texts["a"], texts["c"]] == plain
    drafted = [row for row in watcher.rows if row.num_draft_tokens]
    assert all(row.num_accepted_tokens == row.num_draft_tokens for row in drafted)


def test_a_draft_with_short_windows_reads_again_what_it_lost(save: Save) -> None:
    """Sliding windows: the rings hold what a draft may roll back, far past their length."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    target = {"prompts": [[3, 4, 5], [6]], "params": params}
    plain, _ = decode(tiny_llama(sliding_window=8), **target)
    for seed in (0, 1):
        draft = save(tiny_llama(sliding_window=8, seed=seed), f"draft{seed}")
        text, watcher = decode(tiny_llama(sliding_window=8), draft_model(draft, 4), **target)
        assert text == plain
        if seed == 0:
            assert all(row.num_accepted_tokens == row.num_draft_tokens for row in watcher.rows)


# --- B87, B89: lengths -------------------------------------------------------------------------------------------


def test_B87_a_request_past_the_drafts_positions_goes_on_undrafted(save: Save) -> None:
    draft = save(tiny_llama(seed=1, max_position_embeddings=16))
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [list(range(1, 11)), [3, 4]]
    with LLM(tiny_llama(), speculative_config=draft_model(draft, 4), strict=True) as llm:
        outputs = llm.generate(prompts_of(prompts), [params, SamplingParams(temperature=0.0, max_tokens=10)])
        metrics = llm.get_metrics()
    plain, _ = decode(tiny_llama(), prompts=prompts, params=[params, SamplingParams(temperature=0.0, max_tokens=10)])
    assert [list(output.outputs[0].token_ids) for output in outputs] == plain
    skipped = {
        metric.labels["reason"]: metric.value for metric in metrics if metric.name == "specplug:num_skipped_drafts"
    }
    assert skipped["draft_len"] >= 20
    _, watcher = decode(tiny_llama(), draft_model(draft, 4), prompts=prompts, params=params)
    lengths = {"long": [], "short": []}
    for row in watcher.rows:
        lengths["long" if row.request_id == "0" else "short"].append(row.num_draft_tokens)
    assert sum(lengths["short"]) > 0
    reasons = {row.skip_reason for row in watcher.rows if not row.num_draft_tokens}
    assert "draft_len" in reasons


def test_B87_no_draft_position_past_the_limit_is_read(save: Save) -> None:
    """Drafts shrink towards the limit instead of ending early: the last one has a single token."""
    draft = save(tiny_llama(max_position_embeddings=16))
    _, watcher = decode(tiny_llama(), draft_model(draft, 4), prompts=[[1, 2, 3]])
    counts = [row.num_draft_tokens for row in watcher.rows]
    assert all(row.num_accepted_tokens == row.num_draft_tokens for row in watcher.rows)
    assert counts == [0, 4, 4, 3, *[0] * (len(counts) - 4)]  # texts of 4, 9 and 14 tokens; then 18, which is past 16


def test_B89_a_prompt_longer_than_the_draft_and_a_short_one_in_one_batch(save: Save) -> None:
    draft = save(tiny_llama(seed=1, max_position_embeddings=16))
    prompts = [[number % 50 for number in range(40)], [1, 2, 3, 4, 5]]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    text, watcher = decode(tiny_llama(), draft_model(draft, 4), prompts=prompts, params=params)
    assert text == decode(tiny_llama(), prompts=prompts, params=params)[0]
    by_request: dict[str, int] = {}
    for row in watcher.rows:
        by_request[row.request_id] = by_request.get(row.request_id, 0) + row.num_draft_tokens
    assert sorted(by_request.values())[0] == 0
    assert sorted(by_request.values())[1] > 0


def test_max_model_len_of_the_draft_acts(save: Save) -> None:
    _, watcher = decode(tiny_llama(), draft_model(save(tiny_llama()), 4, max_model_len=9), prompts=[[1, 2, 3]])
    assert [row.num_draft_tokens for row in watcher.rows][:4] == [0, 4, 1, 0]


# --- B93, B95: vocabularies ------------------------------------------------------------------------------------


TEXTS = [f"<{number}>" for number in range(60)]


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(64, 62), (62, 64)])
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_B93_padded_rows_differ(save: Save, target_rows: int, draft_rows: int, method: str) -> None:
    tokenizer = toy_tokenizer(TEXTS)
    target = save(tiny_llama(vocab_size=target_rows), "target", tokenizer)
    draft = save(tiny_llama(vocab_size=draft_rows, seed=1), "draft", tokenizer)
    temperature = 0.0 if method == "greedy" else 1.0
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, seed=1)
    config = draft_model(draft, 4, draft_sample_method=method)
    drafted: list[int] = []

    class Sees:
        @hookimpl(wrapper=True)
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Any:
            draft = yield
            drafted.extend(draft.draft_token_ids.tolist() if draft else [])
            return draft

    manager = ProcessManager()
    manager.register(MethodPlugin(MethodSpec("sees", "wrapper", lambda config, context: Sees())), name="sees")
    with LLM(target, speculative_config=config, plugins=["sees"], manager=manager, strict=True) as llm:
        outputs = llm.generate(prompts_of(PROMPTS), params)
    assert len(drafted) > 50
    assert max(drafted) < 60
    if method == "greedy":
        plain, _ = decode(target, params=params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == plain


def test_B95_flags_of_special_tokens_do_not_matter(save: Save) -> None:
    """The draft's tokenizer adds a beginning of its own; the draft reads the target's ids as they are."""
    from tokenizers.processors import TemplateProcessing

    own = toy_tokenizer(TEXTS)
    own.add_special_tokens({"bos_token": TEXTS[1]})
    own.backend_tokenizer.post_processor = TemplateProcessing(single=f"{TEXTS[1]} $A", special_tokens=[(TEXTS[1], 1)])
    assert own("<5>")["input_ids"] == [1, 5]
    folder = save(tiny_llama(vocab_size=60), "target", toy_tokenizer(TEXTS))
    draft = save(tiny_llama(vocab_size=60), "draft", own)
    plain, _ = decode(folder)
    text, watcher = decode(folder, draft_model(draft, 3))
    assert text == plain
    assert all(row.num_accepted_tokens == row.num_draft_tokens for row in watcher.rows)  # an extra token would show


# --- B136: its own dtype ------------------------------------------------------------------------------------------


def loaded_draft(config: Mapping[str, Any], target: Any) -> Any:
    """The draft model object that a session loads."""
    with LLM(target, speculative_config=config, strict=True, skip_tokenizer_init=True) as llm:
        llm.generate([{"prompt_token_ids": [1, 2]}], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        proposer: Any = llm._session.hooks.instance("draft_model")  # type: ignore[attr-defined]
        return proposer.draft.model


def test_B136_each_side_loads_by_its_own_tag(save: Save) -> None:
    half, full = save(tiny_llama().bfloat16(), "half"), save(tiny_llama(), "full")
    assert loaded_draft(draft_model(half), full).dtype == torch.bfloat16
    assert loaded_draft(draft_model(full), half).dtype == torch.float32
    assert loaded_draft(draft_model(half, draft_model_dtype="float32"), full).dtype == torch.float32
    tagged = tiny_llama()
    tagged.config.quantization_config = {"quant_method": "awq", "bits": 4}  # the target's tag is not the draft's
    assert not hasattr(loaded_draft(draft_model(full), tagged).config, "quantization_config")


# --- hooks, faults, switches -----------------------------------------------------------------------------------


def make_draft(context: PluginContext) -> AutoregressiveProposer:
    session = context.session
    draft = runner(tiny_llama(seed=1), max_num_seqs=session.max_num_seqs, max_model_len=session.max_model_len)
    return AutoregressiveProposer(draft, context, name="draft_model")


def make_sampling_draft(context: PluginContext) -> AutoregressiveProposer:
    session = context.session
    draft = runner(tiny_llama(), max_num_seqs=session.max_num_seqs, max_model_len=session.max_model_len)
    return AutoregressiveProposer(draft, context, name="draft_model", is_probabilistic=True)


def make_target() -> TargetRunner:
    return runner(tiny_llama(), max_query_tokens=8)


class TestConformance(ProposerConformance):
    rig = Rig(make_target=make_target, num_tokens=24)

    def make_proposer(self, context: PluginContext) -> object:
        return make_draft(context)


class Fails(AutoregressiveProposer):
    def draw(self, rows: Sequence[Slots], sampler: DraftSampler) -> None:
        raise RuntimeError("device lost")


def test_a_draft_that_fails_is_detached_and_the_text_is_the_plain_text() -> None:
    made: list[Any] = []

    def make(context: PluginContext) -> Fails:
        made.append(Fails(runner(tiny_llama()), context, name="draft_model"))
        return made[-1]

    text, watcher = decode(tiny_llama(), proposer=make, strict=False)
    assert text == decode(tiny_llama())[0]
    assert sum(outcome.faults.get("propose_raised:under_test", 0) for outcome in watcher.outcomes) == 1
    assert {row.skip_reason for row in watcher.rows} == {"prefill", "fault", "no_proposer"}
    with pytest.raises(RuntimeError, match="closed"):  # the session's end gave the model back
        made[0].draft.forward(torch.tensor([1]), [1], torch.tensor([0]))


def test_requests_that_are_not_drafted_for_are_not_read() -> None:
    made: list[AutoregressiveProposer] = []

    def make(context: PluginContext) -> AutoregressiveProposer:
        made.append(make_draft(context))
        return made[-1]

    off = {"specplug": {"enabled": False}}
    params = [
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, extra_args=off),
        SamplingParams(temperature=0.0, max_tokens=1),
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    ]
    seen: set[str] = set()
    manager = ProcessManager()
    manager.register(as_method("under_test", make), name="under_test")
    with LLM(
        tiny_llama(),
        speculative_config={"method": "under_test", "num_speculative_tokens": 3},
        manager=manager,
        strict=True,
    ) as llm:
        for number, each in enumerate(params):
            llm.add_request(f"r{number}", {"prompt_token_ids": list(range(40))}, each)
        while llm.has_unfinished_requests():
            llm.step()
            seen |= {name for name in ("r0", "r1", "r2") if name in made[0].cache}
    assert seen == {"r2"}
    assert not made[0].cache._held


def test_confidence_is_the_largest_probability_of_each_slots_law() -> None:
    drafts: list[Draft] = []

    class Keeps(AutoregressiveProposer):
        def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            drafts.append(super().propose(batch, limits))
            return drafts[-1]

    for is_probabilistic in (False, True):
        drafts.clear()
        decode(
            tiny_llama(),
            proposer=lambda context, how=is_probabilistic: Keeps(
                runner(tiny_llama()), context, name="draft_model", is_probabilistic=how
            ),
            params=SamplingParams(temperature=0.8 if is_probabilistic else 0.0, max_tokens=12, seed=2, top_k=5),
        )
        assert drafts
        for draft in drafts:
            assert draft.confidence is not None
            assert bool(((draft.confidence > 0) & (draft.confidence <= 1)).all())
            for span in draft.laws:
                if is_probabilistic:
                    law = torch.softmax(span.law.draft_logits, -1).amax(-1)  # type: ignore[union-attr]
                    torch.testing.assert_close(draft.confidence[span.start : span.stop], law)


# --- alone and together ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_batch_of_mixed_lengths_is_each_request_alone(save: Save, method: str) -> None:
    folder = save(tiny_llama(seed=1))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(60, (length,), generator=generator).tolist() for length in (1, 35, 3, 12)]
    config = draft_model(folder, 3, draft_sample_method=method)
    temperatures = (0.0, 0.9, 0.7, 1.1)
    params = [
        SamplingParams(temperature=temperature, top_p=0.95, seed=number, max_tokens=20, ignore_eos=True)
        for number, temperature in enumerate(temperatures)
    ]
    together, _ = decode(tiny_llama(), config, prompts=prompts, params=params)
    alone = [
        decode(tiny_llama(), config, prompts=[prompt], params=[each])[0][0]
        for prompt, each in zip(prompts, params, strict=True)
    ]
    assert together == alone


def test_B63_seeds_decide_everything_and_the_global_state_nothing(save: Save) -> None:
    config = draft_model(save(tiny_llama(seed=1)), 3, draft_sample_method="probabilistic")
    params = SamplingParams(temperature=2.0, seed=42, max_tokens=20, ignore_eos=True)
    first, _ = decode(tiny_llama(), config, params=params)
    torch.manual_seed(7)
    torch.rand(100)
    again, _ = decode(tiny_llama(), config, params=params)
    other, _ = decode(
        tiny_llama(), config, params=SamplingParams(temperature=2.0, seed=43, max_tokens=20, ignore_eos=True)
    )
    assert first == again != other


def test_greedy_drafts_leave_sampled_text_as_it_is(save: Save) -> None:
    """Seed-exact: verified by sample-and-match, whatever the draft."""
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True)
    plain, _ = decode(tiny_llama(), params=params)
    text, _ = decode(tiny_llama(), draft_model(save(tiny_llama(seed=1)), 3), params=params)
    assert text == plain
    with LLM(tiny_llama(), speculative_config=draft_model(save(tiny_llama(seed=1)), 3)) as llm:
        llm.generate(prompts_of(PROMPTS), params)
        assert llm._session._verify_method() == "match"  # type: ignore[attr-defined]


def test_self_draft_by_sampling_is_always_accepted(save: Save) -> None:
    """Temperature, top-k, top-p and min-p make the same law of the same logits."""
    config = draft_model(save(tiny_llama()), 3, draft_sample_method="probabilistic")
    for filters in ({}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 12, "top_p": 0.9, "min_p": 0.05}):
        params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True, **filters)
        _, watcher = decode(tiny_llama(), config, params=params)
        accepted = sum(row.num_accepted_tokens for row in watcher.rows)
        drafted = sum(row.num_draft_tokens for row in watcher.rows)
        assert drafted - accepted <= 1, filters  # two roundings of one law may differ by a hair


# --- memory and synchronisation ------------------------------------------------------------------------------------


class WideTarget(IdentityDraftSpace):
    """A draft of 64 ids beside a target of 50_000: laws are read through a map, and never spelled out."""

    def __init__(self) -> None:
        super().__init__(64)
        self.map = torch.cat([torch.arange(64), torch.full((50_000 - 64,), -1)])

    def law(self, draft_logits: torch.Tensor) -> Law:
        return Indirect(draft_logits, draft_logits.logsumexp(-1), self.map)


class Sizes(TorchDispatchMode):
    """The widest tensor that operations make, and how often values are read from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_reads += func is torch.ops.aten._local_scalar_dense.default
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.numel())
        return made


@pytest.mark.parametrize("is_probabilistic", [False, True])
def test_a_step_makes_nothing_as_wide_as_the_target_and_reads_nothing_back(
    make_batch: Callable[..., Batch], is_probabilistic: bool
) -> None:
    target = SimpleNamespace(device=torch.device("cpu"), vocab_size=50_000)
    context: Any = SimpleNamespace(draft_space=lambda draft: WideTarget(), target=target)
    proposer = AutoregressiveProposer(
        runner(tiny_llama()), context, name="draft_model", is_probabilistic=is_probabilistic
    )
    proposer.specplug_start_session()
    batch = make_batch([[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    with Sizes() as sizes:
        draft = proposer.propose(batch, [4, 4, 4])
    assert draft.num_slots == 12
    assert sizes.largest < 50_000  # the draft's own largest are its logits and cache rows
    assert sizes.num_reads == 0  # .item() and the like: what a step waits for is the copy of the next one
    assert isinstance(draft.laws[0].law, Indirect if is_probabilistic else OneHot)
