"""Proposers that are broken on purpose: each must fail the check that is about its fault, before any other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from specplug.hooks import hookimpl
from specplug.methods import Capabilities, PluginContext
from specplug.testing import CHECKS, CheckFailed, Rig
from specplug.types import Batch, Dense, Draft, LawSpan, OneHot, Request, TokenIds


def look_back(token_ids: Sequence[int], limit: int) -> list[int]:
    """What followed the last token when it stood in the text before."""
    ids = list(token_ids)
    for position in range(len(ids) - 2, -1, -1):
        if ids[position] == ids[-1]:
            return ids[position + 1 :][:limit]
    return []


class Right:
    """Nothing is wrong with it; the others change one thing."""

    def __init__(self, context: PluginContext) -> None:
        self.context = context

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft | None:
        return Draft.from_lists(self.rows(batch, limits))

    def rows(self, batch: Batch, limits: Sequence[int]) -> list[list[int]]:
        return [self.row(ids, limit) for ids, limit in zip(batch.token_ids, limits, strict=True)]

    def row(self, token_ids: TokenIds, limit: int) -> list[int]:
        return look_back(token_ids, limit)


class Contract:
    """Faults that check_contract must find."""

    class IgnoresLimits(Right):
        def row(self, token_ids: TokenIds, limit: int) -> list[int]:
            return look_back(token_ids, 4)

    class LeavesOutRows(Right):
        def rows(self, batch: Batch, limits: Sequence[int]) -> list[list[int]]:
            return [row for row in super().rows(batch, limits) if row]

    class ProposesVocabSize(Right):
        def row(self, token_ids: TokenIds, limit: int) -> list[int]:
            return [self.context.session.vocab_size][:limit]

    class ReturnsLists(Right):
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Any:
            return self.rows(batch, limits)

    class CountsOneTooMany(Right):
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            draft = Draft.from_lists(self.rows(batch, limits))
            counts = (draft.num_draft_tokens[0] + 1, *draft.num_draft_tokens[1:])
            return Draft(draft.draft_token_ids, counts, draft.laws)

    class LawsLeaveASlotOut(Right):
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            draft = Draft.from_lists(self.rows(batch, limits))
            laws = (LawSpan(0, draft.num_slots - 1, OneHot()),)
            return Draft(draft.draft_token_ids, draft.num_draft_tokens, laws)

    class UndeclaredLaw(Right):
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            return self.with_law(batch, limits, probs_of_drafted=1.0)

        def with_law(self, batch: Batch, limits: Sequence[int], *, probs_of_drafted: float) -> Draft:
            import torch

            draft = Draft.from_lists(self.rows(batch, limits))
            if not draft.num_slots:
                return draft
            probs = torch.ones(draft.num_slots, self.context.session.vocab_size)
            probs[range(draft.num_slots), draft.draft_token_ids] = probs_of_drafted
            law = Dense(probs.log())
            return Draft(draft.draft_token_ids, draft.num_draft_tokens, (LawSpan(0, draft.num_slots, law),))

    class ImpossibleUnderItsLaw(UndeclaredLaw):
        rig = Rig(capabilities=Capabilities(laws=frozenset({"dense"})))

        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            return self.with_law(batch, limits, probs_of_drafted=0.0)

    class ConfidenceAboveOne(Right):
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            import torch

            draft = Draft.from_lists(self.rows(batch, limits))
            confidence = torch.full((draft.num_slots,), 1.5)
            return Draft(draft.draft_token_ids, draft.num_draft_tokens, draft.laws, confidence=confidence)

    class UnmarkedOverride(Right):
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            return Draft.from_lists(self.rows(batch, limits))

    class DefaultArgument(Right):
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int] = ()) -> Draft:
            return Draft.from_lists(self.rows(batch, limits))

    class MisspeltHook(Right):
        @hookimpl
        def specplug_advanse(self, batch: Batch) -> None:
            pass

    class WritesIntoTheText(Right):
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            for token_ids in batch.token_ids:
                array = token_ids.array.base
                if array is not None:
                    array[-1] = (array[-1] + 1) % 8
            return Draft.from_lists(self.rows(batch, limits))

    class RaisesAtSmallLimits(Right):
        def row(self, token_ids: TokenIds, limit: int) -> list[int]:
            if limit not in (0, 4):
                raise IndexError(limit)
            return look_back(token_ids, limit)


class Proposes:
    class AlwaysDeclines(Right):
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft | None:
            return None


class BatchPermutation:
    class KeepsStateByRow(Right):
        def __init__(self, context: PluginContext) -> None:
            super().__init__(context)
            self.texts: list[list[int]] = [[] for _ in range(64)]

        @hookimpl
        def specplug_advance(self, batch: Batch) -> None:
            for text, new in zip(self.texts, batch.new_token_ids, strict=False):
                text.extend(new)

        def rows(self, batch: Batch, limits: Sequence[int]) -> list[list[int]]:
            rows = zip(self.texts, batch.token_ids, limits, strict=False)
            return [look_back([*text, ids[-1]], limit) for text, ids, limit in rows]

    class LooksIntoOtherRows(Right):
        def rows(self, batch: Batch, limits: Sequence[int]) -> list[list[int]]:
            return [
                look_back([*batch.token_ids[0], ids[-1]], limit)
                for ids, limit in zip(batch.token_ids, limits, strict=True)
            ]

    class SharesARandomGenerator(Right):
        def __init__(self, context: PluginContext) -> None:
            super().__init__(context)
            self.rng = random.Random(0)

        def row(self, token_ids: TokenIds, limit: int) -> list[int]:
            return [self.rng.randrange(8) for _ in range(limit)]


class _KeepsText(Right):
    """Follows the text by ``advance``."""

    def __init__(self, context: PluginContext) -> None:
        super().__init__(context)
        self.texts: dict[str, list[int]] = {}

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        for request_id, new in zip(batch.request_ids, batch.new_token_ids, strict=True):
            self.texts.setdefault(request_id, []).extend(new)

    def rows(self, batch: Batch, limits: Sequence[int]) -> list[list[int]]:
        rows = zip(batch.request_ids, batch.token_ids, limits, strict=True)
        return [look_back([*self.texts.get(request_id, ()), ids[-1]], limit) for request_id, ids, limit in rows]


class Lifecycle:
    class NeverForgetsARequest(_KeepsText):
        pass

    class NeedsAStepBeforeTheEnd(_KeepsText):
        @hookimpl
        def specplug_finish_request(self, request: Request) -> None:
            del self.texts[request.request_id]

    class OneObjectForAllSessions(Right):
        only: Any = None

        def __new__(cls, context: PluginContext) -> Any:
            cls.only = cls.only or super().__new__(cls)
            return cls.only


class LeakedState:
    class RemembersAborted(_KeepsText):
        @hookimpl
        def specplug_start_request(self, request: Request) -> None:
            self.texts[request.request_id] = []

        @hookimpl
        def specplug_finish_request(self, request: Request, reason: str) -> None:
            if reason != "abort":
                del self.texts[request.request_id]

    class KeepsAHistory(Right):
        def __init__(self, context: PluginContext) -> None:
            super().__init__(context)
            self.history: list[int] = []

        @hookimpl
        def specplug_finish_request(self, request: Request) -> None:
            self.history.append(len(request.prompt_token_ids))


class Rollback:
    class MovesWhenItProposes(Right):
        """Copies the prompt, from where its last proposal ended."""

        def __init__(self, context: PluginContext) -> None:
            super().__init__(context)
            self.positions: dict[str, int] = {}

        @hookimpl
        def specplug_finish_request(self, request: Request) -> None:
            self.positions.pop(request.request_id, None)

        def rows(self, batch: Batch, limits: Sequence[int]) -> list[list[int]]:
            drafts = []
            for request, limit in zip(batch.requests, limits, strict=True):
                start = self.positions.get(request.request_id, 0)
                drafts.append(request.prompt_token_ids[start : start + limit])
                self.positions[request.request_id] = start + len(drafts[-1])
            return drafts


class GreedyEquality:
    class ChangesTheTemperature(Right):
        @hookimpl
        def specplug_start_request(self, request: Request) -> None:
            object.__setattr__(request.sampling_params, "temperature", 50.0)


class LengthLimits:
    class FailsNearTheEnd(Right):
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            if min(batch.remaining) < 4:
                raise IndexError("no room for four tokens")
            return Draft.from_lists(self.rows(batch, limits))


class EosInsideDraft:
    class StopsAtAGuessedEnd(Right):
        def __init__(self, context: PluginContext) -> None:
            super().__init__(context)
            self.ended: set[str] = set()

        @hookimpl
        def specplug_finish_request(self, request: Request) -> None:
            self.ended.discard(request.request_id)

        def rows(self, batch: Batch, limits: Sequence[int]) -> list[list[int]]:
            ids = batch.request_ids
            drafts = [[] if i in self.ended else row for i, row in zip(ids, super().rows(batch, limits), strict=True)]
            ends = self.context.session.eos_token_ids
            self.ended.update(i for i, row in zip(ids, drafts, strict=True) if ends & set(row))
            return drafts


class HookCalls:
    class CallsItselfForEachRow(Right):
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            if len(batch) == 1:
                return Draft.from_lists(self.rows(batch, limits))
            alone = [
                self.specplug_propose(batch=batch.select([row]), limits=[limits[row]]) for row in range(len(batch))
            ]
            return Draft.from_lists([draft.draft_token_ids.tolist() for draft in alone])


class SecondProcess:
    class DependsOnHashes(Right):
        def row(self, token_ids: TokenIds, limit: int) -> list[int]:
            return [hash(str(token_ids[-1])) % 8][:limit]


GROUPS = {
    "contract": Contract,
    "proposes": Proposes,
    "batch_permutation": BatchPermutation,
    "lifecycle": Lifecycle,
    "leaked_state": LeakedState,
    "rollback": Rollback,
    "greedy_equality": GreedyEquality,
    "length_limits": LengthLimits,
    "eos_inside_draft": EosInsideDraft,
    "hook_calls": HookCalls,
    "second_process": SecondProcess,
}
BROKEN = [
    pytest.param(check, kind, id=f"{check}-{kind.__name__}")
    for check, group in GROUPS.items()
    for kind in vars(group).values()
    if isinstance(kind, type)
]


def _fails(check: str, kind: type[Right]) -> bool:
    try:
        CHECKS[check](kind, getattr(kind, "rig", Rig()))
    except CheckFailed:
        return True
    return False


@pytest.mark.parametrize(("check", "kind"), BROKEN)
def test_broken_proposer_fails_the_check_about_its_fault_first(check: str, kind: type[Right]) -> None:
    names = list(CHECKS)
    assert not [name for name in names[: names.index(check)] if _fails(name, kind)]
    assert _fails(check, kind)


def test_every_check_has_a_broken_proposer() -> None:
    assert list(GROUPS) == list(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_the_unbroken_original_passes(check: str) -> None:
    CHECKS[check](Right, Rig())
