# ruff: noqa: ANN001, ANN201 - the parameters of a kernel are typed at launch
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The accept walk: per request, slot by slot, until the request's step ends or only a draw is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from specplug.verify.kernels.common import (
    ACCEPT_NOISE,
    BLOCK,
    COUPLED,
    DRAW_RESIDUAL,
    DRAW_TARGET,
    ENDED,
    GREEDY,
    INVERSE_TEMPERATURE,
    MATCH,
    NUM_SLOTS,
    POSITION,
    RULE,
    SCAN_BLOCK,
    SEED,
    SLOT_START,
    STANDARD,
    STEP,
    SYNTHETIC,
    SYNTHETIC_GREEDY,
    TARGET_NOISE,
    draft_prob,
    draft_total,
    draw_target,
    field,
    is_usable,
    jit,
    real_field,
    row_masses,
    target_weights,
    uniform,
    write_row,
)
from specplug.verify.noise import TILE

if TYPE_CHECKING:
    from specplug.verify.kernels.problem import Problem


@jit
def first_argmax(max_ptr, argmax_ptr, row, num_tiles, TILES: tl.constexpr):
    """The id behind the first of the row's largest tile values."""
    tiles = tl.arange(0, TILES)
    tops = tl.load(max_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    return tl.load(argmax_ptr + row * num_tiles + tl.argmax(tops, 0, tie_break_left=True)).to(tl.int32)


@jit
def walk_kernel(
    logits_ptr,
    draft_ids_ptr,
    requests_ptr,
    slots_ptr,
    rates_ptr,
    thresholds_ptr,
    max_ptr,
    sum_ptr,
    argmax_ptr,
    score_ptr,
    draft_max_ptr,
    draft_sum_ptr,
    out_ptr,
    accepted_ptr,
    invalid_ptr,
    residual_weight_ptr,
    ending_ptr,
    row_stride,
    col_stride,
    law_col_stride,
    num_requests,
    num_slots,
    num_rates,
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
    rule = field(requests_ptr, request, num_requests, RULE)
    seed = field(requests_ptr, request, num_requests, SEED)
    position = field(requests_ptr, request, num_requests, POSITION)
    step = field(requests_ptr, request, num_requests, STEP)
    start = field(requests_ptr, request, num_requests, SLOT_START)
    size = field(requests_ptr, request, num_requests, NUM_SLOTS)
    inverse_temperature = real_field(requests_ptr, request, num_requests, INVERSE_TEMPERATURE).to(tl.float32)

    yes = size >= 0
    no = size < 0
    at = tl.arange(0, WIDTH)
    residual_weights = tl.full([WIDTH], -1.0, tl.float32)
    slot = size * 0
    weight = 1.0  # block: the path's running weight
    token = 0
    ending = 0
    is_invalid = no
    is_walking = yes
    while is_walking:
        row = start + request + slot
        has_draft = slot < size
        draft_id = tl.load(draft_ids_ptr + start + slot, mask=has_draft, other=-1).to(tl.int32)
        is_token = has_draft & (draft_id >= 0) & (draft_id < vocab_size)
        top, masses, total = row_masses(max_ptr, sum_ptr, row, num_tiles, inverse_temperature, TILES)
        lowest = float("-inf")
        if HAS_FILTERS:
            lowest = tl.load(thresholds_ptr + row)
        is_walking = no
        if not is_usable(top, total):
            is_invalid = yes
        elif (rule == GREEDY) | (rule == COUPLED):
            if rule == GREEDY:
                token = first_argmax(max_ptr, argmax_ptr, row, num_tiles, TILES)
            else:
                token = first_argmax(score_ptr, argmax_ptr, row, num_tiles, TILES)
            is_walking = is_token & (token == draft_id)
        elif rule == MATCH:
            token = draw_target(
                logits_ptr, row_stride, col_stride, row, masses, top, inverse_temperature, lowest, vocab_size,
                num_tiles, seed, TARGET_NOISE, step * 0, position + slot, TILES, TILE,
            )  # fmt: skip
            is_walking = is_token & (token == draft_id)
        elif (rule == SYNTHETIC) | (rule == SYNTHETIC_GREEDY):
            rate = tl.load(rates_ptr + slot, mask=slot < num_rates, other=0.0)
            is_walking = is_token & (uniform(seed, ACCEPT_NOISE, step, position + slot) < rate)
            ending = DRAW_TARGET
            if (rule == SYNTHETIC_GREEDY) & (not is_walking):
                token = first_argmax(max_ptr, argmax_ptr, row, num_tiles, TILES)
                ending = ENDED
        elif not is_token:
            ending = DRAW_TARGET
            if (rule == BLOCK) & (slot > 0):
                # the whole block is tested with the uniform of its last token
                if uniform(seed, ACCEPT_NOISE, step, position + slot - 1) < weight:
                    residual_weights = tl.full([WIDTH], -1.0, tl.float32)
                else:
                    ending = SCAN_BLOCK
                    slot -= 1
        else:
            ids = tl.zeros([1], tl.int32) + draft_id
            kept = target_weights(
                logits_ptr, row_stride, col_stride, row, ids, ids >= 0, top, inverse_temperature, lowest
            )
            target_chance = tl.sum(kept, 0) / total
            draft_top, draft_sum = draft_total(
                draft_max_ptr, draft_sum_ptr, slots_ptr, start + slot, num_slots, num_tiles, TILES
            )
            draft_chance = draft_prob(
                slots_ptr, start + slot, num_slots, law_col_stride, draft_id, draft_top, draft_sum, LAW_DTYPE, MAP_DTYPE
            )
            if rule == STANDARD:
                number = uniform(seed, ACCEPT_NOISE, step, position + slot)
                is_walking = number * draft_chance.to(tl.float64) < target_chance.to(tl.float64)
                ending = DRAW_TARGET
                if not (draft_chance > 0.0):
                    is_walking = no
                elif not is_walking:
                    ending = DRAW_RESIDUAL
                    residual_weights = tl.where(at == slot, 1.0, residual_weights)
            else:
                # a prefix can only pass where its uniform is below its weight; the empty one always may
                may_end_here = slot == 0
                if slot > 0:
                    may_end_here = uniform(seed, ACCEPT_NOISE, step, position + slot - 1) < weight
                if may_end_here:
                    residual_weights = tl.where(at == slot, weight, residual_weights)
                ratio = 0.0
                if draft_chance > 0.0:
                    ratio = target_chance / draft_chance
                weight = tl.minimum(weight * ratio, 1.0)
                is_walking = weight > 0.0
                ending = SCAN_BLOCK
        if is_walking:
            slot += 1

    num_accepted = slot
    if is_invalid:
        num_accepted = slot * 0
        token = 0
        ending = ENDED
        residual_weights = tl.full([WIDTH], -1.0, tl.float32)
    tl.store(residual_weight_ptr + start + at, residual_weights, mask=at < size)
    tl.store(invalid_ptr + request, is_invalid.to(tl.int8))
    tl.store(ending_ptr + request, ending)
    if ending == ENDED:
        write_row(out_ptr, accepted_ptr, draft_ids_ptr, request, start, num_accepted, token, width, WIDTH)
    else:
        tl.store(accepted_ptr + request, num_accepted.to(tl.int32))


def walk(problem: Problem) -> None:
    """Write the rows that end here; leave ``ending``, ``accepted`` and ``residual_weight`` for the others."""
    walk_kernel[(problem.batch_size,)](
        problem.logits,
        problem.draft_ids,
        problem.requests,
        problem.slots,
        problem.rates,
        problem.thresholds,
        problem.tile_max,
        problem.tile_sum,
        problem.tile_argmax,
        problem.coupled_score,
        problem.draft_max,
        problem.draft_sum,
        problem.out,
        problem.accepted,
        problem.invalid,
        problem.residual_weight,
        problem.ending,
        *problem.logits.stride(),
        problem.law_col_stride,
        problem.batch_size,
        problem.num_slots,
        problem.rates.shape[0],
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
