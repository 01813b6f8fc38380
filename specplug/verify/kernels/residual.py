# ruff: noqa: ANN001, ANN201 - the parameters of a kernel are typed at launch
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Tile masses of ``(weight * target - draft)+``, only for slots where a token may have to be drawn from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from specplug.verify.kernels.common import (
    CERTAIN,
    INVERSE_TEMPERATURE,
    KIND,
    NUM_SLOTS,
    SLOT_START,
    draft_prob,
    draft_total,
    draft_weights,
    field,
    jit,
    real_field,
    row_masses,
    target_weights,
)
from specplug.verify.noise import TILE

if TYPE_CHECKING:
    from specplug.verify.kernels.problem import Problem


@jit
def residual_weights(
    logits_ptr,
    slots_ptr,
    row_stride,
    col_stride,
    law_col_stride,
    num_slots,
    slot,
    row,
    ids,
    mask,
    weight,
    top,
    total,
    inverse_temperature,
    lowest,
    draft_id,
    draft_top,
    draft_sum,
    draft_chance,
    LAW_DTYPE: tl.constexpr,
    MAP_DTYPE: tl.constexpr,
):
    """Residual chances of some ids. A certain draft leaves the target without its token; a law that denies its own
    token is not subtracted."""
    target = target_weights(logits_ptr, row_stride, col_stride, row, ids, mask, top, inverse_temperature, lowest)
    target = target / total * weight
    if field(slots_ptr, slot, num_slots, KIND) == CERTAIN:
        target = tl.where(ids == draft_id, 0.0, target)
    elif draft_chance > 0.0:
        draft = draft_weights(slots_ptr, slot, num_slots, law_col_stride, ids, mask, draft_top, LAW_DTYPE, MAP_DTYPE)
        target = tl.maximum(target - draft / draft_sum, 0.0)
    return target


@jit
def tile_mass(
    logits_ptr,
    draft_ids_ptr,
    requests_ptr,
    slots_ptr,
    thresholds_ptr,
    max_ptr,
    sum_ptr,
    draft_max_ptr,
    draft_sum_ptr,
    row_stride,
    col_stride,
    law_col_stride,
    num_requests,
    num_slots,
    vocab_size,
    num_tiles,
    request,
    slot,
    tile,
    weight,
    LAW_DTYPE: tl.constexpr,
    MAP_DTYPE: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The slot's residual mass in one tile; the logits are not read where a certain draft leaves the tile alone."""
    row = slot + request
    inverse_temperature = real_field(requests_ptr, request, num_requests, INVERSE_TEMPERATURE).to(tl.float32)
    lowest = float("-inf")
    if HAS_FILTERS:
        lowest = tl.load(thresholds_ptr + row)
    top, masses, total = row_masses(max_ptr, sum_ptr, row, num_tiles, inverse_temperature, TILES)
    draft_id = tl.load(draft_ids_ptr + slot).to(tl.int32)
    if (field(slots_ptr, slot, num_slots, KIND) == CERTAIN) & (tile != draft_id // TILE):
        mass = tl.sum(tl.where(tl.arange(0, TILES) == tile, masses, 0.0), 0) / total * weight
    else:
        draft_top, draft_sum = draft_total(draft_max_ptr, draft_sum_ptr, slots_ptr, slot, num_slots, num_tiles, TILES)
        draft_chance = draft_prob(
            slots_ptr, slot, num_slots, law_col_stride, draft_id, draft_top, draft_sum, LAW_DTYPE, MAP_DTYPE
        )
        ids = tile * TILE + tl.arange(0, TILE)
        left = residual_weights(
            logits_ptr, slots_ptr, row_stride, col_stride, law_col_stride, num_slots, slot, row, ids, ids < vocab_size,
            weight, top, total, inverse_temperature, lowest, draft_id, draft_top, draft_sum, draft_chance,
            LAW_DTYPE, MAP_DTYPE,
        )  # fmt: skip
        mass = tl.sum(left, 0)
    return mass


@jit
def residual_kernel(
    logits_ptr,
    draft_ids_ptr,
    requests_ptr,
    slots_ptr,
    thresholds_ptr,
    max_ptr,
    sum_ptr,
    draft_max_ptr,
    draft_sum_ptr,
    residual_weight_ptr,
    residual_mass_ptr,
    row_stride,
    col_stride,
    law_col_stride,
    num_requests,
    num_slots,
    vocab_size,
    num_tiles,
    LAW_DTYPE: tl.constexpr,
    MAP_DTYPE: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    request = tl.program_id(0)
    tile = tl.program_id(1)
    start = field(requests_ptr, request, num_requests, SLOT_START)
    at = tl.arange(0, WIDTH)
    is_slot = at < field(requests_ptr, request, num_requests, NUM_SLOTS)
    weights = tl.load(residual_weight_ptr + start + at, mask=is_slot, other=-1.0)
    offset = tl.max(tl.where(weights >= 0.0, at, -1), 0)
    while offset >= 0:
        slot = start + offset
        weight = tl.max(tl.where(at == offset, weights, -1.0), 0)
        mass = tile_mass(
            logits_ptr, draft_ids_ptr, requests_ptr, slots_ptr, thresholds_ptr, max_ptr, sum_ptr, draft_max_ptr,
            draft_sum_ptr, row_stride, col_stride, law_col_stride, num_requests, num_slots, vocab_size, num_tiles,
            request, slot, tile, weight, LAW_DTYPE, MAP_DTYPE, HAS_FILTERS, TILES, TILE,
        )  # fmt: skip
        tl.store(residual_mass_ptr + slot * num_tiles + tile, mass)
        weights = tl.where(at == offset, -1.0, weights)
        offset = tl.max(tl.where(weights >= 0.0, at, -1), 0)


def residual(problem: Problem) -> None:
    """Fill ``problem.residual_mass`` where ``problem.residual_weight`` is not negative."""
    residual_kernel[(problem.batch_size, problem.num_tiles)](
        problem.logits,
        problem.draft_ids,
        problem.requests,
        problem.slots,
        problem.thresholds,
        problem.tile_max,
        problem.tile_sum,
        problem.draft_max,
        problem.draft_sum,
        problem.residual_weight,
        problem.residual_mass,
        *problem.logits.stride(),
        problem.law_col_stride,
        problem.batch_size,
        problem.num_slots,
        problem.vocab_size,
        problem.num_tiles,
        LAW_DTYPE=problem.law_dtype,
        MAP_DTYPE=problem.map_dtype,
        HAS_FILTERS=problem.filtered_rows.shape[0] > 0,
        TILES=problem.padded_tiles,
        TILE=TILE,
        WIDTH=problem.padded_width,
        enable_fp_fusion=True,
    )
