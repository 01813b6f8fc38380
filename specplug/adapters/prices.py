"""What verifying a draft costs: given, or measured while a server runs."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

__all__ = ["MeasuredPrices", "MeasuredStepPrice", "Prices"]


@dataclass(slots=True)
class Prices:
    """A draft of n tokens costs ``draft + n * token`` steps of plain decoding; ``token`` is above 0 and below 1."""

    draft: float
    token: float

    def note(self, num_draft_tokens: int, seconds: float) -> None:
        """A step with that many draft tokens took that long. Given prices stay as they are."""


class MeasuredPrices(Prices):
    """The line through the times of the steps so far, newer ones weighing more.

    It begins as a guess, which gives way to the first drafts and comes back as time goes by without any: one that
    was delayed by something else is forgotten. A plain step is the median of the last fifteen.
    """

    NUM_PLAIN = 15
    MEMORY, MEMORY_PLAIN = 0.97, 0.99
    """What is left of earlier drafts' weight at each draft, and at each step without one."""
    GUESS = 0.05
    """Weight of each of the two points of the guess; a draft's is 1."""
    LEAST, MOST = 0.01, 0.9
    """Bounds of ``token``."""

    def __init__(self, draft: float, token: float) -> None:
        super().__init__(draft, token)
        self._plain: deque[float] = deque(maxlen=self.NUM_PLAIN)
        self._guess = _Sums()
        for num_tokens in (1, 16):
            self._guess.add(num_tokens, draft + token * num_tokens, self.GUESS)
        self._seen = _Sums()

    def note(self, num_draft_tokens: int, seconds: float) -> None:
        """A draft token never costs more than a step of its own: what does was waiting for something else."""
        if not num_draft_tokens:
            self._plain.append(seconds)
            self._seen.fade(self.MEMORY_PLAIN)
        elif len(self._plain) > 2:
            cost = seconds / statistics.median(self._plain) - 1.0
            self._seen.fade(self.MEMORY)
            self._seen.add(num_draft_tokens, min(max(cost, 0.0), float(num_draft_tokens)))
        intercept, slope = (self._guess + self._seen).line()
        self.draft, self.token = max(intercept, 0.0), min(max(slope, self.LEAST), self.MOST)


class MeasuredStepPrice:
    """What a step takes besides the time of its tokens, in tokens: from the times of the last steps.

    It is told by Tukey's resistant line, through the medians of the third with the fewest tokens and of that with the
    most (Exploratory Data Analysis, 1977, chapter 10): steps that waited for something else do not move it. It stays
    what it is while steps are all alike.
    """

    NUM_STEPS = 128
    LEAST_STEPS = 24
    LEAST_SPREAD = 4.0
    """Tokens between the two thirds, below which they tell nothing."""
    LEAST, MOST = 1.0, 4096.0

    def __init__(self, guess: float) -> None:
        self.value = guess
        """In tokens."""
        self._steps: deque[tuple[int, float]] = deque(maxlen=self.NUM_STEPS)

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of all requests' tokens, draft tokens included, took that long."""
        self._steps.append((num_tokens, seconds))
        if len(self._steps) < self.LEAST_STEPS:
            return
        steps, third = sorted(self._steps, key=itemgetter(0)), len(self._steps) // 3
        (few, few_s), (many, many_s) = _middle(steps[:third]), _middle(steps[-third:])
        if many - few >= self.LEAST_SPREAD:
            token_s = max((many_s - few_s) / (many - few), few_s / (self.MOST + few))
            self.value = max((few_s + many_s) / (2.0 * token_s) - (few + many) / 2.0, self.LEAST)


def _middle(steps: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Median tokens and median seconds."""
    return statistics.median(size for size, _ in steps), statistics.median(seconds for _, seconds in steps)


@dataclass(slots=True)
class _Sums:
    """Of weighted points (x, y), for the line of least squares."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, weight: float = 1.0) -> None:
        self.weight += weight
        self.x += weight * x
        self.y += weight * y
        self.xx += weight * x * x
        self.xy += weight * x * y

    def fade(self, factor: float) -> None:
        self.weight *= factor
        self.x *= factor
        self.y *= factor
        self.xx *= factor
        self.xy *= factor

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(
            self.weight + other.weight, self.x + other.x, self.y + other.y, self.xx + other.xx, self.xy + other.xy
        )

    def line(self) -> tuple[float, float]:
        """Value at 0, and slope. Needs points at two places."""
        slope = (self.weight * self.xy - self.x * self.y) / (self.weight * self.xx - self.x**2)
        return (self.y - slope * self.x) / self.weight, slope
