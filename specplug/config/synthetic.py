"""Keys of the synthetic verifier, which accepts at a given rate whatever the target says."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specplug.config.keys import show

__all__ = ["length_fault", "rates_fault", "rates_of_length"]

_RATES = "speculative_config.synthetic_acceptance_rates"
_LENGTH = "speculative_config.synthetic_acceptance_length"


def rates_fault(rates: Sequence[float], num_speculative_tokens: int) -> str | None:
    """Why ``rates`` cannot be, or None."""
    num = num_speculative_tokens
    if len(rates) != num or any(not 0.0 <= rate <= 1.0 for rate in rates):
        outside = next((f"[{at}]={show(rate)}" for at, rate in enumerate(rates) if not 0.0 <= rate <= 1.0), "")
        wrong = f"{_RATES}{outside} is outside 0 to 1" if outside else f"{_RATES} has {len(rates)} entries"
        return f"{wrong}, num_speculative_tokens is {num}; give {num} values in [0,1]."
    for at in range(1, num):
        if rates[at] > rates[at - 1]:
            return (
                f"{_RATES}[{at}]={show(rates[at])} exceeds [{at - 1}]={show(rates[at - 1])}. Entry i is the chance "
                "that tokens 0…i are *all* accepted, so the list must be non-increasing. Conditional rates a,b,c "
                "become a, a·b, a·b·c."
            )
    return None


def length_fault(length: float, num_speculative_tokens: int) -> str | None:
    """Why ``length`` cannot be, or None."""
    if 1.0 <= length <= num_speculative_tokens + 1:
        return None
    return (
        f"{_LENGTH}={show(length)} cannot be reached: a step emits 1 to K+1 = {num_speculative_tokens + 1} tokens; "
        f"give a length from 1 to {num_speculative_tokens + 1}."
    )


def rates_of_length(length: float, num_speculative_tokens: int) -> tuple[float, ...]:
    """The rates of least variance with that mean acceptance length: ones, one fraction, zeros."""
    whole = math.floor(length - 1.0)
    fraction = [length - 1.0 - whole] if whole < num_speculative_tokens else []
    zeros = num_speculative_tokens - whole - len(fraction)
    return (*([1.0] * whole), *fraction, *([0.0] * zeros))
