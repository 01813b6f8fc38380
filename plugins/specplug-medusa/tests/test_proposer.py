"""Drafts of Medusa heads in the host: the right states, exact texts, batches, laws."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from specplug_medusa.build import build_proposer, load_heads
from specplug_medusa.checkpoint import Checkpoint
from specplug_medusa.options import MedusaOptions
from specplug_medusa.sample import SAMPLE_CONFIG, sample_tensors, write_sample

from specplug import LLM, Batch, Draft, MethodSpec, PluginConfig, PluginContext, SamplingParams, hookimpl
from specplug.hooks import ProcessManager
from specplug.models.runner import TargetRunner
from specplug.testing import ProposerConformance, Rig, tiny_llama
from specplug.testing.proposers import MethodPlugin

Save = Callable[..., Path]

PROMPTS = [[5, 6] * 5, [1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 3]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SHARED: Mapping[str, Any] = {"original_lm_head": True}
TRUNCATED: Mapping[str, Any] = {"original_lm_head": True, "truncated_vocab_size": 5}


class Spy:
    """Keeps each step's drafts, with the texts that they were made for, and may forbid drafts in some steps."""

    def __init__(self, gap: int = 1) -> None:
        self.drafts: list[tuple[list[int], list[int]]] = []
        self._gap, self._step = gap, 0

    @hookimpl
    def specplug_plan(self, batch: Batch) -> list[int]:
        self._step += 1
        return [0 if self._step % self._gap else 64] * len(batch)

    @hookimpl(wrapper=True)
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Any:
        draft: Draft | None = yield
        if draft is not None:
            ids = draft.draft_token_ids.tolist()
            for row, count in enumerate(draft.num_draft_tokens):
                self.drafts.append((batch.token_ids[row].tolist(), [ids.pop(0) for _ in range(count)]))
        return draft


def decode(
    folder: Path | None,
    k: int = 4,
    *,
    model: Any = None,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    params: Any = GREEDY,
    gap: int = 1,
    config: Mapping[str, Any] | None = None,
    **engine: Any,
) -> tuple[list[list[int]], Spy, Any]:
    """Texts, drafts, and the metrics of each request."""
    spy, manager = Spy(gap), ProcessManager()
    manager.register(MethodPlugin(MethodSpec("spy", "wrapper", lambda config, context: spy)), name="spy")
    speculative = {"method": "medusa", "model": str(folder), "num_speculative_tokens": k, **(config or {})}
    engine = {"strict": True, "seed": 0} | engine
    with LLM(
        tiny_llama() if model is None else model,
        speculative_config=speculative if folder else None,
        plugins=["spy"],
        manager=manager,
        **engine,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    return texts, spy, [output.outputs[0].spec_decode_metrics for output in outputs]


class Loaded:
    """As much of a target as heads are loaded for."""

    hidden_size, vocab_size, tokenizer = 32, 64, None
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, model: Any) -> None:
        self.model = model


def expected_draft(model: Any, folder: Path, text: Sequence[int], count: int) -> list[int]:
    """What the heads draft after ``text``, from transformers' own hidden states."""
    heads, space = load_heads(Checkpoint.read(folder), Loaded(model), 4)
    with torch.no_grad():
        hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]  # after the final norm
        features = heads(hidden[0, -2:-1])
        logits = torch.cat([heads.logits(features[:, head], head) for head in range(count)]) if count else None
    return [] if logits is None else space.to_target_ids(space.restrict(logits).argmax(-1)).tolist()


def truncated_tensors() -> dict[str, torch.Tensor]:
    tensors = sample_tensors({**SAMPLE_CONFIG, "truncated_vocab_size": 5}, num_outputs=1)
    return {**tensors, "token_map": torch.tensor([3, 60, 19, 7, 41])}


KINDS: Mapping[str, Mapping[str, Any]] = {
    "own": {},
    "shared": {"tensors": sample_tensors(SAMPLE_CONFIG, num_outputs=1), **SHARED},
    "targets": {"tensors": sample_tensors(SAMPLE_CONFIG, num_outputs=0), **SHARED},
    "truncated": {"tensors": truncated_tensors(), **TRUNCATED},
}
"""Output heads: one each, one for all, the target's own, and one that knows five tokens."""


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_start_from_the_state_before_the_newest_token(
    save: Save, kind: str, max_num_batched_tokens: int
) -> None:
    """In whatever company, with prompts in chunks or whole, and after steps without a draft (K = 0)."""
    folder, model = save(**KINDS[kind]), tiny_llama()
    plain, _, _ = decode(None)
    for gap in (1, 3):
        text, spy, _ = decode(folder, gap=gap, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=3)
        assert text == plain
        assert len(spy.drafts) >= 20
        assert len({tuple(drafted) for _, drafted in spy.drafts}) > 3
        for before, drafted in spy.drafts:
            assert drafted == expected_draft(model, folder, before, len(drafted))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_B26_greedy_text_is_the_plain_text(save: Save, k: int) -> None:
    plain, _, _ = decode(None)
    text, spy, _ = decode(save(), k)
    assert text == plain
    assert max(len(drafted) for _, drafted in spy.drafts) == k


def constant_llama() -> Any:
    """A tiny model that goes round: token t is followed by t + 1, whatever came before."""
    model = tiny_llama(tie_word_embeddings=False, hidden_size=64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(64))
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.copy_(torch.eye(64).roll(1, 0))
    return model


def round_tensors(wrong: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """Heads that draft t + 2, t + 3, ... after the state that read t; nonsense where t is in ``wrong``."""
    tensors = sample_tensors({**SAMPLE_CONFIG, "hidden_size": 64})
    for head in range(4):
        tensors[f"blocks.{head}.layers.0.weight"].zero_()
        rows = torch.eye(64).roll(head + 2, 0)
        rows[:, list(wrong)] = rows[:, list(wrong)].roll(7, 0)
        tensors[f"lm_heads.{head}.weight"] = rows.contiguous()
    return tensors


def test_right_heads_are_accepted_whole_and_wrong_ones_leave_no_trace(save: Save) -> None:
    plain, _, _ = decode(None, model=constant_llama())
    assert plain[1] == list(range(4, 28))
    right = save("right", tensors=round_tensors(), hidden_size=64)
    text, _, metrics = decode(right, model=constant_llama())
    assert text == plain
    assert all(each.num_accepted_tokens == each.num_draft_tokens > 0 for each in metrics)
    wrong = save("wrong", tensors=round_tensors(range(0, 64, 3)), hidden_size=64)
    text, _, metrics = decode(wrong, model=constant_llama())
    assert text == plain
    assert all(0 < each.num_accepted_tokens < each.num_draft_tokens for each in metrics)


@pytest.mark.parametrize("kind", KINDS)
def test_each_request_is_drafted_for_as_alone(save: Save, kind: str) -> None:
    folder = save(**KINDS[kind])
    _, together, _ = decode(folder)
    for prompt in PROMPTS:
        _, alone, _ = decode(folder, prompts=[prompt])
        assert all(each in together.drafts for each in alone.drafts)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_drafts_are_drawn_from_their_law(save: Save, kind: str) -> None:
    """The host checks shapes and ids of the laws; that drafts follow them is the sampler's own test."""
    folder, model = save(**KINDS[kind]), tiny_llama()
    params = SamplingParams(temperature=30.0, seed=3, max_tokens=24, ignore_eos=True)
    sampled = {"draft_sample_method": "probabilistic"}
    first, spy, _ = decode(folder, params=params, config=sampled)
    again, _, _ = decode(folder, params=params, config=sampled)
    assert first == again
    assert any(ids != expected_draft(model, folder, text, len(ids)) for text, ids in spy.drafts)
    _, greedy, _ = decode(folder, params=params)
    assert all(ids == expected_draft(model, folder, text, len(ids)) for text, ids in greedy.drafts)


class LawSpy:
    """Keeps each draft's text, tokens and, row by row, the logits of its laws."""

    def __init__(self) -> None:
        self.drafts: list[tuple[list[int], int, torch.Tensor]] = []

    @hookimpl(wrapper=True)
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Any:
        draft: Draft | None = yield
        if draft is not None and draft.num_slots:
            logits = torch.cat([span.law.draft_logits for span in draft.laws])  # type: ignore[union-attr]
            start = 0
            for row, count in enumerate(draft.num_draft_tokens):
                self.drafts.append((batch.token_ids[row].tolist(), count, logits[start : start + count]))
                start += count
        return draft


@pytest.mark.parametrize("kind", KINDS)
def test_each_slots_law_is_that_of_its_head(save: Save, kind: str) -> None:
    """Row by row: the head's own logits at the request's temperature, whatever else is in the batch."""
    folder, model, spy, manager = save(**KINDS[kind]), tiny_llama(), LawSpy(), ProcessManager()
    manager.register(MethodPlugin(MethodSpec("spy", "wrapper", lambda config, context: spy)), name="spy")
    config = {"method": "medusa", "model": str(folder), "draft_sample_method": "probabilistic"}
    params = [SamplingParams(temperature=20.0, seed=3, max_tokens=8 + row, ignore_eos=True) for row in range(4)]
    with LLM(tiny_llama(), speculative_config=config, plugins=["spy"], manager=manager, strict=True) as llm:
        llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    heads, space = load_heads(Checkpoint.read(folder), Loaded(model), 4)
    assert len({count for _, count, _ in spy.drafts}) > 2, "ragged drafts, or the order of rows says nothing"
    for text, count, logits in spy.drafts:
        with torch.no_grad():
            hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
            features = heads(hidden[0, -2:-1])
            for head in range(count):
                expected = space.restrict(heads.logits(features[:, head], head))[0] / 20.0
                torch.testing.assert_close(logits[head], expected, rtol=0, atol=1e-4)


def test_bfloat16_heads_follow_the_target(save: Save) -> None:
    texts, spy, _ = decode(save(), model=tiny_llama().bfloat16())
    assert all(len(text) == 24 for text in texts)
    assert spy.drafts


def make_target() -> TargetRunner:
    return TargetRunner(tiny_llama(), max_num_seqs=8, max_model_len=64, max_query_tokens=8)


def make_proposer(context: PluginContext, **keys: Any) -> object:
    with tempfile.TemporaryDirectory() as folder:
        options = MedusaOptions(model=str(write_sample(Path(folder))), **keys)
        return build_proposer(PluginConfig("medusa", 4, options), context)


class TestConformance(ProposerConformance):
    rig = Rig(make_target=make_target, num_tokens=24)

    def make_proposer(self, context: PluginContext) -> object:
        return make_proposer(context)
