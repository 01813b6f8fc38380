"""What a server's steps cost, told by a clock of the tests."""

from __future__ import annotations

import random

import pytest

from specplug.adapters.prices import MeasuredStepPrice
from specplug.adapters.step_times import FIRST_STEP_PRICE, FIRST_STEP_PRICE_ELSEWHERE, StepTimes

TOKEN_S = 0.00125


class Server:
    """Takes ``step_price + tokens`` times ``TOKEN_S`` a step; all draft tokens but one of each are accepted."""

    def __init__(self, step_price: float, num_requests: int = 8) -> None:
        self.now_s = 0.0
        self.step_price = step_price
        self.lengths = [100 * (number + 1) for number in range(num_requests)]
        self.step_times = StepTimes(clock=lambda: self.now_s)
        self.random = random.Random(0)

    def step(self, num_drafted: int | None = None, *, delay_s: float = 0.0) -> None:
        """Answer, let the server step, and be asked again, the requests in other rows."""
        drafts = [self.random.randrange(9) if num_drafted is None else num_drafted for _ in self.lengths]
        self.step_times.answered(self.lengths, sum(drafts))
        self.now_s += TOKEN_S * (self.step_price + len(self.lengths) + sum(drafts)) + delay_s
        new = [max(size, 1) for size in drafts]
        self.lengths = [length + size for length, size in zip(self.lengths, new, strict=True)]
        rows = self.random.sample(range(len(new)), len(new))
        self.lengths, new = [self.lengths[row] for row in rows], [new[row] for row in rows]
        self.step_times.asked(self.lengths, new)
        self.now_s += 0.5  # the door's own time


@pytest.mark.parametrize("step_price", [4.0, 20.0, 150.0])
def test_the_price_is_found(step_price: float) -> None:
    server = Server(step_price)
    assert server.step_times.step_price == FIRST_STEP_PRICE
    for _ in range(200):
        server.step()
    assert server.step_times.step_price == pytest.approx(step_price, rel=0.05)


def test_steps_of_one_size_leave_the_guess() -> None:
    server = Server(100.0)
    for _ in range(200):
        server.step(0)
    assert server.step_times.step_price == pytest.approx(FIRST_STEP_PRICE)


def test_it_follows_a_server_that_changes() -> None:
    server = Server(20.0)
    for _ in range(100):
        server.step()
    server.step_price = 60.0
    for _ in range(300):
        server.step()
    assert server.step_times.step_price == pytest.approx(60.0, rel=0.05)


def test_delays_do_not_matter() -> None:
    server = Server(20.0)
    for number in range(200):
        server.step(delay_s=5.0 if number % 10 == 0 else 0.0)
        assert server.step_times.step_price == pytest.approx(20.0, rel=0.4)


@pytest.mark.parametrize(
    ("lengths", "num_new"),
    [
        ([101, 202, 40], [1, 2, 1]),  # another came in the place of one
        ([101, 202, 350], [1, 2, 0]),  # one is inside its prompt
        ([101, 202], [1, 2]),  # one left, and its draft tokens with it
        ([101, 202, 303, 64], [1, 2, 3, 1]),  # one came
        ([101, 203, 303], [1, 2, 3]),  # there were steps that the door was not asked in
        ([], []),
    ],
)
def test_other_steps_tell_nothing(lengths: list[int], num_new: list[int]) -> None:
    now_s = [0.0]
    step_times = StepTimes(clock=lambda: now_s[0])
    for num_drafted in (0, 30) * 20:
        step_times.answered([100, 200, 300], num_drafted)
        now_s[0] += 60.0
        step_times.asked(lengths, num_new)
    assert step_times.step_price == FIRST_STEP_PRICE
    for num_drafted in (0, 30) * 20:
        step_times.answered([100, 200, 300], num_drafted)
        now_s[0] += 60.0
        step_times.asked([303, 101, 202], [3, 1, 2])
    assert step_times.step_price > 2 * FIRST_STEP_PRICE, "this one is told: the same requests, all decoding"


def test_an_accelerator_is_guessed_to_carry_more_tokens() -> None:
    assert StepTimes("cuda:1").step_price == FIRST_STEP_PRICE_ELSEWHERE > StepTimes("cpu").step_price


def test_the_price_has_bounds() -> None:
    free, dear = MeasuredStepPrice(20.0), MeasuredStepPrice(20.0)
    for number in range(200):
        size = 8 + number % 32
        free.note(size, 1.0)
        dear.note(size, float(size - 7))
    assert 20.0 < free.value <= MeasuredStepPrice.MOST
    assert dear.value == pytest.approx(MeasuredStepPrice.LEAST)
