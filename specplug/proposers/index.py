"""An incremental index of token sequences: where did the end of a text occur before?

The index is a suffix automaton. Its states are classes of texts that end at the same places, so that the
suffix link of the state of the whole sequence is the longest ending that occurred earlier. Appending a token
costs amortised constant time and finding the longest match none at all, whatever the length of the sequence.

Storage is flat: six ``int32`` values a state, and one dictionary for the transitions of states with more than
one. There are at most two states and one such extra transition per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["NO_STATE", "ROOT", "CountingAutomaton", "SequenceIndex", "SuffixAutomaton", "TokenIndex"]

ROOT = 0
"""The state of the empty text."""
NO_STATE = -1

_NO_TOKEN = -1
_NO_EXTRA = -1
NUM_MOVED = 64
"""See ``SuffixAutomaton.extend_newest``."""

_MOVED = range(NUM_MOVED)
_FIRST = -2
_STATE_SHIFT = 31  # token ids are below 2**31, so state and token make one integer key


class TokenIndex(Protocol):
    """What a proposer needs from an index of one growing sequence, in whatever way it is implemented."""

    def __len__(self) -> int:
        """Tokens indexed so far."""

    def append(self, token_ids: Sequence[int]) -> None:
        """Index the next tokens; ids that cannot be leave the index as it was."""

    @property
    def match_length(self) -> int:
        """Length of the longest ending of the sequence that occurred before."""

    @property
    def match_end(self) -> int:
        """Position of the last token of the occurrence that was found; -1 when ``match_length`` is 0."""

    def copy(self, start: int, num_tokens: int) -> list[int]:
        """At most ``num_tokens`` tokens from position ``start`` on."""


class SuffixAutomaton:
    """States and transitions over one or several token sequences that grow at their ends.

    A state stands for all endings of one text with lengths from ``lengths[links[state]] + 1`` to
    ``lengths[state]``: they occur at the same places, one of which ends at ``ends[state]``.
    ``links[state]`` is the longest ending that occurs at more places.

    Several sequences may share one automaton: each starts at ``ROOT`` and keeps its own last state.
    """

    __slots__ = ("_extra_before", "_extra_tokens", "_extras", "_last_extra", "_targets", "_tokens", "ends", "lengths",
                 "links", "num_states")  # fmt: skip

    def __init__(self) -> None:
        self.num_states = 1
        # The arrays are longer: room is made for many states at a time.
        self.lengths = array("i", (0,))
        self.links = array("i", (NO_STATE,))
        self.ends = array("i", (-1,))
        # The first transition of a state lies in these two ...
        self._tokens = array("i", (_NO_TOKEN,))
        self._targets = array("i", (NO_STATE,))
        # ... the others in one dictionary, chained per state so that a clone can copy them.
        self._extras: dict[int, int] = {}
        self._extra_tokens = array("i")
        self._extra_before = array("i")
        self._last_extra = array("i", (_NO_EXTRA,))

    def next_state(self, state: int, token_id: int) -> int:
        """The state after ``token_id``, ``NO_STATE`` where no indexed text goes on so."""
        if self._tokens[state] == token_id:
            return self._targets[state]
        return self._extras.get(state << _STATE_SHIFT | token_id, NO_STATE)

    def goes_on(self, state: int) -> bool:
        """Whether any token followed an occurrence of ``state``."""
        return self._tokens[state] != _NO_TOKEN

    def follow(self, state: int, length: int, token_ids: Iterable[int]) -> tuple[int, int]:
        """Move a match with a text from outside along the next tokens of that text.

        ``state`` and ``length``: the longest ending of the outside text that is indexed, ``(ROOT, 0)`` at
        its start. Returns the same for the text with ``token_ids`` at its end. Stays valid while the
        automaton grows, in the sense that the match is one of that length, though a longer may have come.
        """
        lengths, links, tokens, extras = self.lengths, self.links, self._tokens, self._extras
        while state != ROOT and lengths[links[state]] >= length:  # a clone took over the shorter endings
            state = links[state]
        for token_id in token_ids:
            while True:
                if tokens[state] == token_id:
                    state = self._targets[state]
                    length += 1
                    break
                after = extras.get(state << _STATE_SHIFT | token_id)
                if after is not None:
                    state = after
                    length += 1
                    break
                if state == ROOT:
                    break
                state = links[state]
                length = lengths[state]
        return state, length

    def extend(self, last: int, token_id: int, end: int) -> int:
        """Append a token to the sequence whose state is ``last``; returns its new state.

        ``token_id``: 0 to 2**31 - 1; ``end``: its position. ``ends`` keeps the first occurrence of each state.
        """
        return self.extend_newest(last, (token_id,), end, _FIRST)

    def extend_newest(self, last: int, token_ids: Sequence[int], start: int, last_end: int) -> int:
        """Append tokens at positions from ``start`` on to the sequence whose state is ``last``; returns its new state.

        ``ends[state]`` is then the end of the *newest* occurrence that a token follows, for every state that has one,
        if the automaton is only extended in this way. ``last_end``: position of the token before, -1 for none.
        A token moves the ends of the ``NUM_MOVED`` longest endings of the text before it, so that it costs bounded
        time in periodic texts, where there are more; the others keep an older end.
        """
        # In one piece and with local names, since this is most of what a proposer's index costs.
        lengths, links, ends, tokens, targets = self.lengths, self.links, self.ends, self._tokens, self._targets
        extras, last_extra = self._extras, self._last_extra
        for end, token_id in enumerate(token_ids, start):
            if last_end != _FIRST:
                state = last
                for _ in _MOVED:
                    if state <= ROOT:
                        break
                    ends[state] = last_end
                    state = links[state]
                last_end = end
            new = self.num_states
            found = NO_STATE
            state = last
            while state != NO_STATE:
                first = tokens[state]
                if first == token_id:
                    found = targets[state]
                    break
                if first == _NO_TOKEN:
                    tokens[state] = token_id
                    targets[state] = new
                else:
                    key = state << _STATE_SHIFT | token_id
                    known = extras.get(key)
                    if known is not None:
                        found = known
                        break
                    extras[key] = new
                    self._extra_before.append(last_extra[state])
                    last_extra[state] = len(self._extra_tokens)
                    self._extra_tokens.append(token_id)
                state = links[state]
            if state == last:  # another sequence already went this way
                last = found if lengths[found] == lengths[last] + 1 else self._clone(last, token_id, found)
                continue
            if new + 2 > len(lengths):
                self._make_room()
            self.num_states = new + 1
            lengths[new] = lengths[last] + 1
            ends[new] = end
            last = new
            if found == NO_STATE:
                links[new] = ROOT
            elif lengths[found] == lengths[state] + 1:
                links[new] = found
            else:
                links[new] = self._clone(state, token_id, found)
        return last

    def _make_room(self) -> None:
        """For more states, which have no transition yet: a quarter more than there are."""
        more = array("i", (-1,)) * (16 + len(self.lengths) // 4)
        for values in (self.lengths, self.links, self.ends, self._tokens, self._targets, self._last_extra):
            values.extend(more)

    def _clone(self, state: int, token_id: int, original: int) -> int:
        """Split the endings that ``state`` and ``token_id`` make off ``original``; returns their own state."""
        links, tokens, targets, extras = self.links, self._tokens, self._targets, self._extras
        clone = self.num_states
        if clone == len(links):
            self._make_room()
        self.num_states = clone + 1
        self.lengths[clone] = self.lengths[state] + 1
        links[clone] = links[original]
        self.ends[clone] = self.ends[original]
        tokens[clone] = tokens[original]
        targets[clone] = targets[original]
        extra = self._last_extra[original]
        while extra != _NO_EXTRA:
            copied = self._extra_tokens[extra]
            extras[clone << _STATE_SHIFT | copied] = extras[original << _STATE_SHIFT | copied]
            self._extra_before.append(self._last_extra[clone])
            self._last_extra[clone] = len(self._extra_tokens)
            self._extra_tokens.append(copied)
            extra = self._extra_before[extra]
        links[original] = clone
        while state != NO_STATE:
            if tokens[state] == token_id:
                if targets[state] != original:
                    break
                targets[state] = clone
            else:
                key = state << _STATE_SHIFT | token_id
                if extras[key] != original:
                    break
                extras[key] = clone
            state = links[state]
        return clone


class CountingAutomaton(SuffixAutomaton):
    """Also counts occurrences: ``counts[state]`` of them are followed by a token or were counted as an end.

    Kept up by ``extend_newest`` and ``count_end``, under the same limit as ``ends``.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        super().__init__()
        self.counts = array("i", (0,))

    def extend_newest(self, last: int, token_ids: Sequence[int], start: int, last_end: int) -> int:
        """See :meth:`SuffixAutomaton.extend_newest`; counts what it moves."""
        for end, token_id in enumerate(token_ids, start):
            self.count_end(last)
            last = super().extend_newest(last, (token_id,), end, last_end)
            last_end = end
        return last

    def count_end(self, last: int) -> None:
        """Count the endings of a sequence whose state is ``last``, when no token will follow."""
        counts, links = self.counts, self.links
        state = last
        for _ in _MOVED:
            if state <= ROOT:
                break
            counts[state] += 1
            state = links[state]

    def num_likely(self, state: int, token_ids: Sequence[int], least: float) -> int:
        """How many of ``token_ids`` follow ``state`` with a probability of at least ``least``.

        The probability of a token is its share of what followed the text before it here, that of several
        the product; where no indexed text goes on as ``token_ids`` do, the rest counts as certain.
        """
        counts = self.counts
        probability = 1.0
        for number, token_id in enumerate(token_ids):
            after = self.next_state(state, token_id)
            if after == NO_STATE:
                break
            seen = max(counts[after], 1)
            probability *= seen / max(counts[state], seen)
            if probability < least:
                return number
            state = after
        return len(token_ids)

    def _make_room(self) -> None:
        num_before = len(self.lengths)
        super()._make_room()
        self.counts.extend(array("i", (0,)) * (len(self.lengths) - num_before))

    def _clone(self, state: int, token_id: int, original: int) -> int:
        clone = super()._clone(state, token_id, original)
        self.counts[clone] = self.counts[original]
        return clone


class SequenceIndex:
    """One growing sequence, and where its ending occurred before: longest ending, earliest occurrence.

    ``max_match``: endings longer than this count as this long (None: no cap). Occurrences may overlap the
    ending itself. Implements :class:`TokenIndex`.
    """

    __slots__ = ("_automaton", "_last", "_match", "_max_match", "_token_ids")

    def __init__(self, max_match: int | None = None) -> None:
        self._automaton = SuffixAutomaton()
        self._token_ids = array("i")
        self._last = ROOT
        self._match = ROOT
        self._max_match = 2**31 - 1 if max_match is None else max_match

    def __len__(self) -> int:
        return len(self._token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Index the next tokens.

        Raises ``ValueError``, ``OverflowError`` or ``TypeError`` for ids that are not whole numbers from 0 to
        2**31 - 1; nothing is appended then.
        """
        new_ids = array("i", token_ids)
        if new_ids and min(new_ids) < 0:
            raise ValueError(f"token id {min(new_ids)} is negative; ids run from 0 to 2**31 - 1")
        automaton, cap = self._automaton, self._max_match
        lengths, links, extend = automaton.lengths, automaton.links, automaton.extend
        last, match = self._last, self._match
        for end, token_id in enumerate(new_ids, len(self._token_ids)):
            last = extend(last, token_id, end)
            longest = links[last]
            if lengths[longest] <= cap:
                match = longest
            else:
                # More than ``cap`` tokens match, so ``cap`` matched before this token: going on from there
                # takes a few steps, where walking down from ``longest`` could take as many as the match is long.
                match = automaton.next_state(match, token_id)
                while lengths[links[match]] >= cap:
                    match = links[match]
        self._last, self._match = last, match
        self._token_ids.extend(new_ids)

    @property
    def match_length(self) -> int:
        return min(self._automaton.lengths[self._match], self._max_match)

    @property
    def match_end(self) -> int:
        return self._automaton.ends[self._match]

    def copy(self, start: int, num_tokens: int) -> list[int]:
        return self._token_ids[start : start + num_tokens].tolist()
