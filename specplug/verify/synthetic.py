"""Acceptance rates of the ``synthetic`` rule, a test mode that fakes acceptance."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["conditional_rates", "rates_from_length"]


def conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """``rates[i]``: how often slot i is accepted. Returned: how often, given that slots before it were.

    ``[.8, .6, .3]`` -> ``[.8, .75, .5]``. After a rate of 0 everything is 0.
    """
    before = 1.0
    conditional = []
    for rate in rates:
        conditional.append(rate / before if before > 0.0 else 0.0)
        before = rate
    return tuple(conditional)


def rates_from_length(length: float, num_speculative_tokens: int) -> tuple[float, ...]:
    """Unconditional rates of least variance whose mean emitted length (bonus included) is ``length``.

    ``length`` lies in ``[1, num_speculative_tokens + 1]``. Whole tokens are certain, one is fractional.
    """
    num_certain = math.floor(length - 1.0)
    fraction = length - 1.0 - num_certain
    rates = [1.0] * num_certain + [fraction] + [0.0] * num_speculative_tokens
    return tuple(rates[:num_speculative_tokens])
