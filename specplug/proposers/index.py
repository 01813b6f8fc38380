"""An incremental index of token sequences: where did the end of a text occur before?

The index is a suffix automaton. Its states are classes of texts that end at the same places, so that the
suffix link of the state of the whole sequence is the longest ending that occurred earlier. Appending a token
costs amortised constant time and finding the longest match none at all, whatever the length of the sequence.

Storage is flat: six ``int32`` values a state, and one dictionary for the transitions of states with more than
one. There are at most two states and one such extra transition per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

__all__ = ["NO_STATE", "ROOT", "SequenceIndex", "SuffixAutomaton", "TokenIndex"]

ROOT = 0
"""The state of the empty text."""
NO_STATE = -1

_NO_TOKEN = -1
_NO_EXTRA = -1
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
    ``lengths[state]``: they occur at the same places, the first of which ends at ``ends[state]``.
    ``links[state]`` is the longest ending that occurs at more places. A caller that wants another
    occurrence than the first may overwrite ``ends[state]``.

    Several sequences may share one automaton: each starts at ``ROOT`` and keeps its own last state.
    """

    __slots__ = ("_extra_before", "_extra_tokens", "_extras", "_last_extra", "_targets", "_tokens", "ends", "lengths",
                 "links")  # fmt: skip

    def __init__(self) -> None:
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

    def follow(self, state: int, length: int, token_id: int) -> tuple[int, int]:
        """Move a match with a text from outside by one token of that text.

        ``state`` and ``length``: the longest ending of the outside text that is indexed, ``(ROOT, 0)`` at
        its start. Returns the same for the text with ``token_id`` at its end. Stays valid while the
        automaton grows, in the sense that the match is one of that length, though a longer may have come.
        """
        lengths, links = self.lengths, self.links
        while state != ROOT and lengths[links[state]] >= length:  # a clone took over the shorter endings
            state = links[state]
        after = self.next_state(state, token_id)
        while after == NO_STATE and state != ROOT:
            state = links[state]
            length = lengths[state]
            after = self.next_state(state, token_id)
        return (ROOT, 0) if after == NO_STATE else (after, length + 1)

    def extend(self, last: int, token_id: int, end: int) -> int:
        """Append a token to the sequence whose state is ``last``; returns its new state.

        ``end``: the token's position, kept in ``ends``; ``token_id``: 0 to 2**31 - 1.
        """
        lengths, links, tokens, extras = self.lengths, self.links, self._tokens, self._extras
        last_extra, extra_tokens, extra_before = self._last_extra, self._extra_tokens, self._extra_before
        new = len(lengths)
        found = NO_STATE
        state = last
        while state != NO_STATE:
            first = tokens[state]
            if first == token_id:
                found = self._targets[state]
                break
            if first == _NO_TOKEN:
                tokens[state] = token_id
                self._targets[state] = new
            else:
                key = state << _STATE_SHIFT | token_id
                known = extras.get(key)
                if known is not None:
                    found = known
                    break
                extras[key] = new
                extra_before.append(last_extra[state])
                last_extra[state] = len(extra_tokens)
                extra_tokens.append(token_id)
            state = links[state]
        if found == NO_STATE:
            return self._add_state(lengths[last] + 1, ROOT, end)
        if state == last:  # another sequence already went this way
            return found if lengths[found] == lengths[last] + 1 else self._clone(last, token_id, found)
        self._add_state(lengths[last] + 1, found, end)
        if lengths[found] != lengths[state] + 1:
            links[new] = self._clone(state, token_id, found)
        return new

    def _add_state(self, length: int, link: int, end: int) -> int:
        self.lengths.append(length)
        self.links.append(link)
        self.ends.append(end)
        self._tokens.append(_NO_TOKEN)
        self._targets.append(NO_STATE)
        self._last_extra.append(_NO_EXTRA)
        return len(self.lengths) - 1

    def _clone(self, state: int, token_id: int, original: int) -> int:
        """Split the endings that ``state`` and ``token_id`` make off ``original``; returns their own state."""
        links, tokens, targets, extras = self.links, self._tokens, self._targets, self._extras
        clone = self._add_state(self.lengths[state] + 1, links[original], self.ends[original])
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
