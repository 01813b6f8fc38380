"""An incremental index of token sequences: where did the end of a text occur before?

The index is a suffix automaton. Its states are classes of texts that end at the same places, so that the
suffix link of the state of the whole sequence is the longest ending that occurred earlier. Appending a token
costs amortised constant time and finding the longest match none at all, whatever the length of the sequence.

Storage is flat: a record of five ``int32`` values a state, which hold its only transition. A state with more than one
has a dictionary for them. There are at most two states and three transitions per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import ClassVar, Protocol

__all__ = ["NO_STATE", "ROOT", "CountingAutomaton", "SequenceIndex", "SuffixAutomaton", "TokenIndex"]

ROOT = 0
"""The state of the empty text."""
NO_STATE = -1

_NO_TOKEN = -1
_BRANCHED = -2
NUM_MOVED = 64
"""See ``SuffixAutomaton.extend_newest``."""

NUM_PROBED = 4
"""See ``SuffixAutomaton.follow``: of more tokens, so many at the end are followed first."""

_MOVED = range(NUM_MOVED)
_FIRST = -2


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

    __slots__ = ("_branches", "_columns", "_num_records", "_records", "_targets", "_tokens", "ends", "lengths",
                 "links", "num_states")  # fmt: skip

    _BLANK: ClassVar = array("i", (0, NO_STATE, -1, _NO_TOKEN, NO_STATE))
    """The record of a state, as ``ROOT``'s is at first."""

    lengths: memoryview[int]
    links: memoryview[int]
    ends: memoryview[int]
    # The transition of a state; of several, ``_BRANCHED`` and the number of the dictionary that holds them.
    _tokens: memoryview[int]
    _targets: memoryview[int]

    def __init__(self) -> None:
        self.num_states = 1
        # There are more records than states: room is made for many at a time.
        self._records = self._BLANK[:]
        self._branches: list[dict[int, int]] = []
        self._look_at_columns()

    def next_state(self, state: int, token_id: int) -> int:
        """The state after ``token_id``, ``NO_STATE`` where no indexed text goes on so."""
        first = self._tokens[state]
        if first == token_id:
            return self._targets[state]
        return self._branches[self._targets[state]].get(token_id, NO_STATE) if first == _BRANCHED else NO_STATE

    def goes_on(self, state: int) -> bool:
        """Whether any token followed an occurrence of ``state``."""
        return self._tokens[state] != _NO_TOKEN

    def follow(self, state: int, length: int, token_ids: Sequence[int]) -> tuple[int, int]:
        """Move a match with a text from outside along the next tokens of that text.

        ``state`` and ``length``: the longest ending of the outside text that is indexed, ``(ROOT, 0)`` at
        its start. Returns the same for the text with ``token_ids`` at its end. Stays valid while the
        automaton grows, in the sense that the match is one of that length, though a longer may have come;
        what else is known of ``state`` may then be that of a longer text, see :meth:`settle`.
        """
        if len(token_ids) > NUM_PROBED:
            found = self.follow(ROOT, 0, token_ids[-NUM_PROBED:])
            if found[1] < NUM_PROBED:  # a shorter match does not begin before them
                return found
        lengths, links, _, tokens, targets = self._columns
        branches = self._branches
        for token_id in token_ids:
            while True:
                first = tokens[state]
                if first == token_id:
                    state = targets[state]
                    length += 1
                    break
                if first == _BRANCHED:
                    after = branches[targets[state]].get(token_id)
                    if after is not None:
                        state = after
                        length += 1
                        break
                if state == ROOT:
                    break
                state = links[state]
                if lengths[state] < length:
                    length = lengths[state]
        return state, length

    def settle(self, state: int, length: int) -> int:
        """The state of a match that :meth:`follow` gave, however the automaton has grown since."""
        lengths, links = self.lengths, self.links
        while state != ROOT and lengths[links[state]] >= length:  # a clone took over the shorter endings
            state = links[state]
        return state

    def extend(self, last: int, token_id: int, end: int) -> int:
        """Append a token to the sequence whose state is ``last``; returns its new state.

        ``token_id``: 0 to 2**31 - 1; ``end``: its position. ``ends`` keeps the first occurrence of each state.
        """
        return self.extend_newest(last, (token_id,), end, _FIRST)

    def extend_newest(
        self,
        last: int,
        token_ids: Sequence[int],
        start: int,
        last_end: int,
        matches: list[tuple[int, int]] | None = None,
    ) -> int:
        """Append tokens at positions from ``start`` on to the sequence whose state is ``last``; returns its new state.

        ``ends[state]`` is then the end of the *newest* occurrence that a token follows, for every state that has one,
        if the automaton is only extended in this way. ``last_end``: position of the token before, -1 for none.
        A token moves the ends of the ``NUM_MOVED`` longest endings of the text before it, so that it costs bounded
        time in periodic texts, where there are more; the others keep an older end.
        ``matches``: gets, after each token, the length of the longest ending that occurs elsewhere and its end.
        """
        # In one piece and with local names, since this is most of what a proposer's index costs.
        if self.num_states + 2 * len(token_ids) > self._num_records:
            self._make_room(self.num_states + 2 * len(token_ids) - self._num_records)
        lengths, links, ends, tokens, targets = self._columns
        branches = self._branches
        moves_ends = last_end != _FIRST
        if moves_ends:
            ends[last] = last_end
        new, length = self.num_states, lengths[last]
        # If nothing goes on from ``last`` yet, its longest ending that occurs elsewhere.
        longest = links[last] if tokens[last] == _NO_TOKEN else NO_STATE
        end = start - 1
        for token_id in token_ids:
            end += 1
            length += 1
            state = last
            if longest != NO_STATE:
                tokens[last], targets[last] = token_id, new
                state = longest
            found = NO_STATE
            while state != NO_STATE:
                first = tokens[state]
                if first == token_id:
                    found = targets[state]
                    break
                if first == _BRANCHED:
                    known = branches[targets[state]].setdefault(token_id, new)
                    if known != new:
                        found = known
                        break
                elif first == _NO_TOKEN:
                    tokens[state], targets[state] = token_id, new
                else:
                    branches.append({first: targets[state], token_id: new})
                    tokens[state], targets[state] = _BRANCHED, len(branches) - 1
                if moves_ends:
                    ends[state] = last_end
                state = links[state]
            if moves_ends and state > ROOT:  # also of the endings that went on so before
                shorter = state
                for _ in _MOVED:
                    ends[shorter] = last_end
                    shorter = links[shorter]
                    if shorter == ROOT:
                        break
            last_end = end
            if state == last:  # another sequence already went this way
                last, longest = found, NO_STATE
                if lengths[found] != length:
                    last = self._clone(state, token_id, found, new, length)
                    new += 1
            else:
                last = new
                new += 1
                longest = ROOT
                if found != NO_STATE:
                    length_found = lengths[state] + 1
                    longest = found
                    if lengths[found] != length_found:
                        longest = self._clone(state, token_id, found, new, length_found)
                        new += 1
                lengths[last], links[last], ends[last] = length, longest, end
            if matches is not None:
                match = links[last]
                matches.append((lengths[match], ends[match]))
        self.num_states = new
        return last

    def _make_room(self, num_states: int) -> None:
        """For so many more states at least. Columns that were fetched before are void then."""
        for column in self._columns:
            column.release()
        self._records.extend(self._BLANK * max(num_states, 16 + self._num_records // 8))
        self._look_at_columns()

    def _look_at_columns(self) -> None:
        records = memoryview(self._records)
        self._num_records = len(records) // 5
        self._columns = (records[0::5], records[1::5], records[2::5], records[3::5], records[4::5])
        self.lengths, self.links, self.ends, self._tokens, self._targets = self._columns

    def _clone(self, state: int, token_id: int, original: int, clone: int, length: int) -> int:
        """Split the endings that ``state`` and ``token_id`` make off ``original``: they become ``clone``, which is
        returned, of ``length``."""
        lengths, links, ends, tokens, targets = self._columns
        branches = self._branches
        lengths[clone] = length
        ends[clone] = ends[original]
        links[clone] = links[original]
        links[original] = clone
        tokens[clone] = first = tokens[original]
        targets[clone] = targets[original]
        if first == _BRANCHED:
            targets[clone] = len(branches)
            branches.append(branches[targets[original]].copy())
        while state != NO_STATE:
            if tokens[state] == token_id:
                if targets[state] != original:
                    break
                targets[state] = clone
            else:
                branch = branches[targets[state]]
                if branch[token_id] != original:
                    break
                branch[token_id] = clone
            state = links[state]
        return clone


class CountingAutomaton(SuffixAutomaton):
    """Also counts occurrences: ``counts[state]`` of them are followed by a token or were counted as an end.

    Kept up by ``extend_newest`` and ``count_end``, under the same limit as ``ends``.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = array("i")
        super().__init__()

    def extend_newest(
        self,
        last: int,
        token_ids: Sequence[int],
        start: int,
        last_end: int,
        matches: list[tuple[int, int]] | None = None,
    ) -> int:
        """See :meth:`SuffixAutomaton.extend_newest`; counts what it moves."""
        for end, token_id in enumerate(token_ids, start):
            self.count_end(last)
            last = super().extend_newest(last, (token_id,), end, last_end, matches)
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

    def _look_at_columns(self) -> None:
        super()._look_at_columns()
        self.counts.extend(array("i", (0,)) * (self._num_records - len(self.counts)))

    def _clone(self, state: int, token_id: int, original: int, clone: int, length: int) -> int:
        self.counts[clone] = self.counts[original]
        return super()._clone(state, token_id, original, clone, length)


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
        last, match = self._last, self._match
        for end, token_id in enumerate(new_ids, len(self._token_ids)):
            last = automaton.extend(last, token_id, end)
            lengths, links = automaton.lengths, automaton.links
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
