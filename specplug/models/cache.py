"""A key-value cache for rows of different length, addressed by slot, that rolls back by lowering a length.

Layout: one buffer for the keys and one for the values of each layer, ``[max_num_seqs, num_kv_heads, capacity,
head_dim]``. Occupied rows are a dense prefix, so that attention reads slices and gathers nothing. Rows are
preallocated for ``max_num_seqs``; the capacity starts at 256 slots and doubles, up to ``max_model_len``, when a row
outgrows it, so that a small session does not take gigabytes. Within the capacity nothing is ever allocated.

Full attention keeps position p in slot p. A sliding-window layer is a ring of ``window + max_query_tokens - 1`` slots
(position p in slot ``p % size``): that many keep every entry a query can see, also after the longest possible step
was rolled back.

A row is zeroed when it changes hands, because a NaN in a *masked* entry would reach the output. Entries that a
request leaves behind in its own row by a rollback stay until they are overwritten: a model that computes NaN for a
rejected draft token can spoil that request, never another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from specplug.errors import ModelError
from specplug.models.step_plan import LayerKind, StepPlan, plan_step
from specplug.trees import Tree

__all__ = ["RaggedCache", "RaggedLayer"]

_INITIAL_CAPACITY = 256


class _Moves:
    """Entries that change places, ``[3, n]``: rows, old and new positions. Layers alike share the flat addresses."""

    def __init__(self, moves: torch.Tensor) -> None:
        self._rows, *self._positions = moves
        self._flat: dict[tuple[int, int, int], list[torch.Tensor]] = {}

    def flat(self, num_heads: int, capacity: int, size: int) -> list[torch.Tensor]:
        """``[num_heads * n]`` old and new places in a buffer ``[rows, num_heads, capacity]`` laid out flat."""
        key = (num_heads, capacity, size)
        if key not in self._flat:
            heads = torch.arange(num_heads, device=self._rows.device)[:, None]
            starts = (self._rows * num_heads + heads) * capacity
            self._flat[key] = [(starts + positions % size).view(-1) for positions in self._positions]
        return self._flat[key]


class RaggedLayer(CacheLayerMixin):
    """One layer's buffers. Driven by :class:`RaggedCache`, which holds what all layers share."""

    def __init__(self, kind: LayerKind, num_rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = kind
        self.is_sliding = kind.window is not None
        self.num_rows = num_rows
        self.least_dtype: torch.dtype | None = None
        self.capacity = min(_INITIAL_CAPACITY, kind.size)
        self.step: StepPlan | None = None
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate zeroed buffers with the heads, device and, unless set, dtype of the first states."""
        self.keys = self._blank(key_states)
        self.values = self._blank(value_states)
        self.is_initialized = True

    def _blank(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.num_rows, like.shape[1], self.capacity, like.shape[-1])
        dtype = like.dtype if self.least_dtype is None else torch.promote_types(like.dtype, self.least_dtype)
        return torch.zeros(shape, dtype=dtype, device=like.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the packed states ``[1, heads, T, dim]`` to their rows and return the whole buffers."""
        step = self.step
        if step is None:
            raise RuntimeError("the cache takes states only inside TargetRunner.forward")
        if not step.layer_updated(self):
            raise ModelError("attention does not go through transformers' AttentionInterface")
        return self.append(step, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))

    def append(
        self, step: StepPlan, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the packed states ``[T, heads, dim]`` of a step to their rows and return the whole buffers."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.buffers()
        places = step.kinds[self.kind].places
        places.write(keys, key_states)
        places.write(values, value_states)
        return keys, values

    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Keys and values; nothing before the first states came."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def reserve(self, num_slots: int, num_rows: int) -> None:
        """Make room for ``num_slots`` entries a row; the first ``num_rows`` rows are kept."""
        if num_slots <= self.capacity:
            return
        old_capacity = self.capacity
        self.capacity = min(self.kind.size, max(num_slots, 2 * old_capacity))
        for name, old in zip(("keys", "values"), self.buffers(), strict=False):
            new = self._blank(old)
            new[:num_rows, :, :old_capacity] = old[:num_rows]
            setattr(self, name, new)

    def clear_row(self, row: int, used: int) -> None:
        """Zero the first ``used`` slots of a row."""
        for buffer in self.buffers():
            buffer[row, :, :used].zero_()

    def move_row(self, source: int, row: int, used: int) -> None:
        """Copy the first ``used`` slots of row ``source`` to ``row``."""
        for buffer in self.buffers():
            buffer[row, :, :used] = buffer[source, :, :used]

    def move_entries(self, moves: _Moves) -> None:
        """Copy entries to other positions of their rows."""
        for buffer in self.buffers():
            sources, targets = moves.flat(buffer.shape[1], self.capacity, self.kind.size)
            flat = buffer.view(-1, buffer.shape[-1])
            flat.index_copy_(0, targets, flat.index_select(0, sources))

    @property
    def num_bytes(self) -> int:
        """Bytes that the buffers take at present."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def get_seq_length(self) -> int:
        """Tokens in the longest row."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots a mask would have to cover, and its offset. Our own masks are made by the step plan."""
        return self.capacity, 0

    def get_max_length(self) -> int:
        """Most slots of a row."""
        return self.kind.size


class RaggedCache(Cache):
    """All layers' buffers and the length of every row."""

    def __init__(
        self,
        windows: Sequence[int | None],
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_query_tokens: int,
        device: torch.device,
    ) -> None:
        """``windows``: one entry per layer, its sliding window or None for full attention."""
        sizes = {
            window: max_model_len if window is None else min(max_model_len, window + max_query_tokens - 1)
            for window in windows
        }
        self.kinds = tuple(LayerKind(window, size) for window, size in sizes.items())
        self.ragged_layers = [RaggedLayer(LayerKind(window, sizes[window]), max_num_seqs) for window in windows]
        super().__init__(layers=list(self.ragged_layers))
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.max_query_tokens = max_query_tokens
        self.device = device
        self.lengths: list[int] = []
        self._written: list[int] = []  # per row, how far it was ever written: what has to be cleared or moved

    def keep_for_drafts(self) -> None:
        """Before the first states came: keep entries as it suits a draft, whose bits need not be a model's own.

        On a CPU that is float32, in which one query attends faster than in bfloat16.
        """
        if self.device.type == "cpu":
            for layer in self.ragged_layers:
                layer.least_dtype = torch.float32

    @property
    def num_rows(self) -> int:
        """Occupied rows; they are the first ones."""
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes that the buffers take at present."""
        return sum(layer.num_bytes for layer in self.ragged_layers)

    def acquire(self) -> int:
        """Take the next row, of length 0. Raises ValueError when all are taken."""
        if self.num_rows == self.max_num_seqs:
            raise ValueError(f"all max_num_seqs={self.max_num_seqs} rows are taken; release one first")
        self.lengths.append(0)
        self._written.append(0)
        return self.num_rows - 1

    def release(self, row: int) -> int | None:
        """Clear ``row``; the last row, if it is another, moves there. Returns the moved row's old number."""
        self._check_row(row)
        last = self.num_rows - 1
        for layer in self.ragged_layers:
            self._release_in(layer, row, last)
        self.lengths[row], self._written[row] = self.lengths[last], self._written[last]
        self.lengths.pop()
        self._written.pop()
        return None if row == last else last

    def _release_in(self, layer: RaggedLayer, row: int, last: int) -> None:
        used, moved = (min(self._written[index], layer.kind.size) for index in (row, last))
        layer.clear_row(row, used)
        if row != last:
            layer.move_row(last, row, moved)
            layer.clear_row(last, moved)

    def rollback(self, row: int, length: int) -> None:
        """Lower the length of ``row``; no entry moves.

        Raises ValueError for a negative length, for more than the current one, and where a sliding window has
        already lost entries that the shorter row would see (more than ``max_query_tokens`` below the longest it was).
        """
        self._check_row(row)
        current = self.lengths[row]
        if not 0 <= length <= current:
            raise ValueError(f"row {row} holds {current} tokens and cannot be rolled back to length {length}")
        for kind in self.kinds:
            lost = self._written[row] - kind.size  # positions below this one are overwritten
            if kind.window is not None and lost > max(0, length - kind.window + 1):
                raise ValueError(
                    f"row {row} was written up to {self._written[row]} tokens and cannot be rolled back to length "
                    f"{length}: a window of {kind.window} allows {self.max_query_tokens} tokens (max_query_tokens)"
                )
        self.lengths[row] = length

    def compact(self, rows: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move the entry at position ``sources[i]`` of row ``rows[i]`` to its position ``targets[i]``, all at once.

        Afterwards :meth:`rollback` to the end of what stands: nothing else changes. Raises ValueError for a position
        past the row's length and for a move that is not towards the front.
        """
        for row, source, target in zip(rows, sources, targets, strict=True):
            self._check_row(row)
            if not 0 <= target < source < self.lengths[row]:
                raise ValueError(f"row {row} holds {self.lengths[row]} tokens: entry {source} cannot move to {target}")
        if rows:
            moves = _Moves(torch.tensor([list(rows), list(sources), list(targets)], device=self.device))
            for layer in self.ragged_layers:
                layer.move_entries(moves)

    def begin(self, num_query_tokens: Sequence[int], trees: Mapping[int, Tree] | None = None) -> StepPlan:
        """Plan a step that appends ``num_query_tokens[row]`` tokens to every row, and make room for it.

        ``trees``: row -> the tree that its last ``len(tree)`` tokens form on the token before them. The lengths grow
        only with :meth:`finish`. Raises ValueError for counts that do not fit.
        """
        self._check_counts(num_query_tokens)
        self._check_trees(num_query_tokens, trees or {})
        ends = [length + count for length, count in zip(self.lengths, num_query_tokens, strict=True)]
        longest = max(ends)
        self._written = [max(pair) for pair in zip(self._written, ends, strict=True)]
        step = plan_step(self.lengths, num_query_tokens, self.kinds, self.device, trees)
        for layer in self.ragged_layers:
            layer.reserve(min(longest, layer.kind.size), self.num_rows)
            layer.step = step
            layer.length = max(self.lengths)
        return step

    def finish(self, num_query_tokens: Sequence[int]) -> None:
        """The forward went through: the appended tokens count."""
        self.lengths = [length + count for length, count in zip(self.lengths, num_query_tokens, strict=True)]

    def end(self) -> None:
        """Take no more states until the next :meth:`begin`."""
        for layer in self.ragged_layers:
            layer.step = None

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.num_rows:
            raise ValueError(f"row {row} is not in use; rows 0 to {self.num_rows - 1} are")

    def _check_counts(self, num_query_tokens: Sequence[int]) -> None:
        if len(num_query_tokens) != self.num_rows:
            raise ValueError(f"{len(num_query_tokens)} counts of query tokens for {self.num_rows} rows")
        if not any(num_query_tokens):
            raise ValueError("a forward needs at least one query token")
        for row, (length, count) in enumerate(zip(self.lengths, num_query_tokens, strict=True)):
            if not 0 <= count <= self.max_query_tokens:
                raise ValueError(f"row {row}: {count} query tokens; 0 to max_query_tokens={self.max_query_tokens} fit")
            if length + count > self.max_model_len:
                raise ValueError(f"row {row}: {length} + {count} tokens exceed max_model_len={self.max_model_len}")

    def _check_trees(self, num_query_tokens: Sequence[int], trees: Mapping[int, Tree]) -> None:
        for row, tree in trees.items():
            self._check_row(row)
            count, length = num_query_tokens[row], self.lengths[row]
            if len(tree) > count or len(tree) >= length + count:
                raise ValueError(
                    f"row {row}: a tree of {len(tree)} nodes does not fit on {count} query tokens after {length} others"
                )
