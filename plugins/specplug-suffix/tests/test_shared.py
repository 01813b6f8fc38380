from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specplug_suffix.segment import Cursor, Segment
from specplug_suffix.shared import Namespace, SharedIndex

from specplug.proposers.index import ROOT

texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=30))


def fill(segment: Segment, documents: list[list[int]], chunk: int) -> None:
    """All documents side by side, in turn, ``chunk`` tokens at a time."""
    cursors = [segment.open() for _ in documents]
    for start in range(0, max(map(len, documents), default=0), chunk):
        for cursor, document in zip(cursors, documents, strict=True):
            if document[start:]:
                segment.append(cursor, document[start : start + chunk])


@settings(max_examples=1000, deadline=None)
@given(documents=st.lists(texts, min_size=1, max_size=4), outside=texts, chunk=st.integers(1, 7))
def test_longest_match_that_goes_on_within_one_document(
    documents: list[list[int]], outside: list[int], chunk: int
) -> None:
    segment = Segment()
    fill(segment, documents, chunk)
    state, length = segment.longest_going_on(*segment.automaton.follow(ROOT, 0, outside))
    expected = max(
        (
            size
            for size in range(len(outside) + 1)
            for document in documents
            for end in range(size, len(document))
            if size and document[end - size : end] == outside[len(outside) - size :]
        ),
        default=0,
    )
    assert length == expected
    if length:
        draft = segment.copy(state, 40).tolist()
        ending = outside[len(outside) - length :]
        assert draft
        assert any(
            document[end - length : end] == ending and document[end:] == draft
            for document in documents
            for end in range(length, len(document))
        ), "what followed in one document, to its end and not further"


@settings(max_examples=300, deadline=None)
@given(documents=st.lists(texts, min_size=1, max_size=4), outside=texts, chunk=st.integers(1, 7))
def test_pieces_make_the_same_segment_again(documents: list[list[int]], outside: list[int], chunk: int) -> None:
    segment, again = Segment(), Segment()
    fill(segment, documents, chunk)
    cursors: dict[int, Cursor] = {}
    for document, token_ids in segment.pieces():
        if document not in cursors:
            cursors[document] = again.open()
        again.append(cursors[document], token_ids)
    assert again.num_tokens == segment.num_tokens == sum(map(len, documents))
    state, length = segment.longest_going_on(*segment.automaton.follow(ROOT, 0, outside))
    assert again.longest_going_on(*again.automaton.follow(ROOT, 0, outside)) == (state, length)
    assert not length or again.copy(state, 9) == segment.copy(state, 9)


def share(shared: SharedIndex, salt: str | None, *documents: list[int], chunk: int = 100) -> None:
    for document in documents:
        namespace = shared.enter(salt)
        cursor = None
        for start in range(0, len(document), chunk):
            cursor = shared.add(namespace, cursor, array("i", document[start : start + chunk]))
        shared.leave(namespace)


def holds(namespace: Namespace, ending: list[int]) -> bool:
    return any(segment.automaton.follow(ROOT, 0, ending)[1] == len(ending) for segment in namespace.segments)


def test_oldest_segment_goes_before_the_bounds_are_passed() -> None:
    shared = SharedIndex(max_tokens=100, max_requests=1000)
    for number in range(50):
        share(shared, None, [1000 + number] * 7)
        assert shared.num_tokens <= 100
    namespace = shared.enter(None)
    assert holds(namespace, [1049] * 7)
    assert not holds(namespace, [1000])
    assert len(namespace.segments) <= 5


@pytest.mark.parametrize("max_requests", [1, 2, 3, 4, 5, 7, 8, 11, 100])
def test_number_of_requests_is_bounded(max_requests: int) -> None:
    shared = SharedIndex(max_tokens=10**6, max_requests=max_requests)
    for number in range(300):
        share(shared, None, [number, number])
        assert shared.num_requests <= max_requests
    namespace = shared.enter(None)
    assert max(len(segment.documents) for segment in namespace.segments) <= max(1, max_requests // 4)
    kept = [number for number in range(300) if holds(namespace, [number, number])]
    assert kept == list(range(300 - len(kept), 300)), "the newest"
    assert len(kept) > max_requests // 2


def test_a_text_longer_than_a_segment_goes_on_in_the_next() -> None:
    shared = SharedIndex(max_tokens=40, max_requests=100)
    share(shared, None, list(range(1000, 1200)), chunk=3)
    share(shared, None, list(range(2000, 2200)))
    assert shared.num_tokens <= 40
    assert holds(shared.enter(None), list(range(2190, 2200)))


def test_namespaces_see_their_own_only() -> None:
    shared = SharedIndex(max_tokens=1000, max_requests=100)
    share(shared, "a", [1, 2, 3])
    share(shared, "b", [4, 5, 6])
    share(shared, None, [7, 8, 9])
    seen = {
        salt: [holds(shared.enter(salt), ids) for ids in ([1, 2], [4, 5], [7, 8])] for salt in ("a", "b", None, "c")
    }
    assert seen == {
        "a": [True, False, False],
        "b": [False, True, False],
        None: [False, False, True],
        "c": [False, False, False],
    }


def test_namespaces_share_the_bounds_and_leave_nothing_behind() -> None:
    shared = SharedIndex(max_tokens=100, max_requests=1000)
    for number in range(200):
        share(shared, f"salt {number}", [number] * 10)
        assert shared.num_tokens <= 100
    assert len(list(shared.kept())) <= 10
    assert len(shared._namespaces) <= 10


def test_a_dropped_segment_ends_the_sharing_of_its_requests() -> None:
    shared = SharedIndex(max_tokens=1000, max_requests=1)
    namespace = shared.enter(None)
    cursor = shared.add(namespace, None, array("i", [1, 2, 3]))
    share(shared, None, [4, 5, 6])
    assert cursor is not None
    assert cursor.segment.is_dropped
    assert shared.add(namespace, cursor, array("i", [7, 8])) is cursor
    assert (shared.num_tokens, shared.num_requests) == (3, 1)


@pytest.mark.parametrize("bounds", [{"max_tokens": 0, "max_requests": 9}, {"max_tokens": 9, "max_requests": 0}])
def test_nothing_is_shared_under_a_bound_of_0(bounds: dict[str, int]) -> None:
    shared = SharedIndex(**bounds)
    share(shared, None, [1, 2, 3])
    assert (shared.num_tokens, shared.enter(None).segments) == (0, ())


def test_the_corpus_is_for_all_and_stays() -> None:
    shared = SharedIndex(max_tokens=10, max_requests=10)
    early = shared.enter("early")
    assert shared.warm([[1, 2, 3], [4, 5, 6]]) == 2
    for number in range(20):
        share(shared, None, [100 + number] * 5)
    for namespace in (early, shared.enter("late"), shared.enter(None)):
        assert holds(namespace, [1, 2, 3])
        assert holds(namespace, [4, 5, 6])
    assert shared.num_tokens <= 10


@pytest.mark.parametrize("bad", [[[1, 2], [3, -1]], [[1, 2], [2**31]], [[1, 2], ["x"]]])
def test_a_corpus_is_taken_whole_or_not_at_all(bad: list[list[Any]]) -> None:
    shared = SharedIndex(max_tokens=10, max_requests=10)
    with pytest.raises((ValueError, OverflowError, TypeError)):
        shared.warm(bad)
    assert shared.corpus == ()


def test_a_restored_segment_counts_for_the_bounds() -> None:
    def pieces() -> Iterator[tuple[int, list[int]]]:
        yield 0, [1, 2]
        yield 1, [3, 4]
        yield 0, [5, 6]

    shared = SharedIndex(max_tokens=10, max_requests=10)
    share(shared, None, [9] * 4, [8] * 4)
    shared.restore("a", pieces())
    assert shared.num_tokens <= 10
    assert holds(shared.enter("a"), [1, 2, 5, 6])
    small = SharedIndex(max_tokens=5, max_requests=10)
    small.restore("a", pieces())
    assert small.num_tokens == 0, "larger than the bound"
