"""Packed attention against attention written out row by row, and the plan it follows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from specplug.errors import ModelError
from specplug.models.attention import dummy_mask, packed_attention
from specplug.models.cache import RaggedCache
from specplug.models.step_plan import LayerKind, plan_step, split_rows

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 4, 2, 8


class Packed:
    """One layer's cache beside the whole history of each row, for attention written out."""

    def __init__(self, num_rows: int, window: int | None = None, *, max_query_tokens: int = 200) -> None:
        self.cache = RaggedCache(
            [window], max_num_seqs=num_rows, max_model_len=600, max_query_tokens=max_query_tokens, device=CPU
        )
        self.window = window
        self.module = torch.nn.Module()
        self.history: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(num_rows):
            self.cache.acquire()
            self.history.append((torch.zeros(KV_HEADS, 0, DIM), torch.zeros(KV_HEADS, 0, DIM)))

    def step(self, counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Append random states; returns what packed attention gives and what it should, ``[T, heads, dim]``."""
        num_tokens = sum(counts)
        query = torch.randn(1, HEADS, num_tokens, DIM)
        key, value = torch.randn(1, KV_HEADS, num_tokens, DIM), torch.randn(1, KV_HEADS, num_tokens, DIM)
        plan = self.cache.begin(counts)
        buffers = self.cache.update(key, value, 0)
        found, _ = packed_attention(self.module, query, *buffers, None, specplug_step=plan)
        self.cache.end()
        self.cache.finish(counts)
        expected = []
        for row, (q, k, v) in enumerate(
            zip(*(states[0].split(list(counts), dim=1) for states in (query, key, value)), strict=True)
        ):
            old_key, old_value = self.history[row]
            self.history[row] = (torch.cat([old_key, k], 1), torch.cat([old_value, v], 1))
            expected.append(self._attend(q, *self.history[row]))
        return found[0], torch.cat(expected)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        groups = HEADS // KV_HEADS
        key, value = key.repeat_interleave(groups, 0).double(), value.repeat_interleave(groups, 0).double()
        end, count = key.shape[1], query.shape[1]
        positions = torch.arange(end - count, end)[:, None]
        visible = torch.arange(end) <= positions
        if self.window is not None:
            visible &= torch.arange(end) > positions - self.window
        scores = (query.double() @ key.transpose(1, 2) * DIM**-0.5).masked_fill(~visible, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(0, 1).float()

    def rollback(self, row: int, num_tokens: int) -> None:
        length = self.cache.lengths[row] - num_tokens
        self.cache.rollback(row, length)
        self.history[row] = (self.history[row][0][:, :length], self.history[row][1][:, :length])


counts_lists = st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(counts_lists, st.sampled_from([None, 1, 5]), st.integers(0, 3))
def test_random_ragged_steps_with_rollbacks(steps: list[list[int]], window: int | None, rejected: int) -> None:
    packed = Packed(3, window, max_query_tokens=9)
    for counts in steps:
        found, expected = packed.step(counts)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        for row, count in enumerate(counts):
            packed.rollback(row, min(rejected, count))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from([None, 1, 5, 30]), st.integers(0, 3))
def test_random_steps_of_a_row_alone(steps: list[int], window: int | None, rejected: int) -> None:
    packed = Packed(1, window, max_query_tokens=9)
    for count in steps:
        found, expected = packed.step([count])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        packed.rollback(0, min(rejected, count))


@pytest.mark.parametrize("counts", [[1], [3]])
def test_a_row_alone_is_planned_as_beside_an_idle_one(counts: list[int]) -> None:
    kinds = [LayerKind(None, 64), LayerKind(30, 40)]
    alone, beside = plan_step([20], counts, kinds, CPU), plan_step([20, 7], [*counts, 0], kinds, CPU)
    assert torch.equal(alone.position_ids, beside.position_ids)
    for kind in kinds:
        (one,), (other,) = alone.kinds[kind].segments, beside.kinds[kind].segments
        masks = one.mask(2, torch.float32), other.mask(2, torch.float32)
        assert masks == (None, None) if counts == [1] else torch.equal(*masks)
        assert (one.token_start, one.token_stop, one.span) == (other.token_start, other.token_stop, other.span)


def test_the_comparison_notices_a_missing_window() -> None:
    packed = Packed(1, None)
    packed.window = 5
    found, expected = packed.step([9])
    assert not torch.allclose(found, expected, atol=1e-2)


@pytest.mark.parametrize("window", [None, 100])
def test_a_wide_chunk_beside_decoding_rows(window: int | None) -> None:
    packed = Packed(4, window)
    packed.step([150, 3, 0, 170])
    found, expected = packed.step([130, 1, 1, 2])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_nan_in_masked_slots_does_not_reach_a_new_owner() -> None:
    packed = Packed(2)
    packed.step([60, 50])
    for buffer in packed.cache.ragged_layers[0].buffers():
        buffer[0, :, :60] = torch.nan
    packed.cache.release(0)
    packed.cache.acquire()
    packed.history = [packed.history[1], (torch.zeros(KV_HEADS, 0, DIM), torch.zeros(KV_HEADS, 0, DIM))]
    found, expected = packed.step([1, 2])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_equal_rows_with_one_query_need_neither_mask_nor_padding() -> None:
    kind = LayerKind(None, 64)
    (segment,) = plan_step([7, 7, 7], [1, 1, 1], [kind], CPU).kinds[kind].segments
    assert (segment.gather, segment.scatter, segment.mask(2, torch.float32)) == (None, None, None)
    assert (segment.row_start, segment.row_stop, segment.span) == (0, 3, 8)


def test_rows_of_equal_width_are_not_padded() -> None:
    kind = LayerKind(None, 64)
    (segment,) = plan_step([7, 20], [3, 3], [kind], CPU).kinds[kind].segments
    assert segment.gather is None
    assert segment.mask(1, torch.float32) is not None


def test_a_mask_is_built_once_for_all_layers() -> None:
    kind = LayerKind(None, 64)
    (segment,) = plan_step([7, 20], [3, 1], [kind], CPU).kinds[kind].segments
    assert segment.mask(2, torch.float32) is segment.mask(2, torch.float32)
    mask = segment.mask(2, torch.float32)
    assert mask is not None
    assert mask.shape == (2, 1, 6, 21)


def test_a_window_needs_a_mask_only_once_it_cuts() -> None:
    kind = LayerKind(8, 15)
    (within,) = plan_step([7], [1], [kind], CPU).kinds[kind].segments
    (past,) = plan_step([8], [1], [kind], CPU).kinds[kind].segments
    assert within.hidden is None
    assert past.hidden is not None
    assert past.hidden[0, 0].tolist() == [True] + [False] * 8


def test_a_long_row_gets_a_segment_of_its_own() -> None:
    spans, widths = [100, 100, 100, 2000, 100, 100, 100, 100], [1] * 8
    assert split_rows(spans, widths, call_cost=256) == [(0, 3), (3, 4), (4, 8)]


def test_a_prompt_chunk_does_not_widen_its_neighbours() -> None:
    assert split_rows([300] * 8, [1, 1, 128, 1, 1, 1, 1, 1], call_cost=256) == [(0, 2), (2, 3), (3, 8)]


def test_rows_alike_stay_together() -> None:
    assert split_rows([250, 260, 240, 255], [6, 4, 6, 5], call_cost=256) == [(0, 4)]
    assert split_rows([100] * 100, [1] * 100, call_cost=256) == [(0, 100)]


def test_idle_rows_at_the_edges_are_left_out() -> None:
    assert split_rows([900, 10, 12, 900], [0, 1, 1, 0], call_cost=256) == [(1, 3)]


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 40)), min_size=1, max_size=40), st.integers(1, 500))
def test_every_row_with_a_query_is_in_one_segment(rows: list[tuple[int, int]], call_cost: int) -> None:
    if not any(width for _, width in rows):
        return
    runs = split_rows([span for span, _ in rows], [width for _, width in rows], call_cost=call_cost)
    covered = [row for start, stop in runs for row in range(start, stop)]
    assert covered == sorted(set(covered))
    assert {row for row, (_, width) in enumerate(rows) if width} <= set(covered)


def attend_with(**keywords: object) -> torch.Tensor:
    packed = Packed(1)
    plan = packed.cache.begin([1])
    states = torch.ones(1, KV_HEADS, 1, DIM)
    buffers = packed.cache.update(states, states, 0)
    query = torch.ones(1, HEADS, 1, DIM)
    mask = keywords.pop("attention_mask", None)
    found, _ = packed_attention(packed.module, query, *buffers, mask, specplug_step=plan, **keywords)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("keywords", "match"),
    [
        ({"s_aux": torch.zeros(HEADS)}, 'attention sinks .*"s_aux"'),
        ({"softcap": 30.0}, 'a soft cap on its logits .*"softcap"'),
        ({"position_bias": torch.zeros(1)}, 'a position bias .*"position_bias"'),
        ({"something_new": 1}, 'something specplug does not handle .*"something_new"'),
        ({"dropout": 0.1}, "training mode"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": dummy_mask(8, CPU)}, "mix full and sliding-window attention"),
    ],
)
def test_what_would_change_the_result_is_refused(keywords: dict[str, object], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        attend_with(**keywords)


def test_keywords_without_effect_are_taken() -> None:
    found = attend_with(
        position_ids=torch.zeros(1, 1), use_cache=True, softcap=None, output_attentions=False, sliding_window=None
    )
    torch.testing.assert_close(found, torch.ones(1, 1, HEADS, DIM))


def test_a_window_other_than_the_configured_one_is_refused() -> None:
    packed = Packed(1, 8)
    plan = packed.cache.begin([1])
    buffers = packed.cache.update(torch.ones(1, KV_HEADS, 1, DIM), torch.ones(1, KV_HEADS, 1, DIM), 0)
    with pytest.raises(ModelError, match="attends over 9 tokens where its config says 8"):
        packed_attention(
            packed.module, torch.ones(1, HEADS, 1, DIM), *buffers, None, sliding_window=9, specplug_step=plan
        )


def test_a_layer_that_bypasses_the_cache_is_refused() -> None:
    packed = Packed(1)
    plan = packed.cache.begin([1])
    states = torch.ones(1, KV_HEADS, 1, DIM)
    with pytest.raises(ModelError, match="without handing its keys and values to the cache"):
        packed_attention(packed.module, torch.ones(1, HEADS, 1, DIM), states, states, None, specplug_step=plan)


def test_a_layer_that_bypasses_the_attention_function_is_refused() -> None:
    packed = Packed(1)
    packed.cache.begin([1])
    states = torch.ones(1, KV_HEADS, 1, DIM)
    packed.cache.update(states, states, 0)
    with pytest.raises(ModelError, match="AttentionInterface"):
        packed.cache.update(states, states, 0)


def test_without_a_plan_it_is_plain_sdpa() -> None:
    query, key, value = torch.randn(2, HEADS, 5, DIM), torch.randn(2, HEADS, 5, DIM), torch.randn(2, HEADS, 5, DIM)
    module = torch.nn.Module()
    found, _ = packed_attention(module, query, key, value, None, scaling=0.5)
    expected = scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5)
    torch.testing.assert_close(found, expected.transpose(1, 2))
