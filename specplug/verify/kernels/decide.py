# ruff: noqa: ANN001, ANN201 - the parameters of a kernel are typed at launch
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""For every logit row at once, what happens if the walk reaches it: its token, or whether its draft stands."""

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
    SEED,
    SLOT_START,
    STEP,
    SYNTHETIC,
    SYNTHETIC_GREEDY,
    TARGET_NOISE,
    UNUSABLE,
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
def decide_kernel(
    logits_ptr,
    draft_ids_ptr,
    row_requests_ptr,
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
    stands_ptr,
    row_ending_ptr,
    token_ptr,
    ratio_ptr,
    number_ptr,
    row_stride,
    col_stride,
    law_col_stride,
    num_requests,
    num_slots,
    num_rates,
    vocab_size,
    num_tiles,
    LAW_DTYPE: tl.constexpr,
    MAP_DTYPE: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(row_requests_ptr + row)
    rule = field(requests_ptr, request, num_requests, RULE)
    seed = field(requests_ptr, request, num_requests, SEED)
    step = field(requests_ptr, request, num_requests, STEP)
    slot = row - request  # over the whole batch
    offset = slot - field(requests_ptr, request, num_requests, SLOT_START)
    position = field(requests_ptr, request, num_requests, POSITION) + offset
    has_draft = offset < field(requests_ptr, request, num_requests, NUM_SLOTS)
    inverse_temperature = real_field(requests_ptr, request, num_requests, INVERSE_TEMPERATURE).to(tl.float32)
    draft_id = tl.load(draft_ids_ptr + slot, mask=has_draft, other=-1).to(tl.int32)
    is_token = has_draft & (draft_id >= 0) & (draft_id < vocab_size)
    lowest = float("-inf")
    if HAS_FILTERS:
        lowest = tl.load(thresholds_ptr + row)
    top, masses, total = row_masses(max_ptr, sum_ptr, row, num_tiles, inverse_temperature, TILES)

    stands = slot < 0
    ending = ENDED
    token = -1
    if not is_usable(top, total):
        ending = UNUSABLE
    elif (rule == GREEDY) | (rule == COUPLED):
        if rule == GREEDY:
            token = first_argmax(max_ptr, argmax_ptr, row, num_tiles, TILES)
        else:
            token = first_argmax(score_ptr, argmax_ptr, row, num_tiles, TILES)
        stands = is_token & (token == draft_id)
    elif rule == MATCH:
        token = draw_target(
            logits_ptr, row_stride, col_stride, row, masses, top, inverse_temperature, lowest, vocab_size, num_tiles,
            seed, TARGET_NOISE, step * 0, position, TILES, TILE,
        )  # fmt: skip
        stands = is_token & (token == draft_id)
    else:
        number = uniform(seed, ACCEPT_NOISE, step, position)
        ending = DRAW_TARGET
        if (rule == SYNTHETIC) | (rule == SYNTHETIC_GREEDY):
            stands = is_token & (number < tl.load(rates_ptr + offset, mask=offset < num_rates, other=0.0))
            if rule == SYNTHETIC_GREEDY:
                token = first_argmax(max_ptr, argmax_ptr, row, num_tiles, TILES)
                ending = ENDED
        elif is_token:
            ids = tl.zeros([1], tl.int32) + draft_id
            kept = target_weights(
                logits_ptr, row_stride, col_stride, row, ids, ids >= 0, top, inverse_temperature, lowest
            )
            target_chance = tl.sum(kept, 0) / total
            draft_top, draft_sum = draft_total(
                draft_max_ptr, draft_sum_ptr, slots_ptr, slot, num_slots, num_tiles, TILES
            )
            draft_chance = draft_prob(
                slots_ptr, slot, num_slots, law_col_stride, draft_id, draft_top, draft_sum, LAW_DTYPE, MAP_DTYPE
            )
            ratio = 0.0
            if draft_chance > 0.0:
                stands = number * draft_chance.to(tl.float64) < target_chance.to(tl.float64)
                ending = DRAW_RESIDUAL
                ratio = target_chance / draft_chance
            if rule == BLOCK:
                # its own test comes later; here a slot stands when it holds a token
                stands = is_token
                tl.store(ratio_ptr + row, ratio)
        if rule == BLOCK:
            tl.store(number_ptr + row, number)
    tl.store(stands_ptr + row, stands.to(tl.int8))
    tl.store(row_ending_ptr + row, ending)
    tl.store(token_ptr + row, token)


def decide(problem: Problem) -> None:
    """Fill ``stands``, ``row_ending`` and ``token``, and for block ``ratio`` and ``number``, for every row."""
    decide_kernel[(problem.num_rows,)](
        problem.logits,
        problem.draft_ids,
        problem.row_requests,
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
        problem.stands,
        problem.row_ending,
        problem.token,
        problem.ratio,
        problem.number,
        *problem.logits.stride(),
        problem.law_col_stride,
        problem.batch_size,
        problem.num_slots,
        problem.rates.shape[0],
        problem.vocab_size,
        problem.num_tiles,
        LAW_DTYPE=problem.law_dtype,
        MAP_DTYPE=problem.map_dtype,
        HAS_FILTERS=problem.filtered_rows.shape[0] > 0,
        TILES=problem.padded_tiles,
        TILE=TILE,
        enable_fp_fusion=True,
    )
