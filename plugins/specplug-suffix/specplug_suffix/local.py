"""The index of one request's own text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import takewhile
from operator import eq

from specplug.proposers.index import ROOT, CountingAutomaton, SuffixAutomaton

__all__ = ["LocalIndex", "num_equal", "token_array"]

REACH = 32
"""How far ahead of where a copy broke off it may go on; longer matches elsewhere are not given up for it."""
PATIENCE = 8
"""Tokens that may come in between."""
WEAK_MATCH = 4
"""A longer match elsewhere ends the wait."""
CARRIED = 4
"""A copy that goes on counts one in so many tokens of its match before the break on top of the match after it."""
MAX_WAITING = 32
"""A copy is indexed so many tokens at a time: its match is known without."""


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
    copy goes on there. This follows from the text alone, however it comes in pieces. While a copy goes on, its match is
    known without the automaton, which gets the tokens later, together.
    """

    __slots__ = ("_automaton", "_broken_at", "_carried", "_last", "_num_indexed", "_num_waited", "_source",
                 "match_length", "token_ids")  # fmt: skip

    def __init__(self, *, counts: bool = False) -> None:
        self._automaton = CountingAutomaton() if counts else SuffixAutomaton()
        self.token_ids = array("i")
        self.match_length = 0
        """Length of the longest ending that occurred before."""
        self._last = ROOT
        self._num_indexed = 0
        """Tokens in the automaton. While those after them wait, the copy is an occurrence of the longest ending."""
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

    def append(self, token_ids: Sequence[int]) -> None:
        """Index the next tokens; ids that cannot be raise and leave everything as it was."""
        self.token_ids.extend(token_array(token_ids))
        self.match_length = self.automaton.lengths[self.match_state]

    def append_output(self, token_ids: Sequence[int]) -> None:
        """The same for tokens of the output, in which copies are followed."""
        ids = token_array(token_ids)
        text, source, num_indexed = self.token_ids, self._source, self._num_indexed
        start = len(text)
        text.extend(ids)
        if source and ids and text[source] == ids[0]:
            num_copied = num_equal(ids, text[source : source + len(ids)]) if len(ids) > 1 else 1
            source = self._source = source + num_copied
            self.match_length += num_copied
            start += num_copied
            if start == len(text) and start - num_indexed < MAX_WAITING:
                return
        matches: list[tuple[int, int]] = []
        new = text[num_indexed:]
        self._last = self._automaton.extend_newest(self._last, new, num_indexed, num_indexed - 1, matches)
        self._num_indexed = len(text)
        for length, end in matches[start - num_indexed :]:
            if source and text[source] == text[start]:
                source += 1
            elif self._carried or (source and self.match_length >= CARRIED):
                source = self._leave_copy(source, length, end, start + 1)
            else:
                source = end + 1 if length else 0
            start += 1
            self.match_length = length
        self._source = source

    def match(self) -> tuple[int, int, int]:
        """The longest ending that occurred before: its length, 0 for none; the position of the token that followed the
        chosen occurrence; and how many tokens it counts for in addition."""
        if self._source:
            return self.match_length, self._source, self._carried
        if self.match_length:
            return self.match_length, self._automaton.ends[self.match_state] + 1, 0
        return 0, 0, 0

    @property
    def automaton(self) -> SuffixAutomaton:
        """The automaton of the whole text."""
        start = self._num_indexed
        if start < len(self.token_ids):
            self._last = self._automaton.extend_newest(self._last, self.token_ids[start:], start, start - 1)
            self._num_indexed = len(self.token_ids)
        return self._automaton

    @property
    def match_state(self) -> int:
        """The state there of the longest ending that occurred before, ``ROOT`` for none."""
        return max(ROOT, self.automaton.links[self._last])

    def copy(self, start: int, num_tokens: int) -> array[int]:
        """``num_tokens`` tokens from ``start``, a position in the text, on; past its end the copy goes on with itself.

        What lies between an earlier occurrence and the end is the text's period then: what repeats goes on repeating.
        """
        draft = self.token_ids[start : start + num_tokens]
        while draft and len(draft) < num_tokens:
            draft += draft[: num_tokens - len(draft)]
        return draft

    # --- inside -----------------------------------------------------------------------------------------------

    def _leave_copy(self, source: int, length: int, end: int, num_tokens: int) -> int:
        """After a token that the copy did not foresee: it goes on further down, or may still, or there is another.

        ``source``: the copy's; ``length`` and ``end``: of the match with the token; ``num_tokens``: length of the text
        up to it. Returns the new source.
        """
        if source:
            self._carried = (self.match_length + self._carried) // CARRIED
            self._broken_at = source
            self._num_waited = 0
        if self._carried:
            source = self._find_again(length, num_tokens) if 0 < length <= REACH else 0
            if source:
                return source
            if self._num_waited < PATIENCE and length <= WEAK_MATCH:
                self._num_waited += 1
                return 0
            self._carried = 0
        return end + 1 if length else 0

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
