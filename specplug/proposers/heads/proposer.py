"""Drafting with a head: token by token on its own outputs, or all tokens at once behind masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch

from specplug.draft_space import DraftSpace
from specplug.hooks.markers import hookimpl
from specplug.proposers.base import Proposer, rows_to_draft
from specplug.proposers.draft_sampling import DraftRow, DraftSampler, is_drafted_greedily
from specplug.proposers.heads.reader import Head, HeadReader
from specplug.proposers.model_proposer import DRAFT_TOO_SHORT
from specplug.types import Batch, Draft, LawSpan, OneHot, Request, cumulative

__all__ = ["HeadProposer"]


class _Wanted(NamedTuple):
    """A request that gets a draft of ``num_tokens``, the first of which is slot ``first``."""

    request_id: str
    first: int
    num_tokens: int


class HeadProposer(Proposer):
    """A proposer whose drafts come from a head on the target's hidden states.

    Greedy requests, and all without ``is_probabilistic``, get the arg-max of the head's logits (law ``one_hot``);
    others a draw from the processed logits, which are their law. ``confidence`` is the largest probability of each
    slot's law.
    """

    def __init__(
        self,
        head: Head,
        reader: HeadReader,
        space: DraftSpace,
        *,
        name: str,
        is_probabilistic: bool = False,
        mask: tuple[int, torch.Tensor] | None = None,
    ) -> None:
        """``space``: between the head's output and the target. ``mask``: token and features ``[1, hidden]`` that stand
        for the tokens to be drafted, of a head that drafts them all in one forward."""
        self.head = head
        self.name = name
        self.is_probabilistic = is_probabilistic
        self.hidden_state_layers = tuple(sorted(set(head.layers)))
        self.laws: frozenset[str] = frozenset({"one_hot"})
        if is_probabilistic:
            self.laws |= {"dense", "indirect"}
        self._reader = reader
        self._space = space
        self._mask = mask

    @hookimpl
    def specplug_finish_request(self, request: Request) -> None:
        self._reader.forget(request.request_id)

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        self._reader.advance(batch, [row for row, request in enumerate(batch.requests) if self._drafts_for(request)])

    def _drafts_for(self, request: Request) -> bool:
        switches = request.speculation
        return bool(switches.get("enabled", True)) and switches.get("method", self.name) == self.name

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        """Draft for every row that has a limit and whose text is known."""
        counts = [0] * len(batch)
        skip_reasons: list[str | None] = [None] * len(batch)
        for row in rows_to_draft(batch, limits):
            request_id = batch.requests[row].request_id
            counts[row] = max(0, min(limits[row], self._room(request_id)))
            if not counts[row]:
                skip_reasons[row] = DRAFT_TOO_SHORT
        draft = self._draft(batch, counts) if any(counts) else Draft.empty(len(batch))
        return replace(draft, skip_reasons=tuple(skip_reasons)) if any(skip_reasons) else draft

    def _room(self, request_id: str) -> int:
        """Most tokens that can be drafted for a request now."""
        return self._reader.room(request_id) if request_id in self._reader else 0

    def _draft(self, batch: Batch, counts: Sequence[int]) -> Draft:
        rows = self._wanted(batch, counts)
        with torch.inference_mode():
            return self._draft_at_once(batch, counts, rows) or self._draft_by_depth(batch, counts, rows)

    def _wanted(self, batch: Batch, counts: Sequence[int]) -> list[_Wanted]:
        """The requests that get a draft, in the order of the reader's rows."""
        spans = zip(batch.requests, pairwise(cumulative(counts)), strict=True)
        found = {
            request.request_id: _Wanted(request.request_id, start, stop - start)
            for request, (start, stop) in spans
            if stop > start
        }
        return [found[request_id] for request_id in self._reader.in_order(list(found))]

    def _draft_at_once(self, batch: Batch, counts: Sequence[int], rows: list[_Wanted]) -> Draft | None:
        """Greedy drafts of one length, if the head makes such in one call. None: nothing was drafted."""
        chain, count = self.head.chain, rows[0].num_tokens
        if chain is None or self._mask is not None or any(row.num_tokens != count for row in rows):
            return None
        drafted_for = (params for params, num in zip(batch.sampling_params, counts, strict=True) if num)
        if self.is_probabilistic and not all(map(is_drafted_greedily, drafted_for)):
            return None
        num_slots = count * len(rows)
        token_ids = torch.empty(num_slots, dtype=torch.int64, device=self._reader.device)
        confidence = torch.empty(num_slots, dtype=torch.float32, device=self._reader.device)
        laws = (LawSpan(0, num_slots, OneHot()),)
        draft = Draft(token_ids, tuple(counts), laws, confidence=confidence)
        if not self._reader.read_chain(chain, [row.request_id for row in rows], count, token_ids, confidence):
            return None
        if len(rows) > 1:
            _sort_rows([row.first for row in rows], token_ids, confidence)
        return draft

    def _draft_by_depth(self, batch: Batch, counts: Sequence[int], rows: list[_Wanted]) -> Draft:
        """One forward for the tokens of one depth, or for all tokens behind masks."""
        sampler = DraftSampler(
            [DraftRow.of(batch, row, count) for row, count in enumerate(counts) if count],
            is_probabilistic=self.is_probabilistic,
            device=self._reader.device,
            kernels=self.head.kernels,
        )
        self._draw(rows, sampler)
        return Draft(
            draft_token_ids=self._space.to_target_ids(sampler.token_ids),
            num_draft_tokens=tuple(counts),
            laws=sampler.laws(self._space),
            confidence=sampler.confidence,
        )

    def _draw(self, rows: list[_Wanted], sampler: DraftSampler) -> None:
        outputs = self._reader.read([row.request_id for row in rows], self._mask, [row.num_tokens for row in rows])
        if self._mask is not None:
            slots = [row.first + depth for row in rows for depth in range(row.num_tokens)]
            self._choose(outputs, slots, sampler)
            return
        chosen = self._choose(outputs, [row.first for row in rows], sampler)
        for depth in range(1, max(row.num_tokens for row in rows)):
            going_on = [place for place, row in enumerate(rows) if row.num_tokens > depth]
            if len(going_on) < len(rows):
                index = torch.tensor(going_on, device=outputs.device)
                outputs, chosen = outputs[index], chosen[index]
                rows = [rows[place] for place in going_on]
            token_ids = self._space.to_target_ids(chosen)
            outputs = self._reader.append(token_ids, outputs, [row.request_id for row in rows])
            chosen = self._choose(outputs, [row.first + depth for row in rows], sampler)

    def _choose(self, outputs: torch.Tensor, slots: Sequence[int], sampler: DraftSampler) -> torch.Tensor:
        return sampler.choose(self._space.restrict(self.head.logits(outputs)), slots)


def _sort_rows(first_slots: Sequence[int], *parts: torch.Tensor) -> None:
    """In place: runs of one length, each of which belongs to ``first_slots`` of its number, to where they belong."""
    order = sorted(range(len(first_slots)), key=first_slots.__getitem__)
    if order != [*range(len(order))]:
        for part in parts:
            runs = part.view(len(order), -1)
            runs.copy_(runs[order])
