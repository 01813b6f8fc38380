# ruff: noqa: ANN001, ANN201 - the parameters of a kernel are typed at launch
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The same statistics for the draft logits of dense laws, which may lie in any number of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from specplug.verify.kernels.common import LAW_ROW, field, jit, tile_stats
from specplug.verify.noise import TILE

if TYPE_CHECKING:
    from specplug.verify.kernels.problem import Problem

LINES = 4
"""Tiles per program."""


@jit
def draft_stats_kernel(
    dense_slots_ptr,
    slots_ptr,
    draft_max_ptr,
    draft_sum_ptr,
    law_col_stride,
    num_slots,
    vocab_size,
    num_tiles,
    LAW_DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    address = field(slots_ptr, tl.load(dense_slots_ptr + row), num_slots, LAW_ROW)
    if IS_ALIGNED:
        address = tl.multiple_of(address, 16)
    law_ptr = address.to(tl.pointer_type(LAW_DTYPE))
    tiles = tl.program_id(1) * LINES + tl.arange(0, LINES)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    x = tl.load(law_ptr + ids.to(tl.int64) * law_col_stride, mask=ids < vocab_size, other=float("-inf"))
    top, total, _ = tile_stats(x.to(tl.float32), 1.0)
    out = row * num_tiles + tiles
    tl.store(draft_max_ptr + out, top, mask=tiles < num_tiles)
    tl.store(draft_sum_ptr + out, total, mask=tiles < num_tiles)


def draft_stats(problem: Problem) -> None:
    """Fill ``problem.draft_max`` and ``draft_sum``, one row per slot with a dense law."""
    grid = (problem.dense_slots.shape[0], -(-problem.num_tiles // LINES))
    draft_stats_kernel[grid](
        problem.dense_slots,
        problem.slots,
        problem.draft_max,
        problem.draft_sum,
        problem.law_col_stride,
        problem.num_slots,
        problem.vocab_size,
        problem.num_tiles,
        LAW_DTYPE=problem.law_dtype,
        IS_ALIGNED=problem.are_laws_aligned,
        LINES=LINES,
        TILE=TILE,
        num_warps=8,
        enable_fp_fusion=True,
    )
