from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specplug.proposers.backoff import BackOff, Load, PricedLoad, expected_accepted, load_of
from specplug.types import Batch

HIT, MISS = 1, 2


def after(*drafts: tuple[int, int]) -> BackOff:
    """A back_off after drafts of so many tokens, of which so many were accepted."""
    back_off, text = BackOff(), [0]
    for num_tokens, num_accepted in drafts:
        back_off.note([HIT] * num_tokens, len(text), 2)
        text += [HIT] * num_accepted + [MISS if num_accepted < num_tokens else HIT]
        back_off.review(text)
    return back_off


def test_the_needed_chance_grows_with_the_square_of_the_batch() -> None:
    assert Load(1).least_chance == pytest.approx(1 / 37)
    assert Load(6).least_chance == 0.5
    assert Load(70).least_chance == 0.8
    assert Load(70, "cuda:1").least_chance == 0.5


def test_a_draft_goes_as_far_as_it_is_likely_to_be_accepted() -> None:
    load = Load(6)
    assert [load.length(rate) for rate in (0.95, 0.8, 0.6, 0.49, 0.1)] == [13, 3, 1, 0, 0]
    for rate in (0.95, 0.8, 0.6):
        length = load.length(rate)
        assert rate**length >= load.least_chance > rate ** (length + 1)


@given(rate=st.floats(0.01, 0.99), num_rows=st.integers(1, 200), num_tokens=st.integers(0, 30))
def test_the_gain_is_the_sum_over_tokens_and_largest_at_the_length(rate: float, num_rows: int, num_tokens: int) -> None:
    load = Load(num_rows)
    expected = sum(rate**index / load.least_chance - 1 for index in range(1, num_tokens + 1))
    assert load.gain(rate, num_tokens) == pytest.approx(expected, abs=1e-6)
    assert load.gain(rate, load.length(rate)) >= load.gain(rate, num_tokens) - 1e-6


def test_a_step_is_only_drafted_in_for_more_than_it_costs() -> None:
    load = Load(4)
    assert not load.pays(0.0)
    assert not load.pays(load.gain(0.5, 1))
    assert load.pays(4 * load.gain(0.8, 4))


def test_all_drafts_of_a_step_are_cut_or_none_is_kept() -> None:
    assert Load(4).lengths([0.9, 0.5, 0.9, 0.9], [20, 4, 3, 0]) == [11, 1, 3, 0]
    assert Load(4).lengths([0.5] * 4, [1, 1, 0, 0]) == [0] * 4, "together they bring less than a step costs"
    assert Load(4).lengths([], []) == []


def tokens_a_cost(step_price: float, rates: list[float], lengths: list[int]) -> float:
    """Tokens that a step is expected to give, for each token's time that it takes."""
    num_rows = len(rates)
    num_expected = num_rows + sum(map(expected_accepted, rates, lengths))
    return num_expected / (step_price + num_rows + sum(lengths))


@given(
    drafts=st.lists(st.tuples(st.floats(0.01, 0.99), st.integers(0, 5)), min_size=1, max_size=4),
    step_price=st.floats(0.5, 500.0),
)
def test_with_a_price_the_drafts_give_the_most_tokens_a_second(
    drafts: list[tuple[float, int]], step_price: float
) -> None:
    rates, num_drafted = [rate for rate, _ in drafts], [most for _, most in drafts]
    kept = PricedLoad(len(rates), step_price).lengths(rates, num_drafted)
    assert all(length <= most for length, most in zip(kept, num_drafted, strict=True))
    best = max(
        tokens_a_cost(step_price, rates, list(lengths))
        for lengths in itertools.product(*(range(most + 1) for most in num_drafted))
    )
    assert tokens_a_cost(step_price, rates, kept) >= best * 0.998


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_a_dearer_token_is_drafted_less(num_rows: int) -> None:
    totals = [
        sum(PricedLoad(num_rows, step_price).lengths([0.8] * num_rows, [16] * num_rows)) for step_price in (400, 20, 1)
    ]
    assert totals[0] > totals[1] > totals[2]


def test_what_a_token_needs_does_not_depend_on_the_load_s_past() -> None:
    load = PricedLoad(8, 20.0)
    poor = load.lengths([0.4] * 8, [8] * 8)
    load.lengths([0.99] * 8, [32] * 8)
    assert load.lengths([0.4] * 8, [8] * 8) == poor != [0] * 8


def test_the_price_comes_with_the_batch() -> None:
    def batch(step_price: float | None) -> Batch:
        return Batch((), (), (), (), (), step_price=step_price)

    assert type(load_of(batch(None), "cpu")) is Load
    assert isinstance(load_of(batch(20.0), "cpu"), PricedLoad)
    assert batch(20.0).select([]).step_price == 20.0


def test_the_rate_follows_the_drafts() -> None:
    assert BackOff().rate(2) == BackOff.FIRST_RATE
    assert after((4, 0)).rate(2) == 0.35
    assert after((4, 0), (4, 0)).rate(2) < 0.3
    assert after((4, 4)).rate(2) > 0.9
    assert after((4, 1)).rate(2) == pytest.approx(1.7 / 3)
    assert after((4, 0), *[(4, 4)] * 3).rate(2) > 0.9, "old misses fade"


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)).filter(lambda draft: draft[1] <= draft[0]), max_size=60)
)
def test_the_rate_is_a_chance(drafts: list[tuple[int, int]]) -> None:
    assert 0 < after(*drafts).rate(2) < 1


def test_a_draft_that_was_not_verified_is_compared_with_what_came() -> None:
    back_off = BackOff()
    back_off.note([HIT] * 4, 1, 2)
    back_off.review([0, HIT])
    assert back_off.rate(2) > BackOff.FIRST_RATE, "one token came, and it is the draft's"


def test_a_draft_counts_once_and_not_before_anything_came() -> None:
    back_off = BackOff()
    back_off.note([HIT] * 4, 1, 2)
    back_off.review([0])
    assert back_off.rate(2) == BackOff.FIRST_RATE
    back_off.review([0, MISS])
    rate = back_off.rate(2)
    back_off.review([0, MISS, MISS])
    assert back_off.rate(2) == rate < BackOff.FIRST_RATE


def test_matches_of_different_length_have_rates_of_their_own() -> None:
    back_off = after((4, 0), (4, 0))
    assert back_off.rate(2) < 0.3
    assert back_off.rate(3) == BackOff.FIRST_RATE
    back_off.note([HIT] * 4, 1, 20)
    back_off.review([0, HIT, HIT])
    assert back_off.rate(8) == back_off.rate(100) > BackOff.FIRST_RATE
