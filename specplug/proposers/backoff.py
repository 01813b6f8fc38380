"""When a proposer's drafts keep missing, it stands down; when they would have hit, it comes back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from operator import eq

__all__ = ["BackOff"]


class BackOff:
    """The drafting account of one request: it looks at the text only, so equal texts give equal decisions.

    Schedule. An accepted token is worth ``tokens_per_hit`` (10) drafted ones: about what a drafted token costs
    when eight requests are verified together on a CPU. Each draft adds ``10 * accepted - drafted`` to the
    balance, which starts at 0 and is kept between the cost of ``patience`` (2) full drafts below 0 and twice
    that above. At the lower bound the proposer stands down: two full drafts that miss entirely at the start,
    up to six after a good stretch.

    While it stands down its drafts are trials: they are not verified, so they cost no forward, but compared
    with the text as it comes. A trial that would have paid for itself (one token in ten hit) is booked like a
    draft, which ends the stand-down at once; a trial that missed is followed by the next. The better the trial,
    the more misses it takes to stand down again: after the weakest, a single draft.

    A proposer for which drafting itself is dear reads :attr:`standing_down` and tries only now and then.

    Each step: :meth:`review` the text, then :meth:`offer` the draft::

        back_off.review(token_ids)
        draft = back_off.offer(draft, len(token_ids))
    """

    __slots__ = ("_balance", "_draft", "_floor", "_start", "_tokens_per_hit")

    def __init__(self, max_draft_tokens: int, *, patience: int = 2, tokens_per_hit: int = 10) -> None:
        """``max_draft_tokens``: the longest draft, K (1 or more)."""
        self._floor = -patience * max_draft_tokens
        self._tokens_per_hit = tokens_per_hit
        self._balance = 0
        self._draft: list[int] = []
        self._start = 0

    @property
    def standing_down(self) -> bool:
        """True while drafts are trials, not to be verified."""
        return self._balance <= self._floor

    def review(self, token_ids: Sequence[int]) -> None:
        """Settle the last draft against the text that has come since, if enough of it has.

        ``token_ids``: prompt and output so far.
        """
        came = token_ids[self._start : self._start + len(self._draft)]
        if not came:
            return
        num_accepted = sum(1 for _ in takewhile(bool, map(eq, came, self._draft)))
        gain = self._tokens_per_hit * num_accepted - len(self._draft)
        still_matching = num_accepted == len(came) < len(self._draft)
        if self.standing_down and still_matching and gain <= 0:
            return  # a trial comes in token by token
        self.book(len(self._draft), num_accepted)
        self._draft = []

    def book(self, num_drafted: int, num_accepted: int) -> None:
        """Settle a verified draft that the caller has compared itself, in place of ``offer`` and ``review``."""
        gain = self._tokens_per_hit * num_accepted - num_drafted
        self._balance = max(self._floor, min(self._balance + gain, -2 * self._floor))

    def offer(self, draft: list[int], num_tokens: int) -> list[int]:
        """The draft, or ``[]`` while standing down. ``num_tokens``: length of the text that it continues."""
        if self.standing_down:
            if not self._draft:
                self._draft, self._start = draft, num_tokens
            return []
        self._draft, self._start = draft, num_tokens
        return draft
