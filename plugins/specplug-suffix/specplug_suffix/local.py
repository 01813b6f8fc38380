"""The index of one request's own text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import takewhile
from operator import eq

from specplug.proposers.index import ROOT, CountingAutomaton, SuffixAutomaton

__all__ = ["LocalIndex", "num_equal", "token_array"]

REACH = 32
"""How far ahead of where a copy broke off it may go on; matches longer than this count as equally long for it."""
PATIENCE = 8
"""Tokens that may come in between."""
WEAK_MATCH = 4
"""A longer match elsewhere ends the wait."""
CARRIED = 4
"""A copy that goes on counts one in so many tokens of its match before the break on top of the match after it."""


def token_array(token_ids: Sequence[int]) -> array[int]:
    """The ids as an array.

    Raises ``ValueError``, ``OverflowError`` or ``TypeError`` for ids that are not whole numbers from 0 to 2**31 - 1.
    """
    ids = array("i", token_ids)
    if ids and min(ids) < 0:
        raise ValueError(f"token id {min(ids)} is negative; ids run from 0 to 2**31 - 1")
    return ids


def num_equal(left: array[int], right: array[int]) -> int:
    """Leading tokens that are the same in both."""
    num_compared = min(len(left), len(right)) - 1  # as a rule: verified tokens end with the first one that is another
    if num_compared > 0 and left[:num_compared] != right[:num_compared]:
        return sum(1 for _ in takewhile(bool, map(eq, left, right)))
    return num_compared + (left[num_compared] == right[num_compared]) if num_compared >= 0 else 0


class LocalIndex:
    """One growing text, and where its ending occurred before: longest ending, of several places the one where the
    output's copy goes on, else the newest.

    Output often copies a stretch of the text with changes in between. Where the copied text ends and the output
    brings something else, the place is kept: if the next tokens are found again within ``REACH`` tokens after it, the
    copy goes on there. This follows from the text alone, however it comes in pieces.
    """

    __slots__ = ("_broken_at", "_carried", "_num_waited", "_source", "automaton", "last", "token_ids")

    def __init__(self, *, counts: bool = False) -> None:
        self.automaton = CountingAutomaton() if counts else SuffixAutomaton()
        self.token_ids = array("i")
        self.last = ROOT
        self._source = 0
        """Position of the token that comes next if the copy goes on; 0: nothing is copied, or the copy broke off."""
        self._carried = 0
        """Tokens that the copy counts for from before a break; 0: there was none, or it is given up."""
        self._broken_at = 0
        """Position of the token that would have come next at the last break."""
        self._num_waited = 0
        """Tokens since then after which it did not go on."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, token_ids: Sequence[int]) -> array[int]:
        """Index the next tokens and return them; ids that cannot be raise and leave everything as it was."""
        ids = token_array(token_ids)
        start = len(self.token_ids)
        self.token_ids.extend(ids)
        self.last = self.automaton.extend_newest(self.last, ids, start, start - 1)
        return ids

    def append_output(self, token_ids: Sequence[int]) -> array[int]:
        """The same for tokens of the output, in which copies are followed."""
        ids = new_ids = token_array(token_ids)
        text, automaton = self.token_ids, self.automaton
        start, source = len(text), self._source
        text.extend(ids)
        if source and ids and text[source] == ids[0]:
            num_copied = num_equal(ids, text[source : source + len(ids)]) if len(ids) > 1 else 1
            self._source = source + num_copied
            self.last = automaton.extend_newest(self.last, ids[:num_copied], start, start - 1)
            start += num_copied
            ids = ids[num_copied:]
        if ids:
            length_before = automaton.lengths[automaton.links[self.last]] if self.last != ROOT else 0
            matches: list[tuple[int, int]] = []
            self.last = automaton.extend_newest(self.last, ids, start, start - 1, matches)
            for position, (length, end) in enumerate(matches, start):
                source = self._source
                if source and text[source] == text[position]:
                    self._source = source + 1
                elif source or self._carried:
                    self._leave_copy(length_before, length, end, position + 1)
                elif length:
                    self._source = end + 1
                length_before = length
        return new_ids

    def match(self) -> tuple[int, int, int, int]:
        """The longest ending that occurred before: its state, ``ROOT`` for none; its length; the position of the token
        that followed the chosen occurrence; and how many tokens it counts for in addition."""
        automaton = self.automaton
        state = automaton.links[self.last]
        if state <= ROOT:
            return ROOT, 0, 0, 0
        if self._source:
            return state, automaton.lengths[state], self._source, self._carried
        return state, automaton.lengths[state], automaton.ends[state] + 1, 0

    def copy(self, start: int, num_tokens: int) -> array[int]:
        """``num_tokens`` tokens from ``start``, a position in the text, on; past its end the copy goes on with itself.

        What lies between an earlier occurrence and the end is the text's period then: what repeats goes on repeating.
        """
        draft = self.token_ids[start : start + num_tokens]
        while draft and len(draft) < num_tokens:
            draft += draft[: num_tokens - len(draft)]
        return draft

    # --- inside -----------------------------------------------------------------------------------------------

    def _leave_copy(self, length_before: int, length: int, end: int, num_tokens: int) -> None:
        """After a token that the copy did not foresee: it goes on further down, or may still, or there is another.

        ``length_before``: of the match before the token; ``length`` and ``end``: of the match with it;
        ``num_tokens``: length of the text up to it.
        """
        if self._source:
            self._carried = (length_before + self._carried) // CARRIED
            self._broken_at = self._source
            self._num_waited = 0
        if self._carried:
            self._source = self._find_again(min(length, REACH), num_tokens) if length else 0
            if self._source:
                return
            if self._num_waited < PATIENCE and length <= WEAK_MATCH:
                self._num_waited += 1
                return
            self._carried = 0
        self._source = end + 1 if length else 0

    def _find_again(self, length: int, num_tokens: int) -> int:
        """Where the last ``length`` of ``num_tokens`` tokens end first after the break, plus 1; 0: not in reach."""
        text = self.token_ids
        ending = text[num_tokens - length : num_tokens]
        last = ending[-1]
        start = self._broken_at
        reach = text[start : min(start + REACH, num_tokens - 1)].tolist()
        if last in reach:
            for end, token_id in enumerate(reach, start + 1):
                if token_id == last and text[end - length : end] == ending:
                    return end
        return 0
