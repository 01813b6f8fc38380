"""The check of a draft: nothing that a proposer or a wrapper returns reaches the target unseen.

It runs once per step on the whole batch, so it works on counts per row and on whole tensors, never per token.
Off the CPU, values are not read (that would wait for the device): they are made harmless instead.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from operator import gt, index
from typing import TYPE_CHECKING, Any

from specplug.hooks.faults import FaultLog, Malformed
from specplug.hooks.step import CurrentCall
from specplug.trees import misplaced_node, tree_of
from specplug.types import PLACEHOLDER_ID, Dense, Draft, Indirect, LawSpan, OneHot, SourceSpan, Unknown, cumulative

if TYPE_CHECKING:
    import torch

__all__ = ["DraftCheck"]

_DROPPED = "the draft is dropped"
_MAP = "Indirect.target_to_draft_ids"


class DraftCheck:
    """Checks a draft against the current call, clips it to the limits, and names its source.

    The ids come out as int64.
    """

    def __init__(self, call: CurrentCall, *, vocab_size: int, faults: FaultLog, device: str | None = None) -> None:
        """``device``: the target's; None accepts any."""
        import torch

        self._call = call
        self._vocab_size = vocab_size
        self._faults = faults
        self._torch = torch
        self._device = None if device is None else torch.device(device)
        self._checked_maps: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def __call__(self, answer: Any, plugin: str) -> Draft:
        """The draft to use. Raises ``Malformed`` when it cannot be used at all."""
        if not isinstance(answer, Draft):
            advice = f"{_DROPPED}; return a Draft, such as Draft.from_lists(one list of ids per row), or None"
            raise Malformed("type", f"returned {type(answer).__name__}, not a Draft", advice)
        counts = self._counts(answer)
        num_slots = sum(counts)
        ids = self._ids(answer, num_slots)
        if num_slots == 0:
            is_plain = ids is answer.draft_token_ids and not answer.laws and answer.parents is None
            return answer if is_plain else Draft.empty(len(counts))
        self._check_spans("laws", answer.laws, num_slots)
        for span in answer.laws:
            ids = self._lawful_ids(ids, span, counts)
        ids = self._in_range(ids, counts)
        parents = answer.parents if answer.parents is None else self._parents(answer.parents, counts)
        if answer.confidence is not None and tuple(answer.confidence.shape) != (num_slots,):
            seen = f"confidence has shape {list(answer.confidence.shape)} for {num_slots} tokens"
            raise Malformed("confidence", seen, f"{_DROPPED}; give one value per draft token, or None")
        sources = answer.sources
        if sources:
            self._check_spans("sources", sources, num_slots)
            if {*map(type, (span.source for span in sources))} != {str}:
                seen = f"sources are named {[span.source for span in sources[:8]]!r}"
                raise Malformed("sources", seen, f"{_DROPPED}; a source is a proposer's name")
        else:
            sources = (SourceSpan(0, num_slots, plugin),)
        if (
            ids is not answer.draft_token_ids
            or sources is not answer.sources
            or counts is not answer.num_draft_tokens
            or parents is not answer.parents
        ):
            answer = replace(answer, draft_token_ids=ids, num_draft_tokens=counts, sources=sources, parents=parents)
        return self._clipped(answer, plugin)

    def _counts(self, draft: Draft) -> tuple[int, ...]:
        counts, batch_size = draft.num_draft_tokens, len(self._call.batch)
        advice = f"{_DROPPED}; num_draft_tokens is a tuple with one int of at least 0 per row of the batch"
        if not isinstance(counts, tuple | list):
            raise Malformed("rows", f"num_draft_tokens is {type(counts).__name__}", advice)
        if len(counts) != batch_size:
            raise Malformed("rows", f"returned counts for {len(counts)} rows, the batch has {batch_size}", advice)
        if {*map(type, counts)} - {int} or (counts and min(counts) < 0):
            raise Malformed("rows", f"num_draft_tokens is {tuple(counts)[:8]!r}", advice)
        if draft.skip_reasons and len(draft.skip_reasons) != batch_size:
            seen = f"skip_reasons has {len(draft.skip_reasons)} entries, the batch has {batch_size} rows"
            raise Malformed("rows", seen, f"{_DROPPED}; give one per row, or ()")
        return counts if isinstance(counts, tuple) else tuple(counts)

    def _ids(self, draft: Draft, num_slots: int) -> torch.Tensor:
        """``[num_slots]`` int64."""
        given: object = draft.draft_token_ids
        if not isinstance(given, self._torch.Tensor):
            advice = f"{_DROPPED}; draft_token_ids is an integer tensor [num_draft_tokens]"
            raise Malformed("type", f"draft_token_ids is {type(given).__name__}", advice)
        ids = draft.draft_token_ids
        if num_slots == 0 and ids.numel() == 0:  # torch.tensor([]) is float
            is_plain = ids.dtype == self._torch.int64 and ids.dim() == 1 and ids.device.type == "cpu"
            return ids if is_plain else self._torch.empty(0, dtype=self._torch.int64)
        if not self._is_integer(ids):
            advice = f"{_DROPPED}; draft_token_ids is an integer tensor [num_draft_tokens]"
            raise Malformed("type", f"draft_token_ids is {ids.dtype}", advice)
        if ids.dim() != 1 or ids.shape[0] != num_slots:
            seen = f"draft_token_ids has shape {list(ids.shape)}, num_draft_tokens sums to {num_slots}"
            raise Malformed("count", seen, f"{_DROPPED}; flatten the rows' ids into one [num_draft_tokens] tensor")
        if ids.device.type != "cpu":
            self._check_device("draft_token_ids", ids)
        return ids.to(self._torch.int64)

    def _check_device(self, name: str, tensor: torch.Tensor) -> None:
        device = self._device
        if device is None or (tensor.device.type == device.type and device.index in (None, tensor.device.index)):
            return
        seen = f"{name} is on {tensor.device}, the target on {device}"
        raise Malformed("device", seen, f"{_DROPPED}; ids go on the CPU or the target's device, laws on the latter")

    def _check_spans(self, what: str, spans: Sequence[LawSpan] | Sequence[SourceSpan], num_slots: int) -> None:
        reached = 0
        for span in spans:
            if index(span.start) != reached or index(span.stop) < span.start:
                break
            reached = span.stop
        else:
            if reached == num_slots:
                return
        shown = [(span.start, span.stop) for span in spans[:8]]
        seen = f"{what} span the slots {shown}, the draft has {num_slots}"
        raise Malformed(what, seen, f"{_DROPPED}; give spans that cover every slot once, in order")

    def _parents(self, parents: Any, counts: Sequence[int]) -> tuple[int, ...] | None:
        """The parents; None when every row is a chain."""
        num_slots = sum(counts)
        advice = f"{_DROPPED}; parents is a tuple of {num_slots} ints, one for each draft token, or None for chains"
        if not isinstance(parents, tuple | list):
            raise Malformed("parents", f"parents is {type(parents).__name__}", advice)
        if len(parents) != num_slots or {*map(type, parents)} - {int}:
            raise Malformed("parents", f"parents is {len(parents)} values {tuple(parents)[:8]!r}", advice)
        is_tree = False
        for start, stop in pairwise(cumulative(counts)):
            row_parents = tuple(parents[start:stop])
            node = misplaced_node(row_parents)
            if node is not None:
                seen = f"node {node} of {self._request_of(start, counts)} has the parent {row_parents[node]}"
                raise Malformed("parents", seen, f"{_DROPPED}; a parent is an earlier node of its row, or -1")
            is_tree = is_tree or not tree_of(row_parents).is_chain
        return tuple(parents) if is_tree else None

    def _lawful_ids(self, ids: torch.Tensor, span: LawSpan, counts: Sequence[int]) -> torch.Tensor:
        """``ids``, with the placeholder where a law on a device turned out to be no law."""
        law: object = span.law
        if isinstance(law, OneHot | Unknown):
            return ids
        if not isinstance(law, Dense | Indirect):
            advice = f"{_DROPPED}; laws are OneHot, Dense, Indirect or Unknown objects"
            raise Malformed("laws", f"a law is {type(law).__name__}", advice)
        self._check_law_tensors(law, span.stop - span.start)
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

    def _check_law_tensors(self, law: Dense | Indirect, num_slots: int) -> None:
        logits, kind = law.draft_logits, type(law).__name__
        width = self._vocab_size if isinstance(law, Dense) else logits.shape[-1]
        shapes: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {f"{kind}.draft_logits": (logits, (num_slots, width))}
        if isinstance(law, Indirect):
            shapes["Indirect.logsumexp"] = (law.logsumexp, (num_slots,))
            shapes[_MAP] = (law.target_to_draft_ids, (self._vocab_size,))
        for name, (tensor, shape) in shapes.items():
            if tuple(tensor.shape) != shape:
                seen = f"{name} has shape {list(tensor.shape)}, expected {list(shape)}"
                raise Malformed("laws", seen, f"{_DROPPED}; give one row of logits per slot of the span")
            if name != _MAP and not tensor.dtype.is_floating_point:
                raise Malformed("laws", f"{name} is {tensor.dtype}", f"{_DROPPED}; logits are floating point")
            self._check_device(name, tensor)
        if isinstance(law, Indirect):
            self._check_map(law.target_to_draft_ids, width)

    def _check_map(self, draft_ids: torch.Tensor, draft_vocab_size: int) -> None:
        """A map's values are read once per map object, which a draft vocabulary keeps; off the CPU never."""
        torch = self._torch
        if draft_ids.dtype not in (torch.int64, torch.int32):
            raise Malformed("laws", f"{_MAP} is {draft_ids.dtype}", f"{_DROPPED}; the map is int64 or int32")
        known = self._checked_maps.get(id(draft_ids))
        if draft_ids.device.type != "cpu" or (
            known is not None and known[0]() is draft_ids and known[1] == draft_vocab_size
        ):
            return
        low, high = torch.aminmax(draft_ids)
        if low.item() < PLACEHOLDER_ID or high.item() >= draft_vocab_size:
            seen = f"{_MAP} holds ids from {low.item()} to {high.item()}, the draft vocabulary has {draft_vocab_size}"
            raise Malformed("laws", seen, f"{_DROPPED}; map to ids of the draft, or to -1 where there is none")
        self._checked_maps = {key: each for key, each in self._checked_maps.items() if each[0]() is not None}
        self._checked_maps[id(draft_ids)] = (weakref.ref(draft_ids), draft_vocab_size)

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
        request_id, tree = self._call.batch.requests[row].request_id, draft.trees()[row]
        seen = f'proposed {counts[row]} tokens for request "{request_id}", whose limit is {limits[row]}'
        advice = "rows are cut to their limits; propose at most limits[row] tokens"
        if tree is not None and tree.max_depth > limits[row]:
            seen = f'proposed a tree of depth {tree.max_depth} for request "{request_id}", whose limit is {limits[row]}'
            advice = "trees are cut to their first limits[row] nodes; propose at most so many, and no deeper"
            self._faults.record(plugin, "specplug_propose", "too_deep", seen, advice)
            return draft.truncate(limits)
        self._faults.record(plugin, "specplug_propose", "too_long", seen, advice)
        return draft.truncate(limits)

    def _request_of(self, slot: int, counts: Sequence[int]) -> str:
        row = bisect_right(cumulative(counts), slot) - 1
        return f'request "{self._call.batch.requests[row].request_id}"'

    def _is_integer(self, tensor: torch.Tensor) -> bool:
        return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == self._torch.bool)
