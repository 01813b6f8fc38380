"""How well drafts did so far, by where they came from and how long the match was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from specplug.proposers.backoff import expected_accepted

__all__ = ["FIRST_RATES", "AcceptanceRow", "AcceptanceTable", "Counts", "Origin"]

Origin: TypeAlias = Literal["local", "shared"]

FIRST_RATES = (0.35, 0.6, 0.8, 0.9, 0.95, 0.95, 0.95, 0.95)
"""The chance that the token after a match of 1, 2-3, 4-7, 8-15, ... tokens is right, until drafts have shown it: about
what it is in SmolLM2's edits, extractions and HumanEval answers, which hardly differ in it."""
NUM_BUCKETS = len(FIRST_RATES)


@dataclass(slots=True)
class Counts:
    """Drafts of one origin and range of match lengths; of a draft that was tried in part only, that part.

    ``num_misses``: drafts of which a token was rejected.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_misses: int = 0
    first_rate: float = 0.5

    @property
    def rate(self) -> float:
        """The chance that a draft token is accepted if those before it were: accepted over tried tokens, ``first_rate``
        at first, which weighs as much as two tokens.

        It is taken to be the same for all tokens of a draft.
        """
        return (self.num_accepted_tokens + 2.0 * self.first_rate) / (self.num_accepted_tokens + self.num_misses + 2.0)

    def expected(self, num_drafted: int) -> float:
        """Accepted tokens to be expected of a draft."""
        return expected_accepted(self.rate, num_drafted)


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """Drafts of ``origin`` whose match had ``shortest_match`` to ``longest_match`` tokens (None: or more)."""

    origin: Origin
    shortest_match: int
    longest_match: int | None
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_misses: int


class AcceptanceTable:
    """Counts by origin and match length: 1, 2-3, 4-7, 8-15, ... tokens."""

    __slots__ = ("_local", "_shared")

    def __init__(self) -> None:
        self._local = [Counts(first_rate=rate) for rate in FIRST_RATES]
        self._shared = [Counts(first_rate=rate) for rate in FIRST_RATES]

    def counts(self, origin: Origin, match: int) -> Counts:
        """Where drafts of such a match (1 or more tokens) are booked."""
        buckets = self._local if origin == "local" else self._shared
        bits = match.bit_length()
        return buckets[bits - 1 if bits < NUM_BUCKETS else -1]

    def rows(self) -> list[AcceptanceRow]:
        """All counts, local first, by match length; without those of no draft."""
        tables: tuple[tuple[Origin, list[Counts]], ...] = (("local", self._local), ("shared", self._shared))
        return [
            AcceptanceRow(
                origin,
                1 << bucket,
                None if bucket == NUM_BUCKETS - 1 else (2 << bucket) - 1,
                counts.num_drafts,
                counts.num_draft_tokens,
                counts.num_accepted_tokens,
                counts.num_misses,
            )
            for origin, table in tables
            for bucket, counts in enumerate(table)
            if counts.num_drafts
        ]
