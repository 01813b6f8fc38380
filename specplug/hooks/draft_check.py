"""The check of a draft: nothing that a proposer or a wrapper returns reaches the target unseen.

It runs once per step on the whole batch, so it works on counts per row and on whole tensors, never per token.
Off the CPU, values are not read (that would wait for the device): they are made harmless instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from operator import gt
from typing import TYPE_CHECKING, Any

from specplug.hooks.faults import FaultLog, Malformed
from specplug.hooks.step import CurrentCall
from specplug.types import PLACEHOLDER_ID, Dense, Draft, Indirect, LawSpan, OneHot, SourceSpan, Unknown, cumulative

if TYPE_CHECKING:
    import torch

__all__ = ["DraftCheck"]

_DROPPED = "the draft is dropped"


class DraftCheck:
    """Checks a draft against the current call, clips it to the limits, and names its source."""

    def __init__(self, call: CurrentCall, *, vocab_size: int, faults: FaultLog) -> None:
        import torch

        self._call = call
        self._vocab_size = vocab_size
        self._faults = faults
        self._torch = torch
        self._integer_dtypes = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})

    def __call__(self, answer: Any, plugin: str) -> Draft:
        """The draft to use. Raises ``Malformed`` when it cannot be used at all."""
        if not isinstance(answer, Draft):
            advice = f"{_DROPPED}; return a Draft, such as Draft.from_lists(one list of ids per row), or None"
            raise Malformed("type", f"returned {type(answer).__name__}, not a Draft", advice)
        counts = self._counts(answer)
        num_slots = sum(counts)
        ids = self._ids(answer, num_slots)
        if num_slots == 0:
            return answer
        self._check_spans("laws", answer.laws, num_slots)
        for span in answer.laws:
            ids = self._lawful_ids(ids, span, counts)
        ids = self._in_range(ids, counts)
        if answer.confidence is not None and tuple(answer.confidence.shape) != (num_slots,):
            seen = f"confidence has shape {list(answer.confidence.shape)} for {num_slots} tokens"
            raise Malformed("confidence", seen, f"{_DROPPED}; give one value per draft token, or None")
        sources = answer.sources
        if sources:
            self._check_spans("sources", sources, num_slots)
        else:
            sources = (SourceSpan(0, num_slots, plugin),)
        if ids is not answer.draft_token_ids or sources is not answer.sources or counts is not answer.num_draft_tokens:
            answer = replace(answer, draft_token_ids=ids, num_draft_tokens=counts, sources=sources)
        return self._clipped(answer, plugin)

    def recheck(self, draft: Draft, plugin: str) -> Draft:
        """A checked draft that a wrapper handed back: its ids may have been changed in place."""
        ids = (
            self._in_range(draft.draft_token_ids, draft.num_draft_tokens) if draft.num_slots else draft.draft_token_ids
        )
        return draft if ids is draft.draft_token_ids else replace(draft, draft_token_ids=ids)

    def _counts(self, draft: Draft) -> tuple[int, ...]:
        counts, batch_size = draft.num_draft_tokens, len(self._call.batch)
        advice = f"{_DROPPED}; num_draft_tokens is a tuple with one int of at least 0 per row of the batch"
        if not isinstance(counts, tuple | list):
            raise Malformed("rows", f"num_draft_tokens is {type(counts).__name__}", advice)
        if len(counts) != batch_size:
            raise Malformed("rows", f"returned counts for {len(counts)} rows, the batch has {batch_size}", advice)
        if {*map(type, counts)} - {int} or (counts and min(counts) < 0):
            raise Malformed("rows", f"num_draft_tokens is {tuple(counts)[:8]!r}", advice)
        return counts if isinstance(counts, tuple) else tuple(counts)

    def _ids(self, draft: Draft, num_slots: int) -> torch.Tensor:
        ids = draft.draft_token_ids
        if not isinstance(ids, self._torch.Tensor) or ids.dtype not in self._integer_dtypes:
            kind = ids.dtype if isinstance(ids, self._torch.Tensor) else type(ids).__name__
            if num_slots == 0 and isinstance(ids, self._torch.Tensor):
                return ids  # torch.tensor([]) is float; nothing in it is ever read
            advice = f"{_DROPPED}; draft_token_ids is an integer tensor [num_draft_tokens]"
            raise Malformed("type", f"draft_token_ids is {kind}", advice)
        if ids.dim() != 1 or ids.shape[0] != num_slots:
            seen = f"draft_token_ids has shape {list(ids.shape)}, num_draft_tokens sums to {num_slots}"
            raise Malformed("count", seen, f"{_DROPPED}; flatten the rows' ids into one [num_draft_tokens] tensor")
        return ids

    def _check_spans(self, what: str, spans: Sequence[LawSpan] | Sequence[SourceSpan], num_slots: int) -> None:
        reached = 0
        for span in spans:
            if span.start != reached or span.stop < span.start:
                break
            reached = span.stop
        else:
            if reached == num_slots:
                return
        shown = [(span.start, span.stop) for span in spans[:8]]
        seen = f"{what} span the slots {shown}, the draft has {num_slots}"
        raise Malformed(what, seen, f"{_DROPPED}; give spans that cover every slot once, in order")

    def _lawful_ids(self, ids: torch.Tensor, span: LawSpan, counts: Sequence[int]) -> torch.Tensor:
        """``ids``, with the placeholder where a law on a device turned out to be no law."""
        law: object = span.law
        if isinstance(law, OneHot | Unknown):
            return ids
        if not isinstance(law, Dense | Indirect):
            advice = f"{_DROPPED}; laws are OneHot, Dense, Indirect or Unknown objects"
            raise Malformed("laws", f"a law is {type(law).__name__}", advice)
        self._check_law_shapes(law, span.stop - span.start)
        if span.start == span.stop:
            return ids
        torch = self._torch
        is_law = torch.isfinite(law.draft_logits.amax(dim=-1))  # false for NaN, for +inf and for no mass at all
        if isinstance(law, Indirect):
            is_law &= torch.isfinite(law.logsumexp)
        if is_law.device.type != "cpu":
            kept = ids.clone()
            kept[span.start : span.stop].masked_fill_(~is_law.to(ids.device), PLACEHOLDER_ID)
            return kept
        if not is_law.all().item():
            slot = span.start + int(is_law.to(torch.uint8).argmin().item())
            seen = f"the law of slot {slot}, {self._request_of(slot, counts)}, has NaN, +inf, or no mass"
            raise Malformed("law_nan", seen, f"{_DROPPED}; a law is the processed logits that were sampled from")
        return ids

    def _check_law_shapes(self, law: Dense | Indirect, num_slots: int) -> None:
        logits, kind = law.draft_logits, type(law).__name__
        width = self._vocab_size if isinstance(law, Dense) else logits.shape[-1]
        shapes: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {f"{kind}.draft_logits": (logits, (num_slots, width))}
        if isinstance(law, Indirect):
            shapes["Indirect.logsumexp"] = (law.logsumexp, (num_slots,))
            shapes["Indirect.target_to_draft_ids"] = (law.target_to_draft_ids, (self._vocab_size,))
        for name, (tensor, shape) in shapes.items():
            if tuple(tensor.shape) != shape:
                seen = f"{name} has shape {list(tensor.shape)}, expected {list(shape)}"
                raise Malformed("laws", seen, f"{_DROPPED}; give one row of logits per slot of the span")

    def _in_range(self, ids: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        torch = self._torch
        if ids.device.type != "cpu":
            is_id = (ids >= 0) & (ids < self._vocab_size)
            return ids.masked_fill(~is_id, PLACEHOLDER_ID)
        low, high = torch.aminmax(ids)
        if low.item() >= 0 and high.item() < self._vocab_size:
            return ids
        slot = int(((ids < 0) | (ids >= self._vocab_size)).to(torch.uint8).argmax().item())
        seen = f"proposed id {int(ids[slot].item())} for {self._request_of(slot, counts)}"
        advice = f"{_DROPPED}; propose target ids from 0 to {self._vocab_size - 1}"
        raise Malformed("out_of_range", seen, advice)

    def _clipped(self, draft: Draft, plugin: str) -> Draft:
        counts, limits = draft.num_draft_tokens, self._call.limits
        if not any(map(gt, counts, limits)):
            return draft
        row = next(row for row, (count, limit) in enumerate(zip(counts, limits, strict=True)) if count > limit)
        request_id = self._call.batch.requests[row].request_id
        seen = f'proposed {counts[row]} tokens for request "{request_id}", whose limit is {limits[row]}'
        advice = "rows are cut to their limits; propose at most limits[row] tokens"
        self._faults.record(plugin, "specplug_propose", "too_long", seen, advice)
        return draft.truncate(limits)

    def _request_of(self, slot: int, counts: Sequence[int]) -> str:
        row = bisect_right(cumulative(counts), slot) - 1
        return f'request "{self._call.batch.requests[row].request_id}"'
