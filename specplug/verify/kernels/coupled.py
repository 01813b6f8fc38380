# ruff: noqa: ANN001, ANN201 - the parameters of a kernel are typed at launch
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Per tile, the best processed logit plus per-entry Gumbel noise, and where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from specplug.verify.kernels.common import (
    COUPLED_NOISE,
    INVERSE_TEMPERATURE,
    POSITION,
    SEED,
    SLOT_START,
    entry_exponentials,
    field,
    jit,
    real_field,
)
from specplug.verify.noise import TILE

if TYPE_CHECKING:
    from specplug.verify.kernels.problem import Problem


@jit
def coupled_kernel(
    logits_ptr,
    row_list_ptr,
    row_requests_ptr,
    requests_ptr,
    thresholds_ptr,
    score_ptr,
    argmax_ptr,
    row_stride,
    col_stride,
    num_requests,
    vocab_size,
    num_tiles,
    HAS_FILTERS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.load(row_list_ptr + tl.program_id(0))
    tile = tl.program_id(1)
    request = tl.load(row_requests_ptr + row)
    inverse_temperature = real_field(requests_ptr, request, num_requests, INVERSE_TEMPERATURE)
    slot = row - request - field(requests_ptr, request, num_requests, SLOT_START)
    position = field(requests_ptr, request, num_requests, POSITION) + slot
    seed = field(requests_ptr, request, num_requests, SEED)
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits_ptr + row * row_stride + ids.to(tl.int64) * col_stride, mask=ids < vocab_size, other=0.0)
    x = x.to(tl.float32)
    noise = -tl.log(entry_exponentials(seed, COUPLED_NOISE, slot * 0, position, ids, 0))
    is_kept = ids < vocab_size
    if HAS_FILTERS:
        is_kept = is_kept & (x >= tl.load(thresholds_ptr + row))
    scores = tl.where(is_kept, x.to(tl.float64) * inverse_temperature + noise, float("-inf"))
    tl.store(score_ptr + row * num_tiles + tile, tl.max(scores, 0))
    tl.store(argmax_ptr + row * num_tiles + tile, tile * TILE + tl.argmax(scores, 0, tie_break_left=True))


def coupled(problem: Problem) -> None:
    """Fill ``problem.coupled_score`` and, for the rows of coupled requests, overwrite ``tile_argmax``."""
    coupled_kernel[(problem.coupled_rows.shape[0], problem.num_tiles)](
        problem.logits,
        problem.coupled_rows,
        problem.row_requests,
        problem.requests,
        problem.thresholds,
        problem.coupled_score,
        problem.tile_argmax,
        *problem.logits.stride(),
        problem.batch_size,
        problem.vocab_size,
        problem.num_tiles,
        HAS_FILTERS=problem.filtered_rows.shape[0] > 0,
        TILE=TILE,
        enable_fp_fusion=True,
    )
