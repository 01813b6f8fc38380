"""Sampled text with context-dependent parameters: its joint distribution against the exact one, for drawn drafts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specplug import LLM, SamplingParams
from specplug.testing.proposers import FixedProposer, RandomProposer, SamplingProposer
from specplug.testing.toys import MarkovTarget

VOCAB, LENGTH, NUM_DRAWS = 4, 4, 20_000
LIMIT = 420.0
"""A chi-square value that 255 degrees of freedom, the most there can be, exceed with a chance below 1e-9."""

PARAMS: dict[str, Any] = {
    "temperature": 0.9,
    "min_p": 0.05,
    "frequency_penalty": 0.8,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.3,
    "logit_bias": {3: 0.7},
    "bad_words": [[1, 2]],
}


def make_target() -> MarkovTarget:
    return MarkovTarget(vocab_size=VOCAB, scale=1.0, order=1, eos_token_id=None, max_num_seqs=200)


def probs_after(target: MarkovTarget, output: Sequence[int], params: dict[str, Any]) -> list[float]:
    """The processed distribution at one position, from the parameters' definitions. The prompt is [0]."""
    logits = list(target.logits_after(1, [0, *output]))
    for token_id, bias in params.get("logit_bias", {}).items():
        logits[token_id] += bias
    for token_id in range(VOCAB):
        count = output.count(token_id)
        if count or token_id == 0:
            factor = params.get("repetition_penalty", 1.0)
            logits[token_id] = logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
        logits[token_id] -= params.get("frequency_penalty", 0.0) * count
        logits[token_id] -= params.get("presence_penalty", 0.0) * (count > 0)
    for first, second in params.get("bad_words", []):
        if output and output[-1] == first:
            logits[second] = -math.inf
    weights = [math.exp(logit / params["temperature"]) for logit in logits]
    kept = [weight if weight >= params.get("min_p", 0.0) * max(weights) else 0.0 for weight in weights]
    return [weight / sum(kept) for weight in kept]


def exact(params: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Probability of every output of ``LENGTH`` tokens."""
    target, joint = make_target(), {}
    for output in itertools.product(range(VOCAB), repeat=LENGTH):
        joint[output] = math.prod(
            probs_after(target, output[:position], params)[token_id] for position, token_id in enumerate(output)
        )
    return joint


def chi_squared(drawn: Sequence[tuple[int, ...]], joint: dict[tuple[int, ...], float]) -> float:
    """Infinite when something impossible was drawn; cells that expect less than 5 are taken together."""
    counts = dict.fromkeys(joint, 0)
    for output in drawn:
        counts[output] += 1
    if any(counts[output] for output, prob in joint.items() if prob == 0.0):
        return math.inf
    cells = [(counts[output], prob * len(drawn)) for output, prob in joint.items() if prob > 0.0]
    rare = [cell for cell in cells if cell[1] < 5]
    large = [cell for cell in cells if cell[1] >= 5]
    if rare:
        large.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    return sum((count - expected) ** 2 / expected for count, expected in large)


@pytest.fixture
def draw(make_llm: Callable[..., LLM]) -> Callable[..., list[tuple[int, ...]]]:
    def run(proposer: Any, laws: str, rule: str) -> list[tuple[int, ...]]:
        # three tokens follow the first, drafts have up to two: accepted, recovered and bonus tokens all occur
        engine = {"laws": frozenset({laws}), "rule": rule}
        with make_llm(make_target(), proposer, 2, **engine) as llm:
            params = [SamplingParams(seed=seed, max_tokens=LENGTH, **PARAMS) for seed in range(NUM_DRAWS)]
            outputs = llm.generate([[0]] * NUM_DRAWS, params)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    return run


CASES = [
    (lambda: SamplingProposer([0.1, 0.4, 0.3, 0.2], seed=3), "dense", "standard"),
    pytest.param(lambda: SamplingProposer([0.1, 0.4, 0.3, 0.2], seed=3), "dense", "block", marks=pytest.mark.slow),
    pytest.param(lambda: RandomProposer(VOCAB), "one_hot", "match", marks=pytest.mark.slow),
    pytest.param(lambda: FixedProposer([[1, 2]] * 3), "one_hot", "standard", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("make", "laws", "rule"), CASES)
def test_sampling_distribution_is_the_exact_processed_one(
    draw: Callable[..., list[tuple[int, ...]]], make: Callable[[], Any], laws: str, rule: str
) -> None:
    drawn = draw(make(), laws, rule)
    assert chi_squared(drawn, exact(PARAMS)) < LIMIT
    # the negative controls: the same without one parameter, as if it had been ignored
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"):
        assert chi_squared(drawn, exact({key: value for key, value in PARAMS.items() if key != name})) > LIMIT
