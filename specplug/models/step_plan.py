"""What one forward reads and writes, worked out once per step on the host and shared by all layers.

A step appends ``num_query_tokens[row]`` tokens to each row of the cache. The tokens travel packed, ``T`` in all;
attention alone sees rows, in *segments*: runs of adjacent rows attended in one call, padded to one width and reading
one span of slots. Rows of very different length or width go to different segments, so that a long row or a prompt
chunk does not make its neighbours as expensive as itself.

A row may end in a tree of draft tokens. Its nodes take the next slots in order, as a chain's tokens would; a node's
position is that of the token before the tree plus its depth, and of the other nodes it sees those on its own path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from specplug.trees import Tree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specplug.models.cache import RaggedLayer

    Ints = NDArray[np.int64]

__all__ = ["KindPlan", "LayerKind", "Places", "Segment", "StepPlan", "plan_step", "split_rows"]

_MAX_SEGMENT_ROWS = 32
"""Bounds the search for segments to 32 candidates per row; a batch of equal rows is never split by it."""
_CALL_COST = {"cpu": 512.0}
"""Fixed cost of one attention call in slots read by one query: 40 us against 0.08 us (SmolLM2, 2 cores)."""
_CALL_COST_ELSEWHERE = 16384.0
"""The same where a launch of 10 us stands against terabytes per second."""
_QUERY_COST = 0.3
"""Cost of one more query per slot read, against reading the slot once (same measurement)."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """How a layer keeps its entries: ``window`` None is full attention; entry of position p is slot ``p % size``."""

    window: int | None
    size: int


@dataclass(slots=True)
class Segment:
    """Rows ``row_start`` to ``row_stop`` and their packed tokens, attended in one call over ``span`` slots."""

    row_start: int
    row_stop: int
    token_start: int
    token_stop: int
    width: int
    """Query tokens per row, the shorter rows padded."""
    span: int
    gather: torch.Tensor | None = None
    """``[rows * width]``: packed token of each padded query; None when no row is padded."""
    scatter: torch.Tensor | None = None
    """``[token_stop - token_start]``: padded query of each packed token; None when no row is padded."""
    hidden: torch.Tensor | None = None
    """``[rows, width, span]`` bool: entries a query may not see; None when every query sees the whole span."""
    _masks: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    def mask(self, num_groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The additive mask ``[rows, 1, num_groups * width, span]``; the query axis runs over (group, token)."""
        if self.hidden is None:
            return None
        mask = self._masks.get((num_groups, dtype))
        if mask is None:
            blank = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device)
            mask = blank.masked_fill_(self.hidden, -torch.inf).repeat(1, num_groups, 1)[:, None]
            self._masks[num_groups, dtype] = mask
        return mask


class Places(Protocol):
    """Where a step's entries go in the buffers of a layer."""

    def write(self, buffer: torch.Tensor, states: torch.Tensor) -> None:
        """Put the packed ``states`` ``[T, heads, dim]`` into ``buffer`` ``[rows, heads, capacity, dim]``."""


@dataclass(slots=True)
class _OneRun:
    """Slots ``start`` to ``stop`` of one row."""

    row: int
    start: int
    stop: int

    def write(self, buffer: torch.Tensor, states: torch.Tensor) -> None:
        buffer[self.row, :, self.start : self.stop].copy_(states.transpose(0, 1))


@dataclass(slots=True)
class _Scattered:
    """``[T]`` each: the row of each packed token, and the slot that it is written to."""

    rows: torch.Tensor
    slots: torch.Tensor
    _flat: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def write(self, buffer: torch.Tensor, states: torch.Tensor) -> None:
        _, num_heads, capacity, size = buffer.shape
        flat = self._flat.get((num_heads, capacity))
        if flat is None:
            heads = torch.arange(num_heads, device=self.rows.device)
            flat = ((self.rows[:, None] * num_heads + heads) * capacity + self.slots[:, None]).reshape(-1)
            self._flat[num_heads, capacity] = flat
        buffer.view(-1, size).index_copy_(0, flat, states.reshape(-1, size).to(buffer.dtype))


@dataclass(slots=True)
class KindPlan:
    """What the layers of one kind share in a step."""

    places: Places
    segments: list[Segment]


@dataclass(slots=True)
class StepPlan:
    """One step's plan. It rides through the model's forward as a keyword, to the attention function.

    What lies on the device is worked out when it is first asked for: a decoder that reads the host's numbers spares it.
    """

    lengths: Sequence[int]
    """Entries that each row held before."""
    num_query_tokens: Sequence[int]
    """Tokens that each row appends."""
    trees: Mapping[int, Tree]
    """Row -> the tree that its last tokens form."""
    _kinds: Sequence[LayerKind]
    _device: torch.device
    num_layers_attended: int = 0
    _updated: RaggedLayer | None = None
    _layout: tuple[torch.Tensor, Mapping[LayerKind, KindPlan]] | None = None

    @property
    def positions(self) -> Ints:
        """``[T]``, on the host."""
        if len(self.lengths) == 1 and not self.trees:
            return np.arange(self.lengths[0], self.lengths[0] + self.num_query_tokens[0])
        return self._planner().token_positions()

    @property
    def position_ids(self) -> torch.Tensor:
        """``[1, T]`` int64, on the device."""
        return self._laid_out()[0]

    @property
    def kinds(self) -> Mapping[LayerKind, KindPlan]:
        """Where each kind of layer writes, and what it attends over."""
        return self._laid_out()[1]

    def sees_all_before(self, kind: LayerKind) -> bool:
        """Whether in layers of this kind each token sees just the slots up to its own."""
        longest = max(map(add, self.lengths, self.num_query_tokens))
        return not self.trees and longest <= (kind.size if kind.window is None else min(kind.size, kind.window))

    def layer_updated(self, layer: RaggedLayer) -> bool:
        """Note that the cache took a layer's entries. False if the layer before it was never attended."""
        is_in_order = self._updated is None
        self._updated = layer
        return is_in_order

    def take_layer(self) -> RaggedLayer | None:
        """The layer whose entries came last; each can be taken once. None if there is none."""
        layer, self._updated = self._updated, None
        self.num_layers_attended += layer is not None
        return layer

    def _planner(self) -> _Planner:
        return _Planner(self.lengths, self.num_query_tokens, self._device, self.trees)

    def _laid_out(self) -> tuple[torch.Tensor, Mapping[LayerKind, KindPlan]]:
        if self._layout is None:
            if len(self.lengths) == 1 and all(map(self.sees_all_before, self._kinds)):
                self._layout = _lay_out_one_row(self.lengths[0], self.num_query_tokens[0], self._kinds, self._device)
            else:
                self._layout = _lay_out(self._planner(), self._kinds)
        return self._layout


def split_rows(spans: Sequence[int], widths: Sequence[int], *, call_cost: float) -> list[tuple[int, int]]:
    """Cut rows into runs ``(start, stop)`` of least total cost; rows without a query may be left out.

    ``spans``: slots that each row reads; ``widths``: its query tokens. A run costs ``call_cost`` plus rows x longest
    span x (1 + 0.3 per further query of the widest row).
    """
    ideal = sum(span * (1 + _QUERY_COST * (width - 1)) for span, width in zip(spans, widths, strict=True) if width)
    active = [row for row, width in enumerate(widths) if width]
    first, last = active[0], active[-1] + 1
    whole = (last - first) * max(spans[first:last]) * (1 + _QUERY_COST * (max(widths) - 1))
    if whole <= ideal + call_cost:
        return [(first, last)]
    return _cheapest_runs(spans, widths, call_cost)


def _cheapest_runs(spans: Sequence[int], widths: Sequence[int], call_cost: float) -> list[tuple[int, int]]:
    best = [0.0]  # best[i]: least cost of the rows before i; came[i]: where its last run starts, i if the row is idle
    came = [0]
    for stop in range(1, len(widths) + 1):
        idle = widths[stop - 1] == 0
        least, start_of_least = (best[stop - 1], stop) if idle else (float("inf"), stop - 1)
        span = width = 0
        for start in range(stop - 1, max(-1, stop - 1 - _MAX_SEGMENT_ROWS), -1):
            span, width = max(span, spans[start]), max(width, widths[start])
            cost = best[start] + call_cost + (stop - start) * span * (1 + _QUERY_COST * (width - 1))
            if width and cost < least:
                least, start_of_least = cost, start
        best.append(least)
        came.append(start_of_least)
    runs: list[tuple[int, int]] = []
    stop = len(widths)
    while stop:
        start = came[stop]
        if start == stop:
            stop -= 1
        else:
            runs.append((start, stop))
            stop = start
    return runs[::-1]


class _Upload:
    """Host integers that go to the device in one copy."""

    def __init__(self) -> None:
        self._parts: list[Ints] = []
        self._total = 0

    def add(self, values: Ints) -> slice:
        start = self._total
        self._total += len(values)
        self._parts.append(values)
        return slice(start, self._total)

    def send(self, device: torch.device) -> torch.Tensor:
        merged = torch.from_numpy(np.concatenate(self._parts))
        return merged if device.type == "cpu" else merged.to(device, non_blocking=True)


@dataclass(slots=True)
class _SegmentParts:
    """A segment before the upload: slices of the uploaded integers instead of tensors."""

    segment: Segment
    gather: slice | None
    scatter: slice | None
    query_positions: slice | None
    ends: slice | None
    shown: slice | None = None
    """Entries of the flattened mask ``[rows, width, span]`` that a tree shows, whatever their slots say."""
    withheld: slice | None = None


class _Planner:
    """Builds a plan: first all host integers, then one upload, then the tensors made of them."""

    def __init__(
        self,
        lengths: Sequence[int],
        num_query_tokens: Sequence[int],
        device: torch.device,
        trees: Mapping[int, Tree],
    ) -> None:
        self.device = device
        self.trees = trees
        self.widths = list(num_query_tokens)
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.counts = np.asarray(num_query_tokens, dtype=np.int64)
        self.ends = self.lengths + self.counts
        self.token_stops = np.cumsum(self.counts)
        self.token_starts = self.token_stops - self.counts
        self.num_tokens = int(self.token_stops[-1])
        self.positions = np.arange(self.num_tokens) + np.repeat(self.lengths - self.token_starts, self.counts)
        self.upload = _Upload()

    def token_positions(self) -> Ints:
        """``[T]``: where each token stands in its text; in a tree that is not its place in the cache."""
        positions: Ints = self.positions.copy()
        for row, tree in self.trees.items():
            stop, root = self.token_stops[row], self.ends[row] - len(tree) - 1
            positions[stop - len(tree) : stop] = root + np.array(tree.depths)
        return positions

    def segments(self, kind: LayerKind) -> list[_SegmentParts]:
        spans = np.minimum(self.ends, kind.size).tolist()
        call_cost = _CALL_COST.get(self.device.type, _CALL_COST_ELSEWHERE)
        runs = split_rows(spans, self.widths, call_cost=call_cost)
        return [self._segment(start, stop, max(spans[start:stop]), kind) for start, stop in runs]

    def _segment(self, start: int, stop: int, span: int, kind: LayerKind) -> _SegmentParts:
        counts = self.counts[start:stop]
        segment = Segment(
            row_start=start,
            row_stop=stop,
            token_start=int(self.token_starts[start]),
            token_stop=int(self.token_stops[stop - 1]),
            width=int(counts.max()),
            span=span,
        )
        parts = _SegmentParts(segment, None, None, None, None)
        if segment.width * segment.num_rows != segment.token_stop - segment.token_start:
            self._pad(parts)
        if self._needs_mask(segment, kind):
            steps = np.minimum(np.arange(segment.width), np.maximum(counts - 1, 0)[:, None])
            query_positions = self.lengths[start:stop, None] + steps
            trees = {row: tree for row, tree in self.trees.items() if start <= row < stop}
            for row, tree in trees.items():
                nodes = slice(self.counts[row] - len(tree), self.counts[row])
                query_positions[row - start, nodes] = self.ends[row] - len(tree) - 1 + np.array(tree.depths)
            parts.query_positions = self.upload.add(query_positions.reshape(-1))
            parts.ends = self.upload.add(self.ends[start:stop])
            if trees:
                self._mask_trees(parts, trees, kind)
        return parts

    def _mask_trees(self, parts: _SegmentParts, trees: Mapping[int, Tree], kind: LayerKind) -> None:
        """Which of its tree's nodes each node may see: those on its path and, in a window, near enough."""
        segment = parts.segment
        shown, withheld = [], []
        for row, tree in trees.items():
            num_nodes, depths = len(tree), np.array(tree.depths)
            queries = (row - segment.row_start) * segment.width + self.counts[row] - num_nodes + np.arange(num_nodes)
            slots = (self.ends[row] - num_nodes + np.arange(num_nodes)) % kind.size
            flat = queries[:, None] * segment.span + slots
            is_shown = tree.ancestry
            if kind.window is not None:
                is_shown = is_shown & (depths[:, None] - depths < kind.window)
            shown.append(flat[is_shown])
            withheld.append(flat[~is_shown])
        parts.shown = self.upload.add(np.concatenate(shown))
        parts.withheld = self.upload.add(np.concatenate(withheld))

    def _pad(self, parts: _SegmentParts) -> None:
        segment = parts.segment
        rows = slice(segment.row_start, segment.row_stop)
        counts = self.counts[rows]
        steps = np.minimum(np.arange(segment.width), np.maximum(counts - 1, 0)[:, None])
        gather = np.minimum(self.token_starts[rows, None] + steps, self.num_tokens - 1)
        parts.gather = self.upload.add(gather.reshape(-1))
        local_starts = self.token_starts[rows] - segment.token_start
        row_offsets = np.arange(segment.num_rows) * segment.width - local_starts
        num_tokens = segment.token_stop - segment.token_start
        parts.scatter = self.upload.add(np.arange(num_tokens) + np.repeat(row_offsets, counts))

    def _needs_mask(self, segment: Segment, kind: LayerKind) -> bool:
        """Not when every row asks one query that sees exactly the span."""
        ends = self.ends[segment.row_start : segment.row_stop]
        sees_all = segment.width == 1 and bool((ends == segment.span).all())
        return not sees_all or (kind.window is not None and segment.span > kind.window)

    def finish(self, parts: _SegmentParts, sent: torch.Tensor, kind: LayerKind) -> Segment:
        segment = parts.segment
        if parts.gather is not None and parts.scatter is not None:
            segment.gather, segment.scatter = sent[parts.gather], sent[parts.scatter]
        if parts.query_positions is not None and parts.ends is not None:
            query_positions = sent[parts.query_positions].view(segment.num_rows, segment.width, 1)
            segment.hidden = _hidden(query_positions, sent[parts.ends].view(-1, 1, 1), segment.span, kind)
            if parts.shown is not None and parts.withheld is not None:
                hidden = segment.hidden.view(-1)
                hidden.index_fill_(0, sent[parts.shown], False).index_fill_(0, sent[parts.withheld], True)
        return segment


def _hidden(query_positions: torch.Tensor, ends: torch.Tensor, span: int, kind: LayerKind) -> torch.Tensor:
    """``[rows, width, span]``: True where the entry in a slot lies outside what the query may see.

    A slot of a row that ends at e holds the newest position below e that falls on it. Nothing else needs masking:
    every entry up to the query's position was accepted before or is written in this forward.
    """
    slots = torch.arange(span, device=ends.device)
    if kind.window is None:
        return slots > query_positions
    newest = ends - 1
    positions = newest - torch.remainder(newest - slots, kind.size)
    return (positions > query_positions) | (positions <= query_positions - kind.window) | (positions < 0)


def plan_step(
    lengths: Sequence[int],
    num_query_tokens: Sequence[int],
    kinds: Sequence[LayerKind],
    device: torch.device,
    trees: Mapping[int, Tree] | None = None,
) -> StepPlan:
    """Plan a forward that appends ``num_query_tokens[row]`` tokens to rows of ``lengths[row]``; one at least.

    ``trees``: row -> the tree that its last ``len(tree)`` tokens form on the token before them.
    """
    return StepPlan(tuple(lengths), tuple(num_query_tokens), trees or {}, kinds, device)


def _lay_out(planner: _Planner, kinds: Sequence[LayerKind]) -> tuple[torch.Tensor, Mapping[LayerKind, KindPlan]]:
    positions = planner.upload.add(planner.positions)
    token_positions = planner.upload.add(planner.token_positions()) if planner.trees else positions
    rows = planner.upload.add(np.repeat(np.arange(len(planner.counts)), planner.counts))
    parts = {kind: planner.segments(kind) for kind in kinds}
    slots = {
        kind: positions if kind.window is None else planner.upload.add(planner.positions % kind.size) for kind in kinds
    }
    sent = planner.upload.send(planner.device)
    plans = {
        kind: KindPlan(
            places=_Scattered(sent[rows], sent[slots[kind]]),
            segments=[planner.finish(part, sent, kind) for part in parts[kind]],
        )
        for kind in kinds
    }
    return sent[token_positions][None], plans


def _lay_out_one_row(
    length: int, count: int, kinds: Sequence[LayerKind], device: torch.device
) -> tuple[torch.Tensor, Mapping[LayerKind, KindPlan]]:
    """For a row alone, all layers alike: what every token of a small draft has to wait for."""
    stop = length + count
    segment = Segment(0, 1, 0, count, width=count, span=stop)
    if count > 1:
        segment.hidden = torch.ones(1, count, stop, dtype=torch.bool, device=device).triu_(length + 1)
    plan = KindPlan(_OneRun(0, length, stop), [segment])
    return torch.arange(length, stop, device=device)[None], dict.fromkeys(kinds, plan)
