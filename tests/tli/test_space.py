"""Restricting drafts, their law, and what they may cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specplug.testing import toy_tokenizer
from specplug.tli import open_space
from specplug.tli.space import TliDraftSpace
from specplug.types import Indirect, LawSpan
from specplug.verify import reference
from specplug.verify.inputs import RowInputs, VerifyInputs

TARGET = toy_tokenizer(["a", "b", "ab", "c", "end"], eos_token_id=4)
DRAFT = toy_tokenizer(["end", "d", "c", "a", "cc", "b"], eos_token_id=0)
SHARED = {0: 3, 1: 5, 3: 2, 4: 0}
"""Target id -> draft id."""
Space = Callable[[], TliDraftSpace]


@pytest.fixture
def space(side: Any) -> TliDraftSpace:
    made = open_space(side(TARGET, 6), side(DRAFT, 8))
    assert isinstance(made, TliDraftSpace)
    return made


def test_drafts_are_restricted_to_the_shared_tokens(space: TliDraftSpace) -> None:
    logits = torch.randn(3, 8)
    restricted = space.restrict(logits)
    for draft_id in range(8):
        if draft_id in SHARED.values():
            assert torch.equal(restricted[:, draft_id], logits[:, draft_id])
        else:
            assert torch.all(restricted[:, draft_id] == -torch.inf)


def test_draft_ids_come_back_as_target_ids(space: TliDraftSpace) -> None:
    ids = torch.tensor([[3, 5], [2, 0]])
    assert space.to_target_ids(ids).tolist() == [[0, 1], [3, 4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_law_is_renormalised_over_the_shared_tokens(space: TliDraftSpace, dtype: torch.dtype) -> None:
    """Temperature after the mask: nothing of the masked tokens' mass is left."""
    logits = space.restrict(torch.randn(4, 8).to(dtype)) / 0.7
    law = space.law(logits)
    assert isinstance(law, Indirect)
    ids = law.target_to_draft_ids
    probs = torch.where(ids >= 0, (law.draft_logits[:, ids.clamp(min=0)].float() - law.logsumexp[:, None]).exp(), 0.0)
    assert torch.allclose(probs.sum(1), torch.ones(4), atol=1e-5)
    assert {t: int(d) for t, d in enumerate(ids) if d >= 0} == SHARED


# --- exactness, by enumeration ----------------------------------------------------------------------------------

UNRESTRICTED = "law not renormalised over what could be drawn"
UNPROCESSED = "law before temperature"


def total_variation(space: TliDraftSpace, seed: int, fault: str = "") -> float:
    """Between what two draft tokens and their verification emit, and the target's own law: every outcome is summed.

    The drafts are sampled at half the temperature; laws depend on the context.
    """
    rng = np.random.default_rng(seed)
    contexts = [context for length in range(3) for context in itertools.product(range(6), repeat=length)]
    target = {context: torch.from_numpy(rng.normal(0, 1.5, 6)) for context in contexts}
    raw = {context: torch.from_numpy(rng.normal(0, 1.5, 8)) for context in contexts}
    emitted: dict[tuple[int, ...], float] = {}
    processed = {context: space.restrict(logits[None])[0] / 0.5 for context, logits in raw.items()}

    def claimed(context: tuple[int, ...]) -> Indirect:
        logits = processed[context]
        if fault == UNPROCESSED:
            logits = logits * 0.5
        law = space.law(logits[None])
        assert isinstance(law, Indirect)
        reach = raw[context] / 0.5 if fault == UNRESTRICTED else logits
        return Indirect(logits[None], reach.logsumexp(-1)[None], law.target_to_draft_ids)

    for draft_ids in itertools.product(SHARED.values(), repeat=2):
        drafts = tuple(space.to_target_ids(torch.tensor(draft_ids)).tolist())
        weight = 1.0
        for slot, draft_id in enumerate(draft_ids):
            weight *= float(processed[drafts[:slot]].softmax(-1)[draft_id])
        laws = tuple(LawSpan(slot, slot + 1, claimed(drafts[:slot])) for slot in range(2))
        rows = torch.stack([target[drafts[:slot]] for slot in range(3)])
        inputs = VerifyInputs(rows, torch.tensor(drafts), (2,), laws, (RowInputs("standard"),))
        for outcome, chance in outcomes(inputs):
            emitted[outcome] = emitted.get(outcome, 0.0) + weight * chance
    return distance(emitted, target)


class Script:
    """Follows given choices, then takes the first, and notes the others."""

    def __init__(self, choices: tuple[int, ...]) -> None:
        self.choices, self.depth, self.probability = choices, 0, 1.0
        self.untried: list[tuple[int, ...]] = []

    def _choose(self, probabilities: list[float]) -> int:
        possible = [number for number, each in enumerate(probabilities) if each > 0.0]
        if self.depth == len(self.choices):
            self.untried += [(*self.choices, other) for other in possible[1:]]
            self.choices = (*self.choices, possible[0])
        chosen = self.choices[self.depth]
        self.depth += 1
        self.probability *= probabilities[chosen]
        return chosen

    def accepts(self, slot: int, chance: float) -> bool:
        return bool(self._choose([1.0 - chance, chance]))

    def draw(self, slot: int, weights: Any) -> int:
        return self._choose((weights / weights.sum()).tolist())


def outcomes(inputs: VerifyInputs) -> Iterator[tuple[tuple[int, ...], float]]:
    problem = reference.row_problem(inputs, 0)
    open_scripts: list[tuple[int, ...]] = [()]
    while open_scripts:
        script = Script(open_scripts.pop())
        yield tuple(reference.standard(problem, script)), script.probability
        open_scripts += script.untried


def distance(emitted: dict[tuple[int, ...], float], target: dict[tuple[int, ...], torch.Tensor]) -> float:
    """Of the first two tokens' joint law from the target's."""
    laws = {context: logits.softmax(-1).tolist() for context, logits in target.items()}
    joint: dict[tuple[int, ...], float] = {}
    for outcome, chance in emitted.items():
        for second in range(6) if len(outcome) == 1 else [None]:
            pair = outcome[:2] if second is None else (*outcome, second)
            share = chance if second is None else chance * laws[outcome][second]
            joint[pair] = joint.get(pair, 0.0) + share
    plain = {(a, b): laws[()][a] * laws[a,][b] for a in range(6) for b in range(6)}
    return 0.5 * sum(abs(joint.get(pair, 0.0) - plain[pair]) for pair in plain)


@pytest.mark.parametrize("seed", range(5))
def test_enumeration_of_a_toy_pair_is_exact(space: TliDraftSpace, seed: int) -> None:
    assert total_variation(space, seed) < 1e-6  # the log-sum-exp is single precision
    for fault in (UNRESTRICTED, UNPROCESSED):
        assert total_variation(space, seed, fault) > 1e-3


# --- memory -------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the largest tensor that anything makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                self.num_elements = max(self.num_elements, each.numel())
        return result


@contextmanager
def largest() -> Iterator[Largest]:
    with Largest() as mode:
        yield mode


def test_nothing_as_wide_as_the_targets_vocabulary_is_made_per_step(side: Any) -> None:
    texts = [chr(1000 + number) for number in range(900)]
    target, draft = toy_tokenizer(texts, eos_token_id=None), toy_tokenizer(texts[100:160], eos_token_id=None)
    space = open_space(side(target, 50_000), side(draft, 60))
    ids = torch.zeros(8, dtype=torch.int64)
    space.law(space.restrict(torch.randn(8, 60)))  # the tables are made once
    with largest() as seen:
        logits = space.restrict(torch.randn(8, 60))
        law = space.law(logits / 0.7)
        space.to_target_ids(ids)
    assert seen.num_elements == 8 * 60
    with largest() as wide:  # the check sees what it should
        assert isinstance(law, Indirect)
        law.draft_logits[:, law.target_to_draft_ids.clamp(min=0)]
    assert wide.num_elements >= 8 * 50_000
