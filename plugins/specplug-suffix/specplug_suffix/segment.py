"""A part of the shared index: many texts under one automaton, given up as a whole."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from specplug.proposers.index import ROOT, CountingAutomaton, SuffixAutomaton

__all__ = ["Cursor", "Segment"]


class Cursor:
    """The end of a growing text in a segment: where its next tokens go."""

    __slots__ = ("document", "last", "last_end", "segment")

    def __init__(self, segment: Segment, document: int) -> None:
        self.segment = segment
        self.document = document
        self.last = ROOT
        self.last_end = -1


class Segment:
    """Texts, of which several may grow at a time, each piece by piece.

    Positions count the tokens of all texts in the order in which they came; the texts themselves are kept apart,
    so that what is copied never runs from one text into another.
    """

    __slots__ = ("_piece_documents", "_piece_offsets", "_piece_starts", "automaton", "documents", "is_dropped",
                 "num_tokens")  # fmt: skip

    def __init__(self, *, counts: bool = False) -> None:
        self.automaton = CountingAutomaton() if counts else SuffixAutomaton()
        self.documents: list[array[int]] = []
        self.num_tokens = 0
        self.is_dropped = False
        # Piece i: from position _piece_starts[i] on, tokens of document _piece_documents[i] from _piece_offsets[i] on.
        self._piece_starts = array("i")
        self._piece_documents = array("i")
        self._piece_offsets = array("i")

    def open(self) -> Cursor:
        """Begin a text."""
        self.documents.append(array("i"))
        return Cursor(self, len(self.documents) - 1)

    def append(self, cursor: Cursor, token_ids: Sequence[int]) -> None:
        """The next tokens of an open text."""
        document = self.documents[cursor.document]
        self._piece_starts.append(self.num_tokens)
        self._piece_documents.append(cursor.document)
        self._piece_offsets.append(len(document))
        cursor.last = self.automaton.extend_newest(cursor.last, token_ids, self.num_tokens, cursor.last_end)
        document.extend(token_ids)
        self.num_tokens += len(token_ids)
        cursor.last_end = self.num_tokens - 1

    def close(self, cursor: Cursor) -> None:
        """No token will follow."""
        if isinstance(self.automaton, CountingAutomaton):
            self.automaton.count_end(cursor.last)

    def longest_going_on(self, state: int, length: int) -> tuple[int, int]:
        """The longest ending of a match that some text goes on from: state and length, ``(ROOT, 0)`` for none."""
        automaton = self.automaton
        state = automaton.settle(state, length)
        while state != ROOT and not automaton.goes_on(state):
            state = automaton.links[state]
            length = automaton.lengths[state]
        return state, length

    def copy(self, state: int, num_tokens: int) -> array[int]:
        """At most ``num_tokens`` tokens that followed the newest occurrence of ``state``, of the same text."""
        end = self.automaton.ends[state]
        piece = bisect_right(self._piece_starts, end) - 1
        start = self._piece_offsets[piece] + end - self._piece_starts[piece] + 1
        return self.documents[self._piece_documents[piece]][start : start + num_tokens]

    def pieces(self) -> Iterator[tuple[int, array[int]]]:
        """(document, tokens) in the order in which they came: appended again they give the same segment."""
        bounds = [*self._piece_starts, self.num_tokens]
        for piece, (document, offset) in enumerate(zip(self._piece_documents, self._piece_offsets, strict=True)):
            length = bounds[piece + 1] - bounds[piece]
            yield document, self.documents[document][offset : offset + length]

    def drop(self) -> None:
        """Give the memory back, also while requests still hold the segment."""
        self.is_dropped = True
        self.automaton = SuffixAutomaton()
        self.documents = []
        self.num_tokens = 0
        self._piece_starts, self._piece_documents, self._piece_offsets = array("i"), array("i"), array("i")
