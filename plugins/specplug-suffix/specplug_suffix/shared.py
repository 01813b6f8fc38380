"""The index that requests share: their outputs, apart by namespace and bounded; and a corpus that all may read."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from specplug_suffix.local import token_array
from specplug_suffix.segment import Cursor, Segment

__all__ = ["Namespace", "SharedIndex"]

NUM_SEGMENTS = 4
"""The bound is kept by giving up the oldest of about this many parts."""


class Namespace:
    """What requests with one ``cache_salt`` may draft from. ``segments``: the oldest first; replaced, never changed."""

    __slots__ = ("cache_salt", "num_active", "own", "segments")

    def __init__(self, cache_salt: str | None) -> None:
        self.cache_salt = cache_salt
        self.num_active = 0
        self.own: tuple[Segment, ...] = ()
        self.segments: tuple[Segment, ...] = ()


class SharedIndex:
    """Texts of finished and running requests, each in the namespace of its ``cache_salt``.

    At most ``max_tokens`` tokens and ``max_requests`` texts are kept over all namespaces: before there are more, the
    oldest segment is dropped whole. A request whose segment was dropped while it ran is not shared any more.
    ``counts``: count occurrences, so that probabilities can be estimated.
    """

    def __init__(self, *, max_tokens: int, max_requests: int, counts: bool = False) -> None:
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._segment_tokens = max(1, max_tokens // NUM_SEGMENTS)
        self._segment_requests = max(1, max_requests // NUM_SEGMENTS)
        self._counts = counts
        self._namespaces: dict[str | None, Namespace] = {}
        self._kept: dict[Segment, Namespace] = {}  # the oldest first
        self._corpus: tuple[Segment, ...] = ()
        self.num_tokens = 0
        """Tokens kept, without the corpus."""
        self.num_requests = 0
        """Texts kept, without the corpus."""

    @property
    def is_sharing(self) -> bool:
        """Whether outputs are kept at all."""
        return self._max_tokens > 0 and self._max_requests > 0

    @property
    def corpus(self) -> tuple[Segment, ...]:
        """Segments that all namespaces read."""
        return self._corpus

    def kept(self) -> Iterator[tuple[str | None, Segment]]:
        """Salt and segment of everything kept, the oldest first."""
        for segment, namespace in self._kept.items():
            yield namespace.cache_salt, segment

    def enter(self, cache_salt: str | None) -> Namespace:
        """The namespace of a request that starts; pair with :meth:`leave`."""
        namespace = self._namespaces.get(cache_salt)
        if namespace is None:
            namespace = self._namespaces[cache_salt] = Namespace(cache_salt)
            namespace.segments = self._corpus
        namespace.num_active += 1
        return namespace

    def leave(self, namespace: Namespace) -> None:
        """A request of the namespace ended."""
        namespace.num_active -= 1
        self._forget_if_unused(namespace)

    def add(self, namespace: Namespace, cursor: Cursor | None, token_ids: array[int]) -> Cursor | None:
        """The next tokens of a request's output. ``cursor``: what the last call returned, None at the first.

        Tokens are shared until the request's segment is dropped. Returns where the text goes on.
        """
        for start in range(0, len(token_ids) if self.is_sharing else 0, self._segment_tokens):
            piece = token_ids[start : start + self._segment_tokens]
            if cursor is None:
                cursor = self._open(namespace, len(piece))
            elif cursor.segment.is_dropped:
                return cursor
            elif cursor.segment.num_tokens + len(piece) > self._segment_tokens:
                cursor = self._open(namespace, len(piece))
            else:
                self._make_room(len(piece), 0, keep=cursor.segment)
            cursor.segment.append(cursor, piece)
            self.num_tokens += len(piece)
        return cursor

    def warm(self, documents: Iterable[Sequence[int]]) -> int:
        """Add texts to the corpus, all or none; returns their number. They are kept for good, outside the bounds.

        Raises ``ValueError``, ``OverflowError`` or ``TypeError`` for ids that cannot be.
        """
        checked = [token_array(document) for document in documents]
        self.add_to_corpus(enumerate(checked))
        return len(checked)

    def add_to_corpus(self, pieces: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Add a segment of ``Segment.pieces`` to the corpus."""
        segment = self._build(pieces)
        if segment.num_tokens:
            self._corpus = (*self._corpus, segment)
            for namespace in self._namespaces.values():
                namespace.segments = self._corpus + namespace.own

    def restore(self, cache_salt: str | None, pieces: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Add a segment of ``Segment.pieces`` to a namespace; one that is larger than the bounds is left out."""
        segment = self._build(pieces)
        if segment.num_tokens > self._max_tokens or len(segment.documents) > self._max_requests:
            return
        namespace = self.enter(cache_salt)
        self._make_room(segment.num_tokens, len(segment.documents), keep=None)
        self._keep(namespace, segment)
        self.leave(namespace)

    # --- inside -----------------------------------------------------------------------------------------------

    def _build(self, pieces: Iterable[tuple[int, Sequence[int]]]) -> Segment:
        segment = Segment(counts=self._counts)
        cursors: dict[int, Cursor] = {}
        for document, token_ids in pieces:
            cursor = cursors.get(document)
            if cursor is None:
                cursor = cursors[document] = segment.open()
            segment.append(cursor, token_array(token_ids))
        for cursor in cursors.values():
            segment.close(cursor)
        return segment

    def _open(self, namespace: Namespace, num_tokens: int) -> Cursor:
        """Begin a text in the newest segment, or in a new one where that has no room."""
        newest = namespace.own[-1] if namespace.own else None
        if newest is not None and (
            newest.num_tokens + num_tokens > self._segment_tokens or len(newest.documents) >= self._segment_requests
        ):
            newest = None
        self._make_room(num_tokens, 1, keep=newest)
        if newest is None:
            newest = Segment(counts=self._counts)
            self._keep(namespace, newest)
        self.num_requests += 1
        return newest.open()

    def _keep(self, namespace: Namespace, segment: Segment) -> None:
        self._kept[segment] = namespace
        self.num_tokens += segment.num_tokens
        self.num_requests += len(segment.documents)
        namespace.own = (*namespace.own, segment)
        namespace.segments = self._corpus + namespace.own

    def _make_room(self, num_tokens: int, num_requests: int, *, keep: Segment | None) -> None:
        """Drop the oldest segments but ``keep`` until so many more tokens and texts are within the bounds."""
        while self.num_tokens + num_tokens > self._max_tokens or self.num_requests + num_requests > self._max_requests:
            oldest = next((segment for segment in self._kept if segment is not keep), None)
            if oldest is None:
                return
            self._drop(oldest)

    def _drop(self, segment: Segment) -> None:
        namespace = self._kept.pop(segment)
        self.num_tokens -= segment.num_tokens
        self.num_requests -= len(segment.documents)
        segment.drop()
        namespace.own = tuple(each for each in namespace.own if each is not segment)
        namespace.segments = self._corpus + namespace.own
        self._forget_if_unused(namespace)

    def _forget_if_unused(self, namespace: Namespace) -> None:
        if not namespace.own and not namespace.num_active:
            self._namespaces.pop(namespace.cache_salt, None)
