"""The index of one request's own text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from specplug.proposers.index import ROOT, CountingAutomaton, SuffixAutomaton

__all__ = ["LocalIndex", "token_array"]

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


class LocalIndex:
    """One growing text, and where its ending occurred before: longest ending, of several places the one where the
    output's copy goes on, else the newest.

    Output often copies a stretch of the text with changes in between. Where the copied text ends and the output
    brings something else, the place is kept: if the next tokens are found again within ``REACH`` tokens after it, the
    copy goes on there. This follows from the text alone, however it comes in pieces.
    """

    __slots__ = ("_carried", "_num_waited", "_source", "automaton", "last", "token_ids")

    def __init__(self, *, counts: bool = False) -> None:
        self.automaton = CountingAutomaton() if counts else SuffixAutomaton()
        self.token_ids = array("i")
        self.last = ROOT
        self._source = 0
        """Position of the token that comes next if the copy goes on; 0: nothing is copied."""
        self._carried = 0
        self._num_waited = 0
        """Tokens since the copy broke off; 0: it did not."""

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
        ids = token_array(token_ids)
        text, automaton = self.token_ids, self.automaton
        start = first = len(text)
        text.extend(ids)
        for end, token_id in enumerate(ids, start):
            if self._source and not self._num_waited and text[self._source] == token_id:
                self._source += 1
                continue
            last = self.last
            if end > first:
                last = automaton.extend_newest(last, text[first:end], first, first - 1)
            length = automaton.lengths[automaton.links[last]] if last != ROOT else 0
            self.last = automaton.extend_newest(last, (token_id,), end, end - 1)
            first = end + 1
            self._leave_copy(length, first)
        if first < len(text):
            rest = text[first:] if first > start else ids
            self.last = automaton.extend_newest(self.last, rest, first, first - 1)
        return ids

    def match(self) -> tuple[int, int, int, int]:
        """The longest ending that occurred before: its state, ``ROOT`` for none; its length; the position of the token
        that followed the chosen occurrence; and how many tokens it counts for in addition."""
        automaton = self.automaton
        state = automaton.links[self.last]
        if state <= ROOT:
            return ROOT, 0, 0, 0
        if self._source and not self._num_waited:
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

    def _leave_copy(self, length_before: int, num_tokens: int) -> None:
        """After a token that the copy did not foresee: it goes on further down, or may still, or there is another.

        ``length_before``: of the match before the token; ``num_tokens``: length of the text up to it.
        """
        state = self.automaton.links[self.last]
        length = self.automaton.lengths[state]
        if not self._num_waited:
            self._carried = (length_before + self._carried) // CARRIED if self._source else 0
        if self._carried:
            resumed = self._find_again(min(length, REACH), num_tokens) if length else 0
            if resumed:
                self._source = resumed
                self._num_waited = 0
                return
            if self._num_waited < PATIENCE and length <= WEAK_MATCH:
                self._num_waited += 1
                return
            self._carried = 0
        self._num_waited = 0
        self._source = self.automaton.ends[state] + 1 if length else 0

    def _find_again(self, length: int, num_tokens: int) -> int:
        """Where the last ``length`` of ``num_tokens`` tokens end first after the break, plus 1; 0: not in reach."""
        text = self.token_ids
        ending = text[num_tokens - length : num_tokens]
        end = self._source
        stop = min(end + REACH, num_tokens - 1)
        while end < stop:
            try:
                end = text.index(ending[-1], end, stop) + 1
            except ValueError:
                return 0
            if text[end - length : end] == ending:
                return end
        return 0
