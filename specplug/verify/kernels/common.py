# ruff: noqa: ANN001, ANN201 - the parameters of a kernel are typed at launch
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What the kernels share: noise, a row's tile statistics, chances of single tokens, draws.

A *row* is one row of target logits; a *slot* one draft token; a *request* one row of the batch. Tiles are the
``TILE`` entries of ``specplug.verify.noise``; a tile's statistics are its maximum, the sum of exponentials below
it at the request's temperature, and its first arg-max.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.random import philox as tl_philox

from specplug.verify.noise import Purpose

# fields of the request table, int64 [NUM_REQUEST_FIELDS, batch]; chances and temperatures as float64 bits
RULE = tl.constexpr(0)
SEED = tl.constexpr(1)
POSITION = tl.constexpr(2)
STEP = tl.constexpr(3)
SLOT_START = tl.constexpr(4)
NUM_SLOTS = tl.constexpr(5)
INVERSE_TEMPERATURE = tl.constexpr(6)
TOP_K = tl.constexpr(7)
TOP_P = tl.constexpr(8)
MIN_P = tl.constexpr(9)
NUM_REQUEST_FIELDS = 10

# fields of the slot table, int64 [NUM_SLOT_FIELDS, num_slots]
KIND = tl.constexpr(0)
LAW_ROW = tl.constexpr(1)  # address of the slot's draft logits
LOGSUMEXP = tl.constexpr(2)  # address of their log-sum-exp (indirect)
ID_MAP = tl.constexpr(3)  # address of the target-to-draft ids (indirect)
STATS_ROW = tl.constexpr(4)  # row of the draft's tile statistics (dense)
NUM_SLOT_FIELDS = 5

# kinds of law; a draft token of unknown law is verified like a certain one
CERTAIN = tl.constexpr(0)
DENSE = tl.constexpr(1)
INDIRECT = tl.constexpr(2)

# rules
GREEDY = tl.constexpr(0)
MATCH = tl.constexpr(1)
STANDARD = tl.constexpr(2)
BLOCK = tl.constexpr(3)
SYNTHETIC = tl.constexpr(4)
COUPLED = tl.constexpr(5)
SYNTHETIC_GREEDY = tl.constexpr(6)

# how a request's row ends
ENDED = tl.constexpr(0)
DRAW_TARGET = tl.constexpr(1)
DRAW_RESIDUAL = tl.constexpr(2)
SCAN_BLOCK = tl.constexpr(3)
UNUSABLE = tl.constexpr(4)

TARGET_NOISE = tl.constexpr(int(Purpose.TARGET))
ACCEPT_NOISE = tl.constexpr(int(Purpose.ACCEPT))
RECOVER_NOISE = tl.constexpr(int(Purpose.RECOVER))
COUPLED_NOISE = tl.constexpr(int(Purpose.COUPLED))

jit: Any = triton.jit


@jit
def field(table_ptr, number, count, FIELD: tl.constexpr):
    return tl.load(table_ptr + FIELD * count + number)


@jit
def real_field(table_ptr, number, count, FIELD: tl.constexpr):
    return tl.load(table_ptr + FIELD * count + number).to(tl.float64, bitcast=True)


# --- noise ----------------------------------------------------------------------------------------------------


@jit
def words(seed, purpose, step, position, index):
    """Four words for each counter; ``index`` is a block."""
    zero = (index * 0).to(tl.uint32)
    return tl_philox(
        seed,
        index.to(tl.uint32),
        zero + position.to(tl.uint32),
        zero + step.to(tl.uint32),
        zero + purpose,
        10,
    )


@jit
def uniform_of(first, second):
    bits = ((first.to(tl.uint64) << 32) | second.to(tl.uint64)) >> 12
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16


@jit
def exponential_of(word):
    return -tl.log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10)


@jit
def lane_of(first, second, third, fourth, lane):
    low = tl.where(lane == 0, first, second)
    high = tl.where(lane == 2, third, fourth)
    return tl.where(lane < 2, low, high)


@jit
def uniform(seed, purpose, step, position):
    """The scalar uniform of block 0."""
    first, second, _, _ = words(seed, purpose, step, position, tl.zeros([1], tl.int32))
    return tl.sum(uniform_of(first, second), 0)


@jit
def entry_exponentials(seed, purpose, step, position, entries, first_block):
    """One unit exponential per entry: lane ``e % 4`` of block ``first_block + e // 4``."""
    first, second, third, fourth = words(seed, purpose, step, position, first_block + entries // 4)
    return exponential_of(lane_of(first, second, third, fourth, entries % 4))


# --- a row's statistics and single chances ------------------------------------------------------------------------


@jit
def tile_stats(x, inverse_temperature):
    """Of each line of ``x`` [tiles, TILE]: maximum, sum of exponentials below it (NaN gets through), arg-max."""
    top = tl.max(x, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp((x - base[:, None]) * inverse_temperature), 1)
    return top, total, tl.argmax(x, 1, tie_break_left=True)


@jit
def row_masses(max_ptr, sum_ptr, row, num_tiles, inverse_temperature, TILES: tl.constexpr):
    """The row's maximum, its tiles' masses relative to it, and their sum (NaN or infinite when unusable)."""
    tiles = tl.arange(0, TILES)
    at = row.to(tl.int64) * num_tiles + tiles
    tops = tl.load(max_ptr + at, mask=tiles < num_tiles, other=float("-inf"))
    sums = tl.load(sum_ptr + at, mask=tiles < num_tiles, other=0.0)
    top = tl.max(tops, 0)
    masses = sums * tl.exp((tops - top) * inverse_temperature)
    return top, masses, tl.sum(masses, 0)


@jit
def is_usable(top, total):
    return (total > 0.0) & (total < float("inf")) & (top > float("-inf")) & (top < float("inf"))


@jit
def target_weights(logits_ptr, row_stride, col_stride, row, ids, mask, top, inverse_temperature, lowest):
    """``exp`` of processed logits relative to the row's maximum; 0 where masked or filtered out."""
    x = tl.load(logits_ptr + row.to(tl.int64) * row_stride + ids.to(tl.int64) * col_stride, mask=mask, other=0.0)
    x = x.to(tl.float32)
    weights = tl.exp((x - top) * inverse_temperature)
    return tl.where(mask & (x >= lowest), weights, 0.0)


@jit
def draft_weights(
    slots_ptr, slot, num_slots, col_stride, ids, mask, top, LAW_DTYPE: tl.constexpr, MAP_DTYPE: tl.constexpr
):
    """``exp`` of a dense law's logits relative to ``top``, or an indirect law's chances themselves."""
    kind = field(slots_ptr, slot, num_slots, KIND)
    row_ptr = field(slots_ptr, slot, num_slots, LAW_ROW).to(tl.pointer_type(LAW_DTYPE))
    base = top
    at = ids.to(tl.int64)
    reached = mask
    if kind == INDIRECT:
        base = tl.load(field(slots_ptr, slot, num_slots, LOGSUMEXP).to(tl.pointer_type(tl.float32)))
        map_ptr = field(slots_ptr, slot, num_slots, ID_MAP).to(tl.pointer_type(MAP_DTYPE))
        at = tl.load(map_ptr + ids.to(tl.int64), mask=mask, other=-1).to(tl.int64)
        reached = mask & (at >= 0)
    x = tl.load(row_ptr + at * col_stride, mask=reached, other=0.0).to(tl.float32)
    return tl.where(reached, tl.exp(x - base), 0.0)


@jit
def draft_total(draft_max_ptr, draft_sum_ptr, slots_ptr, slot, num_slots, num_tiles, TILES: tl.constexpr):
    """Maximum and normaliser of the slot's law; 0 and 1 where chances come without."""
    top = 0.0
    total = 1.0
    if field(slots_ptr, slot, num_slots, KIND) == DENSE:
        row = field(slots_ptr, slot, num_slots, STATS_ROW)
        top, _, total = row_masses(draft_max_ptr, draft_sum_ptr, row, num_tiles, 1.0, TILES)
    return top, total


@jit
def draft_prob(
    slots_ptr, slot, num_slots, col_stride, draft_id, top, total, LAW_DTYPE: tl.constexpr, MAP_DTYPE: tl.constexpr
):
    """Chance of the slot's own token under its law."""
    prob = 1.0
    if field(slots_ptr, slot, num_slots, KIND) != CERTAIN:
        ids = tl.zeros([1], tl.int32) + draft_id
        weights = draft_weights(slots_ptr, slot, num_slots, col_stride, ids, ids >= 0, top, LAW_DTYPE, MAP_DTYPE)
        prob = tl.sum(weights, 0) / total
    return prob


# --- draws --------------------------------------------------------------------------------------------------------


@jit
def race_tiles(masses, num_tiles, seed, purpose, step, position, TILES: tl.constexpr):
    """The tile that a draw falls into."""
    tiles = tl.arange(0, TILES)
    tickets = entry_exponentials(seed, purpose, step, position, tiles, 1)
    scores = tl.where(tiles < num_tiles, masses.to(tl.float64) / tickets, -1.0)
    return tl.argmax(scores, 0, tie_break_left=True)


@jit
def pick_inside(weights, number, TILE: tl.constexpr):
    """The entry of a tile, by inverse distribution of the uniform ``number``."""
    entries = tl.arange(0, TILE)
    sums = tl.cumsum(weights.to(tl.float64), 0)
    bound = number * tl.max(sums, 0)
    inside = tl.sum((sums <= bound).to(tl.int32), 0)
    last = tl.max(tl.where(weights > 0.0, entries, 0), 0)
    return tl.minimum(inside, last)


@jit
def draw_target(
    logits_ptr,
    row_stride,
    col_stride,
    row,
    masses,
    top,
    inverse_temperature,
    lowest,
    vocab_size,
    num_tiles,
    seed,
    purpose,
    step,
    position,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """A token from the processed target law of ``row``; reads one tile."""
    tile = race_tiles(masses, num_tiles, seed, purpose, step, position, TILES)
    ids = tile * TILE + tl.arange(0, TILE)
    weights = target_weights(
        logits_ptr, row_stride, col_stride, row, ids, ids < vocab_size, top, inverse_temperature, lowest
    )
    return tile * TILE + pick_inside(weights, uniform(seed, purpose, step, position), TILE)


@jit
def write_row(
    out_ptr, accepted_ptr, draft_ids_ptr, request, slot_start, num_accepted, token, width, WIDTH: tl.constexpr
):
    """The request's accepted tokens, its last token, and padding."""
    at = tl.arange(0, WIDTH)
    ids = tl.load(draft_ids_ptr + slot_start + at, mask=at < num_accepted, other=-1).to(tl.int32)
    ids = tl.where(at == num_accepted, token.to(tl.int32), ids)
    tl.store(out_ptr + request.to(tl.int64) * width + at, ids, mask=at < width)
    tl.store(accepted_ptr + request, num_accepted.to(tl.int32))
