"""Acceptance rates of the ``synthetic`` rule, a test mode that fakes acceptance."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["conditional_rates"]


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
