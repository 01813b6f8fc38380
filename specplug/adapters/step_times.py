"""What a server's steps cost, told from the time between an answer of the door and the next question."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from specplug.adapters.prices import MeasuredStepPrice

__all__ = ["FIRST_STEP_PRICE", "FIRST_STEP_PRICE_ELSEWHERE", "StepTimes"]

FIRST_STEP_PRICE = 20.0
"""What a step takes besides its tokens, in tokens, until it is measured (SmolLM2 in vLLM on two cores: 26 ms, and 1.25
a token)."""
FIRST_STEP_PRICE_ELSEWHERE = 200.0
"""The same on an accelerator; estimated, not measured."""


class StepTimes:
    """Times the steps in which the same requests decoded, and no others: a prompt, or a server that waits for
    requests, tells nothing of what a draft token costs.

    Around every answer::

        step_times.asked(num_tokens, num_new)
        step_times.answered(num_tokens, num_draft_tokens)
    """

    def __init__(self, device: str = "cpu", *, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock``: seconds."""
        is_cpu = device.partition(":")[0] == "cpu"
        self._price = MeasuredStepPrice(FIRST_STEP_PRICE if is_cpu else FIRST_STEP_PRICE_ELSEWHERE)
        self._clock = clock
        self._num_tokens: list[int] = []
        self._num_draft_tokens = 0
        self._answered_s = 0.0

    @property
    def step_price(self) -> float:
        """What a step takes besides its tokens, in tokens."""
        return self._price.value

    def asked(self, num_tokens: Sequence[int], num_new: Sequence[int]) -> None:
        """The server took a step; ``num_tokens`` of each request now, ``num_new`` of them from this step."""
        now_s = self._clock()
        before = sorted(length - new for length, new in zip(num_tokens, num_new, strict=True))
        if before and before == self._num_tokens and all(num_new):
            self._price.note(len(before) + self._num_draft_tokens, now_s - self._answered_s)

    def answered(self, num_tokens: Sequence[int], num_draft_tokens: int) -> None:
        """The server has the drafts for requests of these lengths, and takes its next step."""
        self._num_tokens = sorted(num_tokens)  # requests change rows
        self._num_draft_tokens = num_draft_tokens
        self._answered_s = self._clock()
