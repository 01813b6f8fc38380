"""What a draft costs, told from the time of steps."""

from __future__ import annotations

import pytest

from specplug.adapters.prices import MeasuredPrices, Prices

STEP_S = 0.01


def run(prices: Prices, num_steps: int, *, draft: float, token: float, num_draft_tokens: int = 8) -> None:
    """Every third step brings a draft, of 1 to ``num_draft_tokens`` tokens."""
    for number in range(num_steps):
        size = 0 if number % 3 else number % num_draft_tokens + 1
        prices.note(size, STEP_S * (1.0 + (draft + token * size if size else 0.0)))


def test_the_guess_holds_while_nothing_is_known() -> None:
    prices = MeasuredPrices(0.5, 0.1)
    prices.note(4, 3.0)  # there was no plain step to compare with
    assert (prices.draft, prices.token) == pytest.approx((0.5, 0.1))


@pytest.mark.parametrize(("draft", "token"), [(0.35, 0.4), (0.5, 0.1), (0.0, 0.02)])
def test_prices_are_found(draft: float, token: float) -> None:
    prices = MeasuredPrices(0.5, 0.1)
    run(prices, 150, draft=draft, token=token)
    assert prices.draft == pytest.approx(draft, abs=0.15)
    assert prices.token == pytest.approx(token, abs=0.03)


def test_they_follow_a_machine_that_changes() -> None:
    prices = MeasuredPrices(0.5, 0.1)
    run(prices, 150, draft=0.5, token=0.1)
    run(prices, 300, draft=0.35, token=0.4)
    assert prices.token == pytest.approx(0.4, abs=0.03)


def test_a_delay_is_forgotten() -> None:
    prices = MeasuredPrices(0.5, 0.1)
    for _ in range(5):
        prices.note(0, STEP_S)
    prices.note(8, 60.0)  # whoever reads the tokens went for a walk
    assert prices.token <= MeasuredPrices.MOST
    assert prices.draft + 8 * prices.token <= 8.0
    for _ in range(2000):
        prices.note(0, STEP_S)
    assert (prices.draft, prices.token) == pytest.approx((0.5, 0.1), abs=0.01)


def test_given_prices_stay() -> None:
    prices = Prices(0.5, 0.1)
    run(prices, 30, draft=0.0, token=0.9)
    assert (prices.draft, prices.token) == (0.5, 0.1)
