# ruff: noqa: ANN001, ANN201 - the parameters of a kernel are typed at launch
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""min-p, top-k and top-p as one threshold per row, without sorting a row and without a host sync.

Three steps: a bound below which no entry can matter, from the tile statistics alone; a second read of the logits
that gathers the entries at or above it; a bisection over the gathered entries for the exact threshold. Where more
entries are gathered than the buffer holds, the bisection reads the row itself. Masses are summed as integers, so
the result does not depend on the order of the gathered entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from specplug.verify.kernels.common import (
    INVERSE_TEMPERATURE,
    MIN_P,
    TOP_K,
    TOP_P,
    field,
    jit,
    real_field,
    row_masses,
)

if TYPE_CHECKING:
    from specplug.verify.kernels.problem import Problem

CAPACITY = 8192
"""Gathered entries per row that are bisected in registers."""
CHUNK = 4096
"""Entries read at a time."""

MASS_UNIT = tl.constexpr(float(2**40))


@jit
def key_of(x):
    """An int32 that orders as the float32 does."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def float_of(key):
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def kth_largest_key(keys, k, lowest):
    """The largest key that at least ``k`` of ``keys`` reach, at least ``lowest``."""
    low = lowest.to(tl.int64)
    high = low * 0 + 2147483648
    while high - low > 1:
        middle = (low + high) >> 1
        if tl.sum((keys.to(tl.int64) >= middle).to(tl.int32), 0) >= k:
            low = middle
        else:
            high = middle
    return low


@jit
def mass_of(x, top, inverse_temperature):
    return (tl.exp((x - top) * inverse_temperature).to(tl.float64) * MASS_UNIT).to(tl.int64)


@jit
def bound_kernel(
    row_list_ptr,
    row_requests_ptr,
    requests_ptr,
    max_ptr,
    sum_ptr,
    bound_ptr,
    num_gathered_ptr,
    num_requests,
    vocab_size,
    num_tiles,
    TILES: tl.constexpr,
):
    number = tl.program_id(0)
    row = tl.load(row_list_ptr + number)
    request = tl.load(row_requests_ptr + row)
    inverse_temperature = real_field(requests_ptr, request, num_requests, INVERSE_TEMPERATURE)
    top_k = field(requests_ptr, request, num_requests, TOP_K)
    top_p = real_field(requests_ptr, request, num_requests, TOP_P)
    min_p = real_field(requests_ptr, request, num_requests, MIN_P)
    top, _, total = row_masses(max_ptr, sum_ptr, row, num_tiles, inverse_temperature.to(tl.float32), TILES)
    bound = float("-inf")
    if min_p > 0.0:
        bound = (top.to(tl.float64) + tl.log(min_p) / inverse_temperature).to(tl.float32)
    if (top_k > 0) & (top_k <= num_tiles):
        # the tiles' maxima are entries too, so the k-th largest of them bounds the k-th largest entry from below
        tiles = tl.arange(0, TILES)
        tops = tl.load(max_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
        lowest = key_of(tl.min(tops, 0))
        bound = tl.maximum(bound, float_of(kth_largest_key(key_of(tops), top_k, lowest)))
    if (top_p < 1.0) & (top_k <= 0) & (min_p <= 0.0):
        # entries below this share of the mass weigh, all together, less than what top-p cuts
        share = (1.0 - top_p) * total.to(tl.float64) / vocab_size
        bound = (top.to(tl.float64) + tl.log(share) / inverse_temperature - 1e-6).to(tl.float32)
    tl.store(bound_ptr + number, bound)
    tl.store(num_gathered_ptr + number, 0)


@jit
def gather_kernel(
    logits_ptr,
    row_list_ptr,
    bound_ptr,
    gathered_ptr,
    num_gathered_ptr,
    row_stride,
    col_stride,
    vocab_size,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(row_list_ptr + number)
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * row_stride + ids.to(tl.int64) * col_stride, mask=ids < vocab_size, other=0.0)
    x = x.to(tl.float32)
    is_in = ((ids < vocab_size) & (x >= tl.load(bound_ptr + number))).to(tl.int32)
    count = tl.sum(is_in, 0)
    if count > 0:
        at = tl.atomic_add(num_gathered_ptr + number, count) + tl.cumsum(is_in, 0) - 1
        tl.store(gathered_ptr + number * CAPACITY + at, x, mask=(is_in > 0) & (at < CAPACITY))


@jit
def row_count(logits_ptr, row, row_stride, col_stride, vocab_size, key, CHUNK: tl.constexpr):
    """Entries of the row that reach ``key``, and, read from the row itself, nothing else."""
    count = 0
    for start in range(0, vocab_size, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * row_stride + ids.to(tl.int64) * col_stride, mask=ids < vocab_size, other=0.0)
        reaches = (ids < vocab_size) & (key_of(x.to(tl.float32)).to(tl.int64) >= key)
        count += tl.sum(reaches.to(tl.int32), 0)
    return count


@jit
def row_mass(logits_ptr, row, row_stride, col_stride, vocab_size, key, top, inverse_temperature, CHUNK: tl.constexpr):
    """Mass of the row's entries that reach ``key``."""
    mass = tl.full([], 0, tl.int64)
    for start in range(0, vocab_size, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * row_stride + ids.to(tl.int64) * col_stride, mask=ids < vocab_size, other=0.0)
        x = x.to(tl.float32)
        reaches = (ids < vocab_size) & (key_of(x).to(tl.int64) >= key)
        mass += tl.sum(tl.where(reaches, mass_of(x, top, inverse_temperature), 0), 0)
    return mass


@jit
def select_kernel(
    logits_ptr,
    row_list_ptr,
    row_requests_ptr,
    requests_ptr,
    max_ptr,
    sum_ptr,
    bound_ptr,
    gathered_ptr,
    num_gathered_ptr,
    thresholds_ptr,
    row_stride,
    col_stride,
    num_requests,
    vocab_size,
    num_tiles,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(row_list_ptr + number)
    request = tl.load(row_requests_ptr + row)
    inverse_temperature = real_field(requests_ptr, request, num_requests, INVERSE_TEMPERATURE)
    top_k = field(requests_ptr, request, num_requests, TOP_K)
    top_p = real_field(requests_ptr, request, num_requests, TOP_P)
    min_p = real_field(requests_ptr, request, num_requests, MIN_P)
    narrow = inverse_temperature.to(tl.float32)
    top, _, total = row_masses(max_ptr, sum_ptr, row, num_tiles, narrow, TILES)
    bound_key = key_of(tl.load(bound_ptr + number)).to(tl.int64)
    low = bound_key
    if min_p > 0.0:
        low = key_of((top.to(tl.float64) + tl.log(min_p) / inverse_temperature).to(tl.float32)).to(tl.int64)
    num_gathered = tl.load(num_gathered_ptr + number)
    if num_gathered <= CAPACITY:
        at = tl.arange(0, CAPACITY)
        x = tl.load(gathered_ptr + number * CAPACITY + at, mask=at < num_gathered, other=float("-inf"))
        keys = key_of(x)
        if (top_k > 0) & (top_k < vocab_size):
            low = tl.maximum(low, kth_largest_key(keys, top_k, bound_key))
        if top_p < 1.0:
            masses = tl.where(at < num_gathered, mass_of(x, top, narrow), 0)
            wanted = total.to(tl.float64) * MASS_UNIT
            if (top_k > 0) | (min_p > 0.0):
                wanted = tl.sum(tl.where(keys.to(tl.int64) >= low, masses, 0), 0).to(tl.float64)
            wanted = wanted * top_p
            high = low * 0 + 2147483648
            while high - low > 1:
                middle = (low + high) >> 1
                if tl.sum(tl.where(keys.to(tl.int64) >= middle, masses, 0), 0).to(tl.float64) >= wanted:
                    low = middle
                else:
                    high = middle
    else:
        if (top_k > 0) & (top_k < vocab_size):
            lowest = bound_key
            highest = low * 0 + 2147483648
            while highest - lowest > 1:
                middle = (lowest + highest) >> 1
                if row_count(logits_ptr, row, row_stride, col_stride, vocab_size, middle, CHUNK) >= top_k:
                    lowest = middle
                else:
                    highest = middle
            low = tl.maximum(low, lowest)
        if top_p < 1.0:
            wanted = total.to(tl.float64) * MASS_UNIT
            if (top_k > 0) | (min_p > 0.0):
                wanted = row_mass(
                    logits_ptr, row, row_stride, col_stride, vocab_size, low, top, narrow, CHUNK
                ).to(tl.float64)  # fmt: skip
            wanted = wanted * top_p
            high = low * 0 + 2147483648
            while high - low > 1:
                middle = (low + high) >> 1
                mass = row_mass(logits_ptr, row, row_stride, col_stride, vocab_size, middle, top, narrow, CHUNK)
                if mass.to(tl.float64) >= wanted:
                    low = middle
                else:
                    high = middle
    tl.store(thresholds_ptr + row, float_of(low))


def thresholds(problem: Problem) -> None:
    """Fill ``problem.thresholds`` for ``problem.filtered_rows``; other rows keep -inf."""
    rows = problem.filtered_rows
    bound_kernel[(rows.shape[0],)](
        rows,
        problem.row_requests,
        problem.requests,
        problem.tile_max,
        problem.tile_sum,
        problem.bound,
        problem.num_gathered,
        problem.batch_size,
        problem.vocab_size,
        problem.num_tiles,
        TILES=problem.padded_tiles,
        enable_fp_fusion=True,
    )
    gather_kernel[(rows.shape[0], -(-problem.vocab_size // CHUNK))](
        problem.logits,
        rows,
        problem.bound,
        problem.gathered,
        problem.num_gathered,
        *problem.logits.stride(),
        problem.vocab_size,
        CAPACITY=CAPACITY,
        CHUNK=CHUNK,
        num_warps=8,
        enable_fp_fusion=True,
    )
    select_kernel[(rows.shape[0],)](
        problem.logits,
        rows,
        problem.row_requests,
        problem.requests,
        problem.tile_max,
        problem.tile_sum,
        problem.bound,
        problem.gathered,
        problem.num_gathered,
        problem.thresholds,
        *problem.logits.stride(),
        problem.batch_size,
        problem.vocab_size,
        problem.num_tiles,
        TILES=problem.padded_tiles,
        CAPACITY=CAPACITY,
        CHUNK=CHUNK,
        num_warps=16,
        enable_fp_fusion=True,
    )
