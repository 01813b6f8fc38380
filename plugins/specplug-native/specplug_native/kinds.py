"""What the layers of each kind see in a step: pointers into its masks, where it has any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from specplug_native.library import Kind

if TYPE_CHECKING:
    from specplug.models.step_plan import LayerKind, Segment, StepPlan

__all__ = ["Kinds"]


class Kinds:
    """``structs``: one for each of a cache's kinds, valid as long as this object."""

    def __init__(self, step: StepPlan, kinds: Sequence[LayerKind]) -> None:
        self._masks: list[_Masks] = []
        self.structs = (Kind * len(kinds))(*[self._struct(step, kind) for kind in kinds])

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
