"""When a draft pays: how long it may be in a batch of a given size, after how the drafts before it did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from operator import eq

from specplug.types import Batch

__all__ = ["BackOff", "Load", "PricedLoad", "expected_accepted", "load_of"]

_EVEN_ROWS = {"cpu": 6}
"""Requests in a step in which a draft token has to be as likely as not (SmolLM2 in bfloat16, 2 cores: one more token
costs a thirtieth of a step)."""
_EVEN_ROWS_ELSEWHERE = 70
"""The same on an accelerator, where hundreds of tokens ride along with one; estimated, not measured."""
_MOST_NEEDED = 0.8
"""However large the batch, text that is sure to be a copy is drafted."""
_STEP_PRICE = 4.0
"""What it costs a step that any request drafts at all, in tokens: rows of unequal length, a verification."""
_GROWTH = 1.001
"""A chance that grows by less has been found."""


def expected_accepted(rate: float, num_tokens: int) -> float:
    """Tokens accepted of a draft, each with chance ``rate`` (below 1) if those before it were."""
    return rate * (1.0 - rate**num_tokens) / (1.0 - rate)


class Load:
    """What draft tokens have to promise in a step of ``num_rows`` requests on ``device``.

    A token that is accepted spares its request a step, but a batch is spared one only when all its requests are; and a
    token that is verified takes longer for all of them. So the chance that a token needs, of being accepted with
    everything before it, grows with the square of the batch: ``num_rows² / (num_rows² + even²)``, with ``even`` = 6 on
    a CPU and 70 elsewhere, and at most 0.8. That is 0.03 for one request and 0.64 for eight on a CPU.
    """

    __slots__ = ("least_chance",)

    def __init__(self, num_rows: int, device: str = "cpu") -> None:
        even = _EVEN_ROWS.get(device.partition(":")[0], _EVEN_ROWS_ELSEWHERE)
        self.least_chance = min(num_rows**2 / (num_rows**2 + even**2), _MOST_NEEDED)

    def lengths(self, rates: Sequence[float], num_drafted: Sequence[int]) -> list[int]:
        """How many tokens of each draft of a step to keep; none of any where all together do not pay.

        ``rates``: the chance of each draft's tokens, as for :meth:`length`; ``num_drafted``: how many there are.
        """
        kept = _likely_lengths(rates, num_drafted, self.least_chance)
        return kept if self.pays(sum(map(self.gain, rates, kept))) else [0] * len(kept)

    def length(self, rate: float) -> int:
        """How many tokens are likely enough, each accepted with chance ``rate`` (below 1) if those before it were."""
        return _likely_length(rate, self.least_chance)

    def gain(self, rate: float, num_tokens: int) -> float:
        """What a draft is expected to bring, less its cost, in tokens."""
        return expected_accepted(rate, num_tokens) / self.least_chance - num_tokens

    def pays(self, gain: float) -> bool:
        """Whether the gain of all drafts of a step is worth drafting in it."""
        return gain >= _STEP_PRICE


class PricedLoad(Load):
    """The same where it is known what a step costs: the drafts that give the most tokens a second.

    A step takes the time of ``step_price`` tokens, and that of every token in it. A draft token pays if it is
    accepted with a chance above the tokens that the step gives for the time of one. The best drafts are found by
    Dinkelbach's method (Management Science 13, 1967): begin with the ratio of a step without drafts, take all that
    pays at it, and repeat with the ratio that follows until it grows no more.
    """

    __slots__ = ("_num_rows", "_step_price")

    def __init__(self, num_rows: int, step_price: float) -> None:
        self._num_rows, self._step_price = num_rows, step_price
        self.least_chance = num_rows / (step_price + num_rows)

    def lengths(self, rates: Sequence[float], num_drafted: Sequence[int]) -> list[int]:
        """How many tokens of each draft of a step to keep, as in :class:`Load`."""
        least_chance = self.least_chance
        while True:
            kept = _likely_lengths(rates, num_drafted, least_chance)
            num_tokens = self._num_rows + sum(map(expected_accepted, rates, kept))
            found = num_tokens / (self._step_price + self._num_rows + sum(kept))
            if found <= least_chance * _GROWTH:
                return kept
            least_chance = found


def load_of(batch: Batch, device: str) -> Load:
    """What draft tokens have to promise in the step of ``batch``."""
    if batch.step_price is None:
        return Load(len(batch), device)
    return PricedLoad(len(batch), batch.step_price)


def _likely_lengths(rates: Sequence[float], num_drafted: Sequence[int], least_chance: float) -> list[int]:
    return [min(most, _likely_length(rate, least_chance)) for rate, most in zip(rates, num_drafted, strict=True)]


def _likely_length(rate: float, least_chance: float) -> int:
    return int(math.log(least_chance) / math.log(rate))


class BackOff:
    """How the drafts of one request did. It looks at the text only, so equal texts give equal decisions.

    :meth:`rate` estimates the chance that a draft token is accepted if those before it were, for drafts from a match of
    a given length: 0.7 at first, then from the last ten or so drafts that were noted. Drafts are noted whether they are
    verified or not, and compared with the text as it comes. So a request whose drafts missed gets none, which costs
    no forward, and drafts again as soon as they would have hit.

    Each step::

        back_off.review(token_ids)
        back_off.note(draft, len(token_ids), match_length)
        (length,) = load.lengths([back_off.rate(match_length)], [len(draft)])
    """

    __slots__ = ("_draft", "_match_length", "_num_hits", "_num_misses", "_start")

    FIRST_RATE = 0.7
    LONGEST = 8
    """Matches of this length and longer ones share an account."""
    MEMORY = 0.9
    """What is left of earlier drafts' weight at each draft."""

    def __init__(self) -> None:
        self._num_hits = [0.0] * (self.LONGEST + 1)
        self._num_misses = [0.0] * (self.LONGEST + 1)
        self._draft: Sequence[int] = ()
        self._match_length = 0
        self._start = 0

    def rate(self, match_length: int = 0) -> float:
        """Above 0 and below 1. The first rate weighs as much as one token."""
        account = min(match_length, self.LONGEST)
        num_hits = self._num_hits[account]
        return (num_hits + self.FIRST_RATE) / (num_hits + self._num_misses[account] + 1.0)

    def note(self, draft: Sequence[int], num_tokens: int, match_length: int = 0) -> None:
        """The whole draft that continues a text of ``num_tokens`` tokens, as it was before it is shortened."""
        self._draft, self._start, self._match_length = draft, num_tokens, match_length

    def review(self, token_ids: Sequence[int]) -> None:
        """Compare the last draft with the text that has come since. ``token_ids``: prompt and output so far."""
        if not self._draft:
            return
        came = token_ids[self._start : self._start + len(self._draft)]
        if not came:
            return
        num_hits = sum(1 for _ in takewhile(bool, map(eq, came, self._draft)))
        account = min(self._match_length, self.LONGEST)
        self._num_hits[account] = self._num_hits[account] * self.MEMORY + num_hits
        self._num_misses[account] = self._num_misses[account] * self.MEMORY + (num_hits < len(came))
        self._draft = ()
