# ruff: noqa: ANN001, ANN201 - the parameters of a kernel are typed at launch
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""One read of the logits: maximum, sum of exponentials and arg-max of every tile of every row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from specplug.verify.kernels.common import INVERSE_TEMPERATURE, jit, real_field, tile_stats
from specplug.verify.noise import TILE

if TYPE_CHECKING:
    import torch

    from specplug.verify.kernels.problem import Problem

LINES = 4
"""Tiles per program."""


@jit
def row_stats_kernel(
    logits_ptr,
    row_list_ptr,
    row_requests_ptr,
    requests_ptr,
    thresholds_ptr,
    max_ptr,
    sum_ptr,
    argmax_ptr,
    row_stride,
    col_stride,
    num_requests,
    vocab_size,
    num_tiles,
    IS_FILTERED: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if IS_FILTERED:
        row = tl.load(row_list_ptr + row)
    request = tl.load(row_requests_ptr + row)
    inverse_temperature = real_field(requests_ptr, request, num_requests, INVERSE_TEMPERATURE).to(tl.float32)
    tiles = tl.program_id(1) * LINES + tl.arange(0, LINES)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    at = row * row_stride + ids.to(tl.int64) * col_stride
    x = tl.load(logits_ptr + at, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    if IS_FILTERED:
        # written so that NaN stays
        x = tl.where(x < tl.load(thresholds_ptr + row), float("-inf"), x)
    top, total, best = tile_stats(x, inverse_temperature)
    out = row * num_tiles + tiles
    tl.store(max_ptr + out, top, mask=tiles < num_tiles)
    tl.store(sum_ptr + out, total, mask=tiles < num_tiles)
    tl.store(argmax_ptr + out, tiles * TILE + best, mask=tiles < num_tiles)


def row_stats(problem: Problem, rows: torch.Tensor | None = None) -> None:
    """Fill ``problem.tile_max``, ``tile_sum`` and ``tile_argmax`` for all rows, or for the filtered ``rows`` again."""
    num_rows = problem.num_rows if rows is None else rows.shape[0]
    grid = (num_rows, -(-problem.num_tiles // LINES))
    row_stats_kernel[grid](
        problem.logits,
        problem.row_requests if rows is None else rows,
        problem.row_requests,
        problem.requests,
        problem.thresholds,
        problem.tile_max,
        problem.tile_sum,
        problem.tile_argmax,
        *problem.logits.stride(),
        problem.batch_size,
        problem.vocab_size,
        problem.num_tiles,
        IS_FILTERED=rows is not None,
        LINES=LINES,
        TILE=TILE,
        num_warps=8,
        enable_fp_fusion=True,
    )
