"""The metric cases once more, through the real loop on scripted targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specplug import LLM, SamplingParams
from specplug.hooks import ProcessManager
from specplug.metrics import RequestSpecDecodeMetrics
from specplug.testing import FixedProposer, OracleProposer, ScriptedTarget, as_method

EOS = 9
PROMPT = [1, 2]


def llm_with(script: Sequence[int], proposer: object | None, k: int, **settings: Any) -> LLM:
    manager = settings.pop("manager", None) or ProcessManager()
    config = None
    if proposer is not None:
        manager.register(as_method("scripted", lambda _context: proposer))
        config = {"method": "scripted", "num_speculative_tokens": k}
    return LLM(ScriptedTarget(script, **settings), speculative_config=config, manager=manager, strict=True)


def metrics_of(llm: LLM, max_tokens: int) -> RequestSpecDecodeMetrics:
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=max_tokens))
    found = output.outputs[0].spec_decode_metrics
    assert isinstance(found, RequestSpecDecodeMetrics)
    assert found.num_emitted_tokens == len(output.outputs[0].token_ids)
    return found


def test_B106_a_proposer_that_never_matches() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(ScriptedTarget([3, 4, 5, 6, 7]), speculative_config=ngram, strict=True) as llm:
        found = metrics_of(llm, max_tokens=5)
    assert (found.draft_acceptance_rate, found.num_draft_tokens) == (None, 0)
    assert (found.mean_acceptance_length, found.num_steps) == (1.0, 5)


def test_B107_a_draft_that_is_always_right() -> None:
    script = [3, 4, 5, 6, 7] * 5
    drafts = OracleProposer({tuple(PROMPT): script}, vocab_size=16)
    with llm_with(script, drafts, 1) as llm:
        found = metrics_of(llm, max_tokens=21)
    assert (found.num_drafts, found.draft_acceptance_rate, found.mean_acceptance_length) == (10, 1.0, 2.0)


def test_B108_drafts_of_changing_length() -> None:
    drafts = FixedProposer([[4, 5, 8], [7]])
    with llm_with([3, 4, 5, 6, 7, 8], drafts, 3) as llm:
        found = metrics_of(llm, max_tokens=6)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (2, 4, 3)
    assert found.draft_acceptance_rate == 0.75


def test_B109_the_end_of_sequence_inside_the_accepted_prefix() -> None:
    script = [3, 10, EOS, 12, 13, 14, 15]
    drafts = FixedProposer([[10, EOS, 12, 13, 14, 15]])
    with llm_with(script, drafts, 6) as llm:
        found = metrics_of(llm, max_tokens=16)
    assert (found.num_drafts, found.num_accepted_tokens, found.num_verified_accepted_tokens) == (1, 2, 6)
    assert (found.num_draft_emitted_tokens, found.mean_acceptance_length) == (2, 2.0)


def test_B111_requests_sum_to_the_sessions_totals() -> None:
    drafts = FixedProposer({(1, 2): [[4, 5], [8]], (2, 1): [[4, 8, 8]]})
    with llm_with([3, 4, 5, 6, 7], drafts, 3) as llm:
        outputs = llm.generate([[1, 2], [2, 1]], SamplingParams(temperature=0.0, max_tokens=5))
        totals = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    parts = [output.outputs[0].spec_decode_metrics for output in outputs]
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert totals[f"vllm:spec_decode_{name}"] == sum(getattr(part, name) for part in parts) > 0


def test_B112_counts_follow_the_steps_and_are_absent_when_switched_off() -> None:
    def proposer() -> FixedProposer:
        return FixedProposer([[4, 5], [7, 0]])

    with llm_with([3, 4, 5, 6, 7, 8], proposer(), 2) as llm:
        found = metrics_of(llm, max_tokens=6)
    assert (found.per_step_drafted, found.per_step_accepted) == ([2, 1], [2, 1])
    blocked = ProcessManager(block=["acceptance"])
    with llm_with([3, 4, 5, 6, 7, 8], proposer(), 2, manager=blocked) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=6))
        assert output.outputs[0].spec_decode_metrics is None
        assert llm.get_metrics() == []
        assert llm.acceptance is None


@pytest.mark.parametrize(("k", "max_tokens"), [(3, 3), (3, 16), (1, 4)])
def test_every_step_emits_accepted_plus_one_before_cuts(k: int, max_tokens: int) -> None:
    script = [3, 4, 5, 6, 7, 8]
    with llm_with(script, OracleProposer({tuple(PROMPT): script}, vocab_size=16), k) as llm:
        found = metrics_of(llm, max_tokens)
    assert sum(found.histogram) == found.num_drafts
    assert found.num_accepted_tokens <= found.num_verified_accepted_tokens <= found.num_draft_tokens
    assert found.num_emitted_tokens <= found.num_steps + found.num_verified_accepted_tokens
