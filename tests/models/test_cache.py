"""The ragged cache alone: lengths, slots, rollback, growth, rows that change hands."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from specplug.models.cache import RaggedCache

HEADS, DIM = 2, 4


def make_cache(windows: Sequence[int | None] = (None,), **limits: int) -> RaggedCache:
    sizes = {"max_num_seqs": 3, "max_model_len": 64, "max_query_tokens": 8} | limits
    return RaggedCache(windows, device=torch.device("cpu"), **sizes)


def append(cache: RaggedCache, counts: Sequence[int], *, fill: float | None = None) -> torch.Tensor:
    """Append tokens whose states are their positions (or ``fill``) in every layer; returns the positions."""
    step = cache.begin(counts)
    positions = step.position_ids[0]
    values = positions.float() if fill is None else torch.full(positions.shape, fill)
    states = values[None, None, :, None].expand(1, HEADS, -1, DIM)
    for index in range(len(cache)):
        cache.update(states, -states, index)
        step.take_layer()
    cache.end()
    cache.finish(counts)
    return positions


def keys(cache: RaggedCache, layer: int = 0) -> torch.Tensor:
    """``[rows, capacity]`` of a layer's keys; heads and dims all hold the same."""
    found = cache.ragged_layers[layer].keys
    assert found is not None
    return found[:, 0, :, 0]


def test_rows_append_at_their_own_length() -> None:
    cache = make_cache()
    for _ in range(3):
        cache.acquire()
    append(cache, [5, 0, 2])
    positions = append(cache, [1, 3, 2])
    assert positions.tolist() == [5, 0, 1, 2, 2, 3]
    assert cache.lengths == [6, 3, 4]
    assert keys(cache)[:, :6].tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 0, 0], [0, 1, 2, 3, 0, 0]]


def test_every_head_and_the_values_are_written() -> None:
    cache = make_cache()
    cache.acquire()
    append(cache, [3])
    layer = cache.ragged_layers[0]
    assert layer.keys is not None and layer.values is not None
    expected = torch.arange(3.0)[None, :, None].expand(HEADS, 3, DIM)
    assert torch.equal(layer.keys[0, :, :3], expected)
    assert torch.equal(layer.values[0, :, :3], -expected)


def test_B81_rollback_takes_absolute_lengths() -> None:
    cache = make_cache()
    row = cache.acquire()
    append(cache, [6])
    with pytest.raises(ValueError, match="holds 6 tokens and cannot be rolled back to length 9"):
        cache.rollback(row, 9)
    with pytest.raises(ValueError, match="holds 6 tokens and cannot be rolled back to length -1"):
        cache.rollback(row, -1)
    assert cache.lengths == [6]
    cache.rollback(row, 0)
    assert cache.lengths == [0]
    with pytest.raises(ValueError, match="holds 0 tokens"):
        cache.rollback(row, 8)


def test_rollback_runs_no_tensor_operation() -> None:
    cache = make_cache([None, 16])
    row = cache.acquire()
    append(cache, [8])
    before = [keys(cache, layer).data_ptr() for layer in range(2)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        cache.rollback(row, 3)
    assert not [event for event in profiler.events() if event.name.startswith("aten::")]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as control:
        torch.zeros(2).clone()
    assert [event for event in control.events() if event.name.startswith("aten::")]
    assert [keys(cache, layer).data_ptr() for layer in range(2)] == before


def test_steps_within_the_capacity_keep_the_buffers() -> None:
    cache = make_cache()
    cache.acquire()
    append(cache, [8])
    size, address = cache.num_bytes, keys(cache).data_ptr()
    for _ in range(5):
        append(cache, [8])
        cache.rollback(0, cache.lengths[0] - 3)
    assert (cache.num_bytes, keys(cache).data_ptr()) == (size, address)


def test_capacity_doubles_up_to_the_limit_and_keeps_the_entries() -> None:
    cache = make_cache(max_model_len=1000, max_query_tokens=300)
    for _ in range(2):
        cache.acquire()
    append(cache, [200, 10])
    capacities = []
    for _ in range(3):
        append(cache, [250, 0])
        capacities.append(cache.ragged_layers[0].capacity)
    assert capacities == [512, 1000, 1000]
    assert keys(cache).shape == (3, 1000)
    assert keys(cache)[0, :950].tolist() == list(range(950))
    assert keys(cache)[1, :12].tolist() == [*range(10), 0, 0]


def test_a_small_session_takes_little() -> None:
    cache = make_cache(max_num_seqs=8, max_model_len=32768)
    cache.acquire()
    append(cache, [8])
    assert cache.num_bytes == 2 * 8 * HEADS * 256 * DIM * 4


def test_released_row_is_filled_by_the_last_one() -> None:
    cache = make_cache()
    for _ in range(3):
        cache.acquire()
    append(cache, [8, 3, 5])
    assert cache.release(0) == 2
    assert cache.lengths == [5, 3]
    assert keys(cache)[:, :8].tolist() == [[0, 1, 2, 3, 4, 0, 0, 0], [0, 1, 2, 0, 0, 0, 0, 0], [0] * 8]
    assert cache.release(1) is None
    assert cache.lengths == [5]


def test_a_row_that_changes_hands_is_cleared_also_past_its_length() -> None:
    cache = make_cache([None, 4])
    for _ in range(2):
        cache.acquire()
    append(cache, [6, 2], fill=torch.nan)
    cache.rollback(0, 1)
    cache.release(0)
    cache.release(0)
    for layer in range(2):
        assert keys(cache, layer).eq(0).all()
    assert cache.acquire() == 0


def test_a_ring_keeps_position_p_in_slot_p_modulo_its_size() -> None:
    cache = make_cache([4], max_query_tokens=3)  # a ring of 4 + 3 - 1 slots
    cache.acquire()
    for _ in range(5):
        append(cache, [3])
    assert keys(cache).shape == (3, 6)
    assert keys(cache)[0].tolist() == [12, 13, 14, 9, 10, 11]


def test_a_ring_refuses_a_rollback_past_what_it_kept() -> None:
    cache = make_cache([4], max_query_tokens=3)
    cache.acquire()
    for _ in range(5):
        append(cache, [3])
    cache.rollback(0, 12)
    with pytest.raises(ValueError, match=r"written up to 15 tokens .* a window of 4 allows 3 tokens"):
        cache.rollback(0, 11)
    assert cache.lengths == [12]
    cache.rollback(0, 12)


def test_a_ring_that_never_wrapped_rolls_back_to_any_length() -> None:
    cache = make_cache([4], max_query_tokens=3)
    cache.acquire()
    append(cache, [3])
    append(cache, [3])
    cache.rollback(0, 1)
    assert cache.lengths == [1]


def test_counts_that_do_not_fit_are_refused_before_anything_changes() -> None:
    cache = make_cache(max_model_len=10)
    for _ in range(2):
        cache.acquire()
    append(cache, [8, 1])
    for counts, match in (
        ([1], "1 counts of query tokens for 2 rows"),
        ([0, 0], "at least one query token"),
        ([0, 9], "row 1: 9 query tokens; 0 to max_query_tokens=8 fit"),
        ([0, -1], "row 1: -1 query tokens"),
        ([3, 0], r"row 0: 8 \+ 3 tokens exceed max_model_len=10"),
    ):
        with pytest.raises(ValueError, match=match):
            cache.begin(counts)
    assert cache.lengths == [8, 1]


def test_rows_that_are_not_there() -> None:
    cache = make_cache(max_num_seqs=1)
    cache.acquire()
    with pytest.raises(ValueError, match="all max_num_seqs=1 rows are taken"):
        cache.acquire()
    with pytest.raises(ValueError, match="row 1 is not in use"):
        cache.release(1)
    with pytest.raises(ValueError, match="row 2 is not in use"):
        cache.rollback(2, 0)


def test_states_are_taken_only_inside_a_step() -> None:
    cache = make_cache()
    with pytest.raises(RuntimeError, match="only inside"):
        cache.update(torch.zeros(1, HEADS, 1, DIM), torch.zeros(1, HEADS, 1, DIM), 0)


def test_the_public_cache_protocol_answers() -> None:
    cache = make_cache([None, 16])
    cache.acquire()
    append(cache, [5])
    cache.begin([1])
    assert len(cache) == 2
    assert cache.is_sliding == [False, True]
    assert cache.get_seq_length() == 5
    assert cache.get_max_length(0) == 64
    assert cache.get_mask_sizes(1, 0) == (64, 0)
