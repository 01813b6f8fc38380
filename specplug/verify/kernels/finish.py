# ruff: noqa: ANN001, ANN201 - the parameters of a kernel are typed at launch
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The draw that ends the rows which the walk left open; block verification first finds where they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from specplug.verify.kernels.common import (
    ACCEPT_NOISE,
    DRAW_TARGET,
    ENDED,
    INVERSE_TEMPERATURE,
    POSITION,
    RECOVER_NOISE,
    SCAN_BLOCK,
    SEED,
    SLOT_START,
    STEP,
    draft_prob,
    draft_total,
    draw_target,
    field,
    jit,
    pick_inside,
    race_tiles,
    real_field,
    row_masses,
    uniform,
    write_row,
)
from specplug.verify.kernels.residual import residual_weights
from specplug.verify.noise import TILE

if TYPE_CHECKING:
    from specplug.verify.kernels.problem import Problem


@jit
def load_masses(residual_mass_ptr, slot, num_tiles, TILES: tl.constexpr):
    tiles = tl.arange(0, TILES)
    return tl.load(residual_mass_ptr + slot * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)


@jit
def scan_block(
    residual_weight_ptr, residual_mass_ptr, start, last, num_tiles, seed, step, position, TILES: tl.constexpr
):
    """The longest prefix that passes its own test, the empty one if none does."""
    count = last
    is_scanning = count > 0
    while is_scanning:
        weight = tl.load(residual_weight_ptr + start + count)
        passes = False
        if weight >= 0.0:
            mass = tl.sum(load_masses(residual_mass_ptr, start + count, num_tiles, TILES), 0)
            left = mass + 1.0 - weight
            chance = tl.where(left > 0.0, mass / left, 1.0)
            passes = uniform(seed, ACCEPT_NOISE, step, position + count - 1) < chance
        if not passes:
            count -= 1
        is_scanning = (not passes) & (count > 0)
    return count


@jit
def finish_kernel(
    logits_ptr,
    draft_ids_ptr,
    requests_ptr,
    slots_ptr,
    thresholds_ptr,
    max_ptr,
    sum_ptr,
    draft_max_ptr,
    draft_sum_ptr,
    out_ptr,
    accepted_ptr,
    residual_weight_ptr,
    residual_mass_ptr,
    ending_ptr,
    row_stride,
    col_stride,
    law_col_stride,
    num_requests,
    num_slots,
    width,
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
    ending = tl.load(ending_ptr + request)
    if ending == ENDED:
        return
    seed = field(requests_ptr, request, num_requests, SEED)
    position = field(requests_ptr, request, num_requests, POSITION)
    step = field(requests_ptr, request, num_requests, STEP)
    start = field(requests_ptr, request, num_requests, SLOT_START)
    inverse_temperature = real_field(requests_ptr, request, num_requests, INVERSE_TEMPERATURE).to(tl.float32)
    count = tl.load(accepted_ptr + request).to(tl.int64)
    if ending == SCAN_BLOCK:
        count = scan_block(residual_weight_ptr, residual_mass_ptr, start, count, num_tiles, seed, step, position, TILES)
    row = start + request + count
    lowest = float("-inf")
    if HAS_FILTERS:
        lowest = tl.load(thresholds_ptr + row)
    top, masses, total = row_masses(max_ptr, sum_ptr, row, num_tiles, inverse_temperature, TILES)
    token = -1
    if ending != DRAW_TARGET:
        slot = start + count
        left = load_masses(residual_mass_ptr, slot, num_tiles, TILES)
        if tl.sum(left, 0) > 0.0:
            draft_id = tl.load(draft_ids_ptr + slot).to(tl.int32)
            draft_top, draft_sum = draft_total(
                draft_max_ptr, draft_sum_ptr, slots_ptr, slot, num_slots, num_tiles, TILES
            )
            draft_chance = draft_prob(
                slots_ptr, slot, num_slots, law_col_stride, draft_id, draft_top, draft_sum, LAW_DTYPE, MAP_DTYPE
            )
            tile = race_tiles(left, num_tiles, seed, RECOVER_NOISE, step, position + count, TILES)
            ids = tile * TILE + tl.arange(0, TILE)
            inside = residual_weights(
                logits_ptr, slots_ptr, row_stride, col_stride, law_col_stride, num_slots, slot, row, ids,
                ids < vocab_size, tl.load(residual_weight_ptr + slot), top, total, inverse_temperature, lowest,
                draft_id, draft_top, draft_sum, draft_chance, LAW_DTYPE, MAP_DTYPE,
            )  # fmt: skip
            number = uniform(seed, RECOVER_NOISE, step, position + count)
            token = (tile * TILE + pick_inside(inside, number, TILE)).to(tl.int32)
    if token < 0:
        # nothing is subtracted, or nothing is left: target and draft agree up to rounding
        token = draw_target(
            logits_ptr, row_stride, col_stride, row, masses, top, inverse_temperature, lowest, vocab_size, num_tiles,
            seed, RECOVER_NOISE, step, position + count, TILES, TILE,
        ).to(tl.int32)  # fmt: skip
    write_row(out_ptr, accepted_ptr, draft_ids_ptr, request, start, count, token, width, WIDTH)


def finish(problem: Problem) -> None:
    """Write the rows that the walk left open."""
    finish_kernel[(problem.batch_size,)](
        problem.logits,
        problem.draft_ids,
        problem.requests,
        problem.slots,
        problem.thresholds,
        problem.tile_max,
        problem.tile_sum,
        problem.draft_max,
        problem.draft_sum,
        problem.out,
        problem.accepted,
        problem.residual_weight,
        problem.residual_mass,
        problem.ending,
        *problem.logits.stride(),
        problem.law_col_stride,
        problem.batch_size,
        problem.num_slots,
        problem.width,
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
