"""Memory for weights in large pages, where the operating system has them.

A step reads all weights once. In pages of 4 kB each of them costs a look-up that no cache of addresses holds any more,
and the processor's prefetching stops at its end.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

__all__ = ["LargePages", "room"]

_LINE = 64
"""Bytes: tensors begin at a cache line."""


def room(num_bytes: int) -> int:
    """What a tensor of ``num_bytes`` takes."""
    return num_bytes + -num_bytes % _LINE


class LargePages:
    """Room for the tensors of one owner, which go together: a chunk is given back when the last tensor in it is."""

    def __init__(self, chunk_bytes: int) -> None:
        """``chunk_bytes``: taken at once; more where a tensor needs it."""
        self._chunk_bytes = chunk_bytes
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Not initialised. One element at least."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._chunk is None or self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = _large_pages(max(num_bytes, self._chunk_bytes)), 0
        tensor = torch.frombuffer(self._chunk, dtype=dtype, count=math.prod(shape), offset=self._used)
        self._used += room(num_bytes)
        return tensor.view(*shape)


def _large_pages(num_bytes: int) -> mmap.mmap:
    """Pages that were never touched take no memory."""
    chunk = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk
