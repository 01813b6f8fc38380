# ruff: noqa: ANN001, ANN201 - the parameters of a kernel are typed at launch
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The accept walk: per request, where its step ends; rows that need no further draw are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from specplug.verify.kernels.common import (
    BLOCK,
    DRAW_RESIDUAL,
    DRAW_TARGET,
    ENDED,
    NUM_SLOTS,
    RULE,
    SCAN_BLOCK,
    SLOT_START,
    UNUSABLE,
    field,
    jit,
    write_row,
)

if TYPE_CHECKING:
    from specplug.verify.kernels.problem import Problem


@jit
def entry(values, at, number):
    """One element of a vector in registers."""
    return tl.sum(tl.where(at == number, values, 0), 0)


@jit
def walk_kernel(
    draft_ids_ptr,
    requests_ptr,
    stands_ptr,
    row_ending_ptr,
    token_ptr,
    ratio_ptr,
    number_ptr,
    out_ptr,
    accepted_ptr,
    invalid_ptr,
    residual_weight_ptr,
    ending_ptr,
    num_requests,
    width,
    vocab_size,
    WIDTH: tl.constexpr,
):
    request = tl.program_id(0)
    rule = field(requests_ptr, request, num_requests, RULE)
    start = field(requests_ptr, request, num_requests, SLOT_START)
    size = field(requests_ptr, request, num_requests, NUM_SLOTS)
    at = tl.arange(0, WIDTH)
    rows = start + request + at
    is_row = at <= size
    stands = tl.load(stands_ptr + rows, mask=is_row, other=0)
    endings = tl.load(row_ending_ptr + rows, mask=is_row, other=ENDED)
    stop = tl.min(tl.where(stands > 0, WIDTH, at), 0)
    ending = entry(endings, at, stop)
    token = entry(tl.load(token_ptr + rows, mask=is_row, other=0), at, stop)
    weights = tl.where(at == stop, tl.where(ending == DRAW_RESIDUAL, 1.0, -1.0), -1.0)
    if rule == BLOCK:
        ratios = tl.load(ratio_ptr + rows, mask=at < stop, other=0.0)
        numbers = tl.load(number_ptr + rows, mask=is_row, other=1.0)
        length = stop  # of the block: up to the first slot without a token
        weights = tl.full([WIDTH], -1.0, tl.float32)
        weight = tl.max(tl.where(at == 0, 1.0, 0.0), 0)
        stop = stop * 0
        number = entry(numbers, at, -1)  # 0 before the empty prefix, which may always be kept
        while (stop < length) & (weight > 0.0):
            # the chance to end here never exceeds the weight, so no residual is needed above it
            weights = tl.where(at == stop, tl.where(number < weight, weight, -1.0), weights)
            number = entry(numbers, at, stop)
            weight = tl.minimum(weight * entry(ratios, at, stop), 1.0)
            stop += 1
        ending = ending * 0 + SCAN_BLOCK
        if weight > 0.0:
            last = entry(endings, at, stop)
            draft_id = tl.load(draft_ids_ptr + start + stop, mask=stop < size, other=-1)
            if (last == UNUSABLE) & (draft_id >= 0) & (draft_id < vocab_size):
                ending = UNUSABLE
            elif (stop == 0) | (number < weight):
                ending = tl.where(last == UNUSABLE, UNUSABLE, DRAW_TARGET)
                weights = tl.full([WIDTH], -1.0, tl.float32)
        if ending == SCAN_BLOCK:
            stop -= 1
    if ending == UNUSABLE:
        stop = stop * 0
        token = token * 0
        weights = tl.full([WIDTH], -1.0, tl.float32)
    tl.store(residual_weight_ptr + start + at, weights, mask=at < size)
    tl.store(invalid_ptr + request, (ending == UNUSABLE).to(tl.int8))
    if (ending == UNUSABLE) | (ending == ENDED):
        tl.store(ending_ptr + request, ENDED)
        write_row(out_ptr, accepted_ptr, draft_ids_ptr, request, start, stop, token, width, WIDTH)
    else:
        tl.store(ending_ptr + request, ending)
        tl.store(accepted_ptr + request, stop)


def walk(problem: Problem) -> None:
    """Write the rows that end here; leave ``ending``, ``accepted`` and ``residual_weight`` for the others."""
    walk_kernel[(problem.batch_size,)](
        problem.draft_ids,
        problem.requests,
        problem.stands,
        problem.row_ending,
        problem.token,
        problem.ratio,
        problem.number,
        problem.out,
        problem.accepted,
        problem.invalid,
        problem.residual_weight,
        problem.ending,
        problem.batch_size,
        problem.width,
        problem.vocab_size,
        WIDTH=problem.padded_width,
        num_warps=1,
        enable_fp_fusion=True,
    )
