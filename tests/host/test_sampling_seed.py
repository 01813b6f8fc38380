"""Seeds: rows B63, B64, B65 and B67."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specplug import LLM, Draft, RequestOutput, SamplingParams, hookimpl
from specplug.testing.models import tiny_llama
from specplug.testing.proposers import OracleProposer, RandomProposer, SamplingProposer
from specplug.testing.toys import TableTarget
from specplug.types import Batch

Decode = Callable[..., list[RequestOutput]]
UNIFORM = [1 / 8] * 8


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


class SelfDraft:
    """Drafts greedily with the target's own model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        return Draft.from_lists(
            [self.row(text.tolist(), limit) for text, limit in zip(batch.token_ids, limits, strict=True)]
        )

    def row(self, text: list[int], limit: int) -> list[int]:
        start = len(text)
        for _ in range(limit):
            logits = self.model(torch.tensor([text]), use_cache=False, attention_mask=None).logits
            text.append(int(logits[0, -1].argmax()))
        return text[start:]


def test_B63_a_seed_fixes_the_text_whatever_the_global_random_state(decode: Decode) -> None:
    params = SamplingParams(temperature=2.0, seed=42, max_tokens=16, ignore_eos=True)
    texts = []
    for disturbance in (1, 2):
        torch.manual_seed(disturbance)
        random.seed(disturbance)
        np.random.seed(disturbance)
        texts.append(ids(decode(tiny_llama(), [[3, 4, 5]], params, SelfDraft(tiny_llama(seed=0)), 3)))
    assert texts[0] == texts[1]
    assert texts[0] == ids(decode(tiny_llama(), [[3, 4, 5]], params))


def test_B64_seeded_and_unseeded_rows_in_one_batch(decode: Decode) -> None:
    target = TableTarget(probs=[0.02, 0.3, 0.28, 0.2, 0.2], eos_token_id=None)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=24) for seed in (None, 7, None)]
    outputs = ids(decode(target, [[1]] * 3, params, RandomProposer(5)))
    assert outputs[1] == ids(decode(target, [[1]], params[1]))[0]
    assert outputs[0] != outputs[2]
    for row in outputs:
        assert all(0 <= token_id < 5 for token_id in row)
        assert row.count(0) < 12  # no run of zeros


def test_B65_seeds_matter_when_sampling_and_not_when_greedy(decode: Decode) -> None:
    target = TableTarget(probs=UNIFORM, eos_token_id=None)
    sampled = [SamplingParams(seed=seed, max_tokens=16) for seed in (0, 10, 20)]
    assert len({tuple(row) for row in ids(decode(target, [[1]] * 3, sampled, RandomProposer(8)))}) == 3
    greedy = [SamplingParams(temperature=0.0, seed=seed, max_tokens=16) for seed in (0, 10, 20)]
    assert len({tuple(row) for row in ids(decode(target, [[1]] * 3, greedy, RandomProposer(8)))}) == 1


class GrowingLimit:
    """A heuristic draft length, kept per request: one more after full acceptance, one less after none."""

    def __init__(self) -> None:
        self.limits: dict[str, int] = {}
        self.used: list[int] = []

    @hookimpl
    def specplug_start_request(self, request: Any) -> None:
        self.limits[request.request_id] = 1

    @hookimpl
    def specplug_plan(self, batch: Batch) -> list[int]:
        return [self.limits[request_id] for request_id in batch.request_ids]

    @hookimpl
    def specplug_accept_metrics(self, outcome: Any) -> None:
        for row in outcome.rows:
            if row.num_draft_tokens:
                self.used.append(row.num_draft_tokens)
                step = 1 if row.num_accepted_tokens == row.num_draft_tokens else -1
                self.limits[row.request_id] = max(1, self.limits[row.request_id] + step)

    @hookimpl
    def specplug_finish_request(self, request: Any) -> None:
        del self.limits[request.request_id]


class AdaptiveOracle(GrowingLimit, OracleProposer):
    def __init__(self, continuations: Any, num_right: int) -> None:
        GrowingLimit.__init__(self)
        OracleProposer.__init__(self, continuations, vocab_size=8, num_right=num_right)


def test_B67_an_adaptive_draft_length_starts_anew_with_each_request(make_llm: Callable[..., LLM]) -> None:
    target = TableTarget(probs=UNIFORM, eos_token_id=None)
    params = SamplingParams(seed=3, max_tokens=20)
    with make_llm(target) as llm:
        [plain] = ids(llm.generate([[1]], params))
    proposer = AdaptiveOracle({(1,): plain}, num_right=3)
    runs = []
    with make_llm(target, proposer, 6) as llm:
        for _ in range(2):
            proposer.used.clear()
            runs.append((ids(llm.generate([[1]], params)), list(proposer.used)))
    assert runs[0] == runs[1]
    assert runs[0][0] == [plain]
    assert max(runs[0][1]) > 2


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_sampled_drafts_repeat_under_a_seed_whoever_is_in_the_batch(make_llm: Callable[..., LLM], rule: str) -> None:
    probs = [0.5, 0.3, 0.2]
    params = SamplingParams(seed=11, max_tokens=30)
    texts = []
    for others in (0, 3):
        proposer = SamplingProposer([0.2, 0.5, 0.3], seed=1)
        target = TableTarget(probs=probs, eos_token_id=None)
        with make_llm(target, proposer, 3, laws=frozenset({"dense"}), rule=rule) as llm:
            prompts = [[0]] * others + [[1]]
            rest = [SamplingParams(seed=seed, max_tokens=30) for seed in range(others)]
            texts.append(ids(llm.generate(prompts, [*rest, params]))[-1])
    assert texts[0] == texts[1]
