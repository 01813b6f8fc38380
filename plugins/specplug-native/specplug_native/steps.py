"""A step as the kernels read it: rows, positions, what each kind of layer sees, and room to compute in."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import Array
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from specplug_native.library import Kind, Scratch, Shape, Step

if TYPE_CHECKING:
    from specplug.models.rotary import RotaryTable
    from specplug.models.step_plan import LayerKind, Segment, StepPlan

__all__ = ["NativeStep", "ScratchSpace"]


class NativeStep:
    """``struct``: valid as long as this object."""

    def __init__(self, step: StepPlan, kinds: Sequence[LayerKind], rotary: RotaryTable) -> None:
        starts = array("q", accumulate(step.num_query_tokens, initial=0))
        lengths = array("q", step.lengths)
        positions = step.positions if step.trees else None
        self._kinds = _Kinds(step, kinds)
        self._held = (starts, lengths, positions)
        self.struct = Step(
            len(lengths),
            starts.buffer_info()[0],
            lengths.buffer_info()[0],
            None if positions is None else positions.ctypes.data,
            rotary.cos.data_ptr(),
            rotary.signed_sin.data_ptr(),
            len(rotary.cos),
            self._kinds.structs,
            torch.get_num_threads(),
        )


@cache
def _kinds_type(length: int) -> type[Array[Kind]]:
    """Kept, since it takes longer to make than to use."""
    return Kind * length


class _Kinds:
    """``structs``: one for each of a cache's kinds, valid as long as this object."""

    def __init__(self, step: StepPlan, kinds: Sequence[LayerKind]) -> None:
        self._masks: list[_Masks] = []
        self.structs = _kinds_type(len(kinds))(*[self._struct(step, kind) for kind in kinds])

    def _struct(self, step: StepPlan, kind: LayerKind) -> Kind:
        if step.sees_all_before(kind):
            return Kind(kind.size)
        masks = _Masks(sum(step.num_query_tokens))
        for segment in step.kinds[kind].segments:
            masks.add(segment, step.num_query_tokens)
        self._masks.append(masks)
        return Kind(kind.size, masks.pointers.ctypes.data, masks.spans.ctypes.data)


class _Masks:
    """For each of a step's tokens where its part of a mask begins, 0 for none, and how long it is."""

    def __init__(self, num_tokens: int) -> None:
        self.pointers = np.zeros(num_tokens, dtype=np.uint64)
        self.spans = np.zeros(num_tokens, dtype=np.int64)
        self._held: list[torch.Tensor] = []

    def add(self, segment: Segment, num_query_tokens: Sequence[int]) -> None:
        """The tokens of a segment; where it has no mask, each sees the slots up to its own."""
        if segment.hidden is None:
            return
        hidden = segment.hidden.contiguous()  # [rows, width, span]
        self._held.append(hidden)
        start, offset = segment.token_start, hidden.data_ptr()
        for count in num_query_tokens[segment.row_start : segment.row_stop]:
            tokens = slice(start, start + count)
            self.pointers[tokens] = offset + np.arange(count, dtype=np.uint64) * segment.span
            self.spans[tokens] = segment.span
            start, offset = start + count, offset + segment.width * segment.span


class ScratchSpace:
    """Memory for what a step computes on its way; it grows to the largest step."""

    def __init__(self, shape: Shape) -> None:
        heads = shape.heads
        attended = heads.num_heads * heads.head_dim
        projected = attended + 2 * heads.num_kv_heads * heads.head_dim
        self._sizes = (shape.hidden_size, shape.hidden_size, projected, attended, shape.intermediate_size)
        self._num_tokens = 0
        self._tensors: list[torch.Tensor] = []
        self._struct = Scratch()

    def room(self, num_tokens: int) -> Scratch:
        """For so many tokens; valid until it is asked for again."""
        if num_tokens > self._num_tokens:
            self._num_tokens = num_tokens
            sizes = [num_tokens * size for size in self._sizes]
            self._tensors = [torch.empty(size, dtype=torch.bfloat16, device="cpu") for size in sizes]
            self._struct = Scratch(*(tensor.data_ptr() for tensor in self._tensors))
        return self._struct
