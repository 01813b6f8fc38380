"""Drafts of an MLP speculator in the host: the right states, exact texts, batches, rollback, laws."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from specplug_mlp.build import build_proposer, load_head
from specplug_mlp.checkpoint import Checkpoint
from specplug_mlp.options import MlpSpeculatorOptions
from specplug_mlp.sample import SAMPLE_CONFIG, sample_tensors, write_sample

from specplug import LLM, Batch, Draft, MethodSpec, PluginConfig, PluginContext, SamplingParams, hookimpl
from specplug.hooks import ProcessManager
from specplug.models.runner import TargetRunner
from specplug.testing import ProposerConformance, Rig, tiny_llama
from specplug.testing.proposers import MethodPlugin

Save = Callable[..., Path]

PROMPTS = [[5, 6] * 5, [1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 3]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
NUM_IDS = 64
WIDE = {**SAMPLE_CONFIG, "inner_dim": NUM_IDS}


def markov_llama() -> Any:
    """A tiny model whose next token follows from the last one alone: attention and MLP add nothing."""
    model = tiny_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def table_tensors(table: Sequence[int]) -> dict[str, torch.Tensor]:
    """A speculator that drafts ``table[token]`` after every token."""
    tensors = sample_tensors(WIDE)
    for stage in range(4):
        tensors[f"speculator.proj.{stage}.weight"].zero_()
        tensors[f"speculator.emb.{stage}.weight"] = torch.eye(NUM_IDS)
        tensors[f"speculator.ln.{stage}.weight"] = torch.ones(NUM_IDS)
        tensors[f"speculator.ln.{stage}.bias"] = torch.zeros(NUM_IDS)
        rows = torch.zeros(NUM_IDS, NUM_IDS)
        rows[torch.tensor(table), torch.arange(NUM_IDS)] = 1.0
        tensors[f"speculator.head.{stage}.weight"] = rows
    return tensors


def next_tokens(model: Any) -> list[int]:
    """What a model of ``markov_llama``'s kind writes after each token."""
    with torch.no_grad():
        return [int(id_) for id_ in model(torch.arange(NUM_IDS)[:, None]).logits[:, -1].argmax(-1)]


class Spy:
    """Keeps each step's drafts, with the texts that they were made for."""

    def __init__(self) -> None:
        self.drafts: list[tuple[list[int], list[int]]] = []

    @hookimpl(wrapper=True)
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Any:
        draft: Draft | None = yield
        if draft is not None:
            ids = draft.draft_token_ids.tolist()
            for row, count in enumerate(draft.num_draft_tokens):
                self.drafts.append((batch.token_ids[row].tolist(), [ids.pop(0) for _ in range(count)]))
        return draft


def decode(
    model: Any,
    folder: Path | None,
    k: int = 4,
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    params: Any = GREEDY,
    config: Mapping[str, Any] | None = None,
    **engine: Any,
) -> tuple[list[list[int]], Spy, Any]:
    """Texts, drafts, and the metrics of each request."""
    spy, manager = Spy(), ProcessManager()
    manager.register(MethodPlugin(MethodSpec("spy", "wrapper", lambda config, context: spy)), name="spy")
    speculative = {"method": "mlp_speculator", "model": str(folder), "num_speculative_tokens": k, **(config or {})}
    engine = {"strict": True, "seed": 0} | engine
    with LLM(
        model, speculative_config=speculative if folder else None, plugins=["spy"], manager=manager, **engine
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    return texts, spy, [output.outputs[0].spec_decode_metrics for output in outputs]


class Loaded:
    """As much of a target as a head is loaded for."""

    hidden_size, vocab_size, tokenizer = 32, NUM_IDS, None
    dtype, device = torch.float32, torch.device("cpu")


def expected_draft(model: Any, folder: Path, text: Sequence[int], count: int) -> list[int]:
    """What the speculator drafts after ``text``, from transformers' own hidden states."""
    head, space = load_head(Checkpoint.read(folder), Loaded())
    with torch.no_grad():
        hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]  # after the final norm
        states, token = head.start(hidden[0, -2:-1]), torch.tensor([text[-1]])
        drafted = []
        for stage in range(count):
            states = head(states, token, stage)
            token = space.to_target_ids(space.restrict(head.logits(states, stage)).argmax(-1))
            drafted.append(int(token))
    return drafted


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 8])
def test_drafts_start_from_the_state_before_the_newest_token(save: Save, max_num_batched_tokens: int) -> None:
    """In whatever company, with prompts in chunks or whole."""
    folder, model = save(), tiny_llama()
    _, spy, _ = decode(tiny_llama(), folder, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=3)
    assert len(spy.drafts) > 60
    for text, drafted in spy.drafts:
        assert drafted == expected_draft(model, folder, text, len(drafted))


@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_B26_greedy_text_is_the_plain_text(save: Save, k: int, tie_weights: bool) -> None:
    plain, _, _ = decode(tiny_llama(), None)
    assert decode(tiny_llama(), save(tie_weights=tie_weights), k)[0] == plain


def test_a_right_speculator_is_accepted_whole(save: Save) -> None:
    table = next_tokens(markov_llama())
    plain, _, _ = decode(markov_llama(), None)
    text, _, metrics = decode(markov_llama(), save(tensors=table_tensors(table), inner_dim=NUM_IDS))
    assert text == plain
    for each in metrics:
        assert each.num_accepted_tokens == each.num_draft_tokens > 0
        assert each.num_steps == 6  # the prompt's and five of five tokens make the 24; the last is cut


def test_a_speculator_that_is_right_at_times_leaves_no_trace_where_it_is_wrong(save: Save) -> None:
    right = next_tokens(markov_llama())
    table = [token if number % 3 else (token + 1) % NUM_IDS for number, token in enumerate(right)]
    plain, _, _ = decode(markov_llama(), None)
    tensors = table_tensors(table)
    for stage in range(4):  # so that the state has a say, here and there
        tensors[f"speculator.proj.{stage}.weight"] = sample_tensors(WIDE)[f"speculator.proj.{stage}.weight"] * 0.2
    folder = save(tensors=tensors, inner_dim=NUM_IDS)
    text, spy, metrics = decode(markov_llama(), folder)
    for before, ids in spy.drafts:
        assert ids == expected_draft(markov_llama(), folder, before, len(ids))
    assert text == plain
    accepted, drafted = (sum(getattr(each, f"num_{what}_tokens") for each in metrics) for what in ("accepted", "draft"))
    assert 0 < accepted < drafted


def test_steps_without_a_draft_lose_no_state(save: Save) -> None:
    """K = 0 in between: the drafts after it are those of a run that always drafted."""

    class Every3rd:
        def __init__(self) -> None:
            self.step = 0

        @hookimpl
        def specplug_plan(self, batch: Batch) -> list[int]:
            self.step += 1
            return [4 if self.step % 3 == 0 else 0] * len(batch)

    folder, model = save(), tiny_llama()
    manager, spy = ProcessManager(), Spy()
    for name, kind, instance in (("spy", "wrapper", spy), ("gaps", "policy", Every3rd())):
        made = instance
        spec = MethodSpec(name, kind, lambda config, context, made=made: made)  # type: ignore[arg-type, misc]
        manager.register(MethodPlugin(spec), name=name)
    config = {"method": "mlp_speculator", "model": str(folder), "num_speculative_tokens": 4}
    with LLM(tiny_llama(), speculative_config=config, plugins=["spy", "gaps"], manager=manager, strict=True) as llm:
        llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
    assert len(spy.drafts) >= 24
    for text, drafted in spy.drafts:
        assert drafted == expected_draft(model, folder, text, len(drafted))


def test_each_request_is_drafted_for_as_alone(save: Save) -> None:
    folder = save()
    _, together, _ = decode(tiny_llama(), folder)
    for prompt in PROMPTS:
        _, alone, _ = decode(tiny_llama(), folder, prompts=[prompt])
        of_prompt = [each for each in together.drafts if each[0][: len(prompt)] == prompt]
        assert [each for each in alone.drafts if each in of_prompt] == alone.drafts


def test_B103_a_truncated_vocabulary_drafts_its_own_ids_only(save: Save) -> None:
    token_map = torch.tensor([3, 60, 19, 7, 41])
    tensors = {**sample_tensors({**SAMPLE_CONFIG, "truncated_vocab_size": 5}), "token_map": token_map}
    folder = save(tensors=tensors, truncated_vocab_size=5)
    plain, _, _ = decode(tiny_llama(), None)
    text, spy, _ = decode(tiny_llama(), folder)
    assert text == plain
    drafted = {token for _, ids in spy.drafts for token in ids}
    assert len(drafted) > 1
    assert drafted <= set(token_map.tolist())
    for before, ids in spy.drafts:
        assert ids == expected_draft(tiny_llama(), folder, before, len(ids))


@pytest.mark.parametrize("truncated", [None, 16])
def test_sampled_drafts_carry_the_law_they_were_drawn_from(save: Save, truncated: int | None) -> None:
    """The host checks shapes and ids of the laws; that drafts follow them is the sampler's own test."""
    config = {**SAMPLE_CONFIG, **({"truncated_vocab_size": truncated} if truncated else {})}
    tensors = sample_tensors(config)
    if truncated:
        tensors["token_map"] = torch.arange(0, NUM_IDS, 4)
    folder = save(tensors=tensors, **({"truncated_vocab_size": truncated} if truncated else {}))
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    sampled = {"draft_sample_method": "probabilistic"}
    first, spy, _ = decode(tiny_llama(), folder, params=params, config=sampled)
    again, _, _ = decode(tiny_llama(), folder, params=params, config=sampled)
    greedy, greedy_spy, _ = decode(tiny_llama(), folder, params=params)
    assert first == again
    assert first != greedy
    assert any(drafted != expected_draft(tiny_llama(), folder, text, len(drafted)) for text, drafted in spy.drafts)
    assert all(
        drafted == expected_draft(tiny_llama(), folder, text, len(drafted)) for text, drafted in greedy_spy.drafts
    )


class LawSpy:
    """Keeps each draft's text, tokens and, row by row, the logits of its laws."""

    def __init__(self) -> None:
        self.drafts: list[tuple[list[int], list[int], torch.Tensor]] = []

    @hookimpl(wrapper=True)
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Any:
        draft: Draft | None = yield
        if draft is not None and draft.num_slots:
            logits = torch.cat([span.law.draft_logits for span in draft.laws])  # type: ignore[union-attr]
            start = 0
            for row, count in enumerate(draft.num_draft_tokens):
                ids = draft.draft_token_ids[start : start + count].tolist()
                self.drafts.append((batch.token_ids[row].tolist(), ids, logits[start : start + count]))
                start += count
        return draft


def test_each_stages_law_is_conditioned_on_the_tokens_drafted_before(save: Save) -> None:
    """Row by row: the stage's own logits at the request's temperature, whatever else is in the batch."""
    folder, model, spy, manager = save(), tiny_llama(), LawSpy(), ProcessManager()
    manager.register(MethodPlugin(MethodSpec("spy", "wrapper", lambda config, context: spy)), name="spy")
    config = {"method": "mlp_speculator", "model": str(folder), "draft_sample_method": "probabilistic"}
    params = [SamplingParams(temperature=20.0, seed=3, max_tokens=8 + row, ignore_eos=True) for row in range(4)]
    with LLM(tiny_llama(), speculative_config=config, plugins=["spy"], manager=manager, strict=True) as llm:
        llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    head, _ = load_head(Checkpoint.read(folder), Loaded())
    assert len({len(ids) for _, ids, _ in spy.drafts}) > 2, "ragged drafts, or the order of rows says nothing"
    for text, ids, logits in spy.drafts:
        with torch.no_grad():
            hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
            states = head.start(hidden[0, -2:-1])
            for stage, token in enumerate([text[-1], *ids[:-1]] if ids else []):
                states = head(states, torch.tensor([token]), stage)
                torch.testing.assert_close(logits[stage], head.logits(states, stage)[0] / 20.0, rtol=0, atol=1e-4)


def test_bfloat16_heads_follow_the_target(save: Save) -> None:
    texts, spy, _ = decode(tiny_llama().bfloat16(), save())
    assert all(len(text) == 24 for text in texts)
    assert spy.drafts


def make_target() -> TargetRunner:
    return TargetRunner(tiny_llama(), max_num_seqs=8, max_model_len=64, max_query_tokens=8)


def make_proposer(context: PluginContext, **keys: Any) -> object:
    with tempfile.TemporaryDirectory() as folder:
        options = MlpSpeculatorOptions(model=str(write_sample(Path(folder))), **keys)
        return build_proposer(PluginConfig("mlp_speculator", 4, options), context)


def make_sampling_proposer(context: PluginContext) -> object:
    return make_proposer(context, draft_sample_method="probabilistic")


class TestConformance(ProposerConformance):
    rig = Rig(make_target=make_target, num_tokens=24)

    def make_proposer(self, context: PluginContext) -> object:
        return make_proposer(context)
