"""Sampled drafts of real (tiny, random) models: the text's joint distribution against the target's own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specplug import LLM, SamplingParams
from specplug.hooks import ProcessManager
from specplug.methods import PluginContext
from specplug.models.runner import TargetRunner
from specplug.proposers.autoregressive import AutoregressiveProposer
from specplug.proposers.draft_sampling import DraftSampler
from specplug.testing.models import tiny_llama
from specplug.testing.proposers import as_method
from specplug.types import Batch, Dense, Draft, Indirect, Law, LawSpan

VOCAB, LENGTH, NUM_DRAWS, PROMPT = 5, 3, 20_000, [1, 2]
LIMIT = 250.0
"""A chi-square value that 124 degrees of freedom, the most there can be, exceed with a chance below 1e-9."""
PARAMS: dict[str, Any] = {"temperature": 0.5, "top_p": 0.97}
NUM_ROWS = 400


def model(seed: int, vocab_size: int = VOCAB) -> Any:
    return tiny_llama(seed=seed, vocab_size=vocab_size, hidden_size=16, intermediate_size=16, eos_token_id=None)


def runner(module: Any) -> TargetRunner:
    return TargetRunner(module, max_num_seqs=NUM_ROWS, max_model_len=8, max_query_tokens=8)


def exact() -> dict[tuple[int, ...], float]:
    """Every output of ``LENGTH`` tokens and its chance, from plain forwards of the target."""
    outputs = list(itertools.product(range(VOCAB), repeat=LENGTH))
    with torch.inference_mode():
        logits = model(0)(input_ids=torch.tensor([[*PROMPT, *output] for output in outputs])).logits
    joint = {}
    for output, rows in zip(outputs, logits, strict=True):
        chance = 1.0
        for position, token_id in enumerate(output):
            chance *= float(_law(rows[len(PROMPT) - 1 + position])[token_id])
        joint[output] = chance
    return joint


def _law(logits: torch.Tensor) -> torch.Tensor:
    """Temperature and top-p by their definitions."""
    probs = torch.softmax(logits.double() / PARAMS["temperature"], -1)
    order = probs.argsort(descending=True)
    before = probs[order].cumsum(-1) - probs[order]
    probs[order[before >= PARAMS["top_p"]]] = 0.0
    return probs / probs.sum()


def chi_squared(drawn: Sequence[tuple[int, ...]], joint: dict[tuple[int, ...], float]) -> float:
    """Infinite when something impossible was drawn; cells that expect less than 5 are taken together."""
    counts = dict.fromkeys(joint, 0)
    for output in drawn:
        counts[output] += 1
    if any(counts[output] for output, chance in joint.items() if chance == 0.0):
        return float("inf")
    cells = [(counts[output], chance * len(drawn)) for output, chance in joint.items() if chance > 0.0]
    large = [cell for cell in cells if cell[1] >= 5]
    rare = [cell for cell in cells if cell[1] < 5]
    if rare:
        large.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    return sum((count - expected) ** 2 / expected for count, expected in large)


class ReportsRaw(AutoregressiveProposer):
    """A control: the law is the draft's softmax before temperature and top-p, as a public bug had it."""

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        draft = super().propose(batch, limits)
        return replace(draft, laws=tuple(LawSpan(each.start, each.stop, self._raw(each)) for each in draft.laws))

    def choose(self, logits: torch.Tensor, slots: Sequence[int], sampler: DraftSampler) -> torch.Tensor:
        kept = self.__dict__.setdefault("raw", {})
        if min(slots) == 0:
            kept.clear()
        kept.update(zip(slots, logits.float(), strict=True))
        return super().choose(logits, slots, sampler)

    def _raw(self, span: LawSpan) -> Law:
        rows = [self.__dict__["raw"][slot] for slot in range(span.start, span.stop)]
        return Dense(torch.stack(rows))


class NotRenormalised(AutoregressiveProposer):
    """A control: the log-sum-exp of all draft ids, of which only some have a target id."""

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        draft = super().propose(batch, limits)
        return replace(draft, laws=tuple(LawSpan(each.start, each.stop, self._wide(each.law)) for each in draft.laws))

    @staticmethod
    def _wide(law: Law) -> Law:
        if not isinstance(law, Dense):
            return law
        lse = law.draft_logits.logsumexp(-1) + 0.7  # half of the mass lay on ids that were masked
        return Indirect(law.draft_logits, lse, torch.arange(VOCAB))


def draw(kind: type[AutoregressiveProposer], *, rule: str = "standard", draft_vocab: int = VOCAB) -> list[Any]:
    """``NUM_DRAWS`` outputs with sampled drafts of two tokens: accepted, recovered and bonus tokens all occur."""

    def make(context: PluginContext) -> AutoregressiveProposer:
        return kind(runner(model(1, draft_vocab)), context, name="draft_model", is_probabilistic=True)

    manager = ProcessManager()
    manager.register(as_method("under_test", make, laws=frozenset({"dense"})), name="under_test")
    config = {"method": "under_test", "num_speculative_tokens": 2, "rejection_sample_method": rule}
    params = [SamplingParams(seed=seed, max_tokens=LENGTH, **PARAMS) for seed in range(NUM_DRAWS)]
    with LLM(runner(model(0)), speculative_config=config, manager=manager, strict=True) as llm:
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * NUM_DRAWS, params)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_sampled_drafts_leave_the_distribution_as_it_is(rule: str) -> None:
    assert chi_squared(draw(AutoregressiveProposer, rule=rule), exact()) < LIMIT


@pytest.mark.slow
def test_a_draft_with_more_ids_than_the_target_leaves_it_too() -> None:
    """Two draft ids are masked, and what is left is the law."""
    assert chi_squared(draw(AutoregressiveProposer, draft_vocab=VOCAB + 2), exact()) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("control", [ReportsRaw, NotRenormalised])
def test_a_law_that_is_not_the_sampled_one_shows(control: type[AutoregressiveProposer]) -> None:
    assert chi_squared(draw(control), exact()) > LIMIT
