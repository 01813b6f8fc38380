from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.proposers.index import (
    NO_STATE,
    NUM_MOVED,
    ROOT,
    CountingAutomaton,
    SequenceIndex,
    SuffixAutomaton,
    TokenIndex,
)

NUM_TOKENS = 50_000

TEXTS: dict[str, Callable[[int], list[int]]] = {
    "random2": lambda n: random.Random(0).choices(range(2), k=n),
    "random4": lambda n: random.Random(0).choices(range(4), k=n),
    "random300": lambda n: random.Random(0).choices(range(300), k=n),
    "random50000": lambda n: random.Random(0).choices(range(50_000), k=n),
    "distinct": lambda n: list(range(n)),
    "one token, then another": lambda n: [7] * (n - 1) + [8],
    "period 4": lambda n: [1, 2, 3, 4] * (n // 4),
    "runs": lambda n: [run for run in range(20) for _ in range(n // 20)],
    "runs with a common head": lambda n: [token for run in range(3) for token in [1] + [2 + run] * (n // 3 - 1)],
    "common runs": lambda n: [token for run in range(4) for token in [7] * (n // 4 - 1) + [8 + run]],
}
"""Easy and worst cases for a suffix automaton: many states, many transitions, long chains of links."""


def longest_match(text: list[int], max_match: int) -> tuple[int, int]:
    """Length of the longest ending that occurred before, and the position where it first ended; by trying all."""
    for length in range(min(max_match, len(text) - 1), 0, -1):
        for end in range(length - 1, len(text) - 1):
            if text[end - length + 1 : end + 1] == text[len(text) - length :]:
                return length, end
    return 0, -1


texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=60))


@settings(max_examples=1500, deadline=None)
@given(text=texts, max_match=st.integers(1, 8), chunk=st.integers(1, 7))
def test_longest_ending_earliest_occurrence(text: list[int], max_match: int, chunk: int) -> None:
    index = SequenceIndex(max_match)
    for start in range(0, len(text), chunk):
        index.append(text[start : start + chunk])
        so_far = text[: start + chunk]
        assert (index.match_length, index.match_end) == longest_match(so_far, max_match)
        assert len(index) == len(so_far)


@settings(max_examples=500, deadline=None)
@given(text=texts)
def test_without_a_cap(text: list[int]) -> None:
    index = SequenceIndex()
    index.append(text)
    assert (index.match_length, index.match_end) == longest_match(text, len(text))


@settings(max_examples=500, deadline=None)
@given(documents=st.lists(texts, max_size=4), outside=texts, num_before=st.integers(0, 30))
def test_follows_a_text_from_outside_while_the_automaton_grows(
    documents: list[list[int]], outside: list[int], num_before: int
) -> None:
    automaton = SuffixAutomaton()
    indexed: list[list[int]] = []
    state, length, followed = ROOT, 0, 0
    positions: list[tuple[int, int]] = []
    for document in documents:
        indexed.append([])
        last = ROOT
        for token in document:
            last = automaton.extend(last, token, len(positions))
            indexed[-1].append(token)
            positions.append((len(indexed) - 1, len(indexed[-1]) - 1))
            if len(positions) >= num_before and followed < len(outside):
                state, length = automaton.follow(state, length, (outside[followed],))
                followed += 1
                matched = outside[followed - length : followed]
                number, end = positions[automaton.ends[state]] if length else (0, -1)
                assert length == 0 or matched == indexed[number][end - length + 1 : end + 1]
                assert automaton.settle(state, length) == automaton.follow(ROOT, 0, matched)[0]


@settings(max_examples=300, deadline=None)
@given(documents=st.lists(texts, min_size=1, max_size=4), outside=texts)
def test_follow_finds_the_longest_match_in_several_sequences(documents: list[list[int]], outside: list[int]) -> None:
    automaton = SuffixAutomaton()
    for document in documents:
        last = ROOT
        for end, token in enumerate(document):
            last = automaton.extend(last, token, end)
    state, length = ROOT, 0
    for num_read, token in enumerate(outside, 1):
        state, length = automaton.follow(state, length, (token,))
        longest = max(
            size
            for size in range(num_read + 1)
            if any(_contains(document, outside[num_read - size : num_read]) for document in documents)
        )
        assert length == longest


def _contains(document: list[int], part: list[int]) -> bool:
    return any(document[start : start + len(part)] == part for start in range(len(document) - len(part) + 1))


@settings(max_examples=500, deadline=None)
@given(documents=st.lists(texts, min_size=1, max_size=4), chunk=st.integers(1, 7))
def test_extend_newest_keeps_the_newest_occurrence_that_goes_on(documents: list[list[int]], chunk: int) -> None:
    automaton = SuffixAutomaton()
    counting = CountingAutomaton()
    start = 0
    for document in documents:
        states = [ROOT, ROOT]
        for at in range(0, len(document), chunk):
            part = document[at : at + chunk]
            last_end = start - 1 if at else -1
            states = [
                index.extend_newest(state, part, start, last_end)
                for index, state in zip((automaton, counting), states, strict=True)
            ]
            start += len(part)
        counting.count_end(states[1])
    assert automaton.ends[: automaton.num_states] == counting.ends[: counting.num_states]
    flat = [(number, at) for number, document in enumerate(documents) for at in range(len(document))]
    for part in {tuple(doc[at : at + size]) for doc in documents for at in range(len(doc)) for size in (1, 2, 3)}:
        state, length = automaton.follow(ROOT, 0, part)
        assert length == len(part)
        places = [
            (position, at + 1 < len(documents[number]))
            for position, (number, at) in enumerate(flat)
            if at + 1 >= len(part) and tuple(documents[number][at + 1 - len(part) : at + 1]) == part
        ]
        going_on = [position for position, goes_on in places if goes_on]
        assert automaton.goes_on(state) == bool(going_on)
        assert counting.counts[state] == len(places)
        if going_on:
            assert automaton.ends[state] == going_on[-1]


def test_num_likely_multiplies_the_shares_of_what_followed() -> None:
    automaton = CountingAutomaton()
    position = 0
    for document in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]):
        last = automaton.extend_newest(ROOT, document, position, -1)
        automaton.count_end(last)
        position += len(document)
    state, _ = automaton.follow(ROOT, 0, (1, 2))
    assert [automaton.num_likely(state, [3, 4], least) for least in (0.3, 0.34, 0.6, 0.67)] == [2, 1, 1, 0]
    assert automaton.num_likely(state, [6, 7, 8, 9], 0.3) == 4, "nothing is known about the last two"


def test_extend_newest_takes_bounded_time_in_periodic_text(counted_lines: Any) -> None:
    automaton = SuffixAutomaton()
    last = automaton.extend_newest(ROOT, [7] * 5000, 0, -1)
    with counted_lines() as step:
        automaton.extend_newest(last, [7], 5000, 4999)
    assert step.lines <= 4 * NUM_MOVED + 60


def test_next_state_of_an_unknown_token() -> None:
    automaton = SuffixAutomaton()
    automaton.extend(ROOT, 3, 0)
    assert automaton.next_state(ROOT, 4) == NO_STATE


def test_smallest_and_largest_ids() -> None:
    index = SequenceIndex()
    index.append([0, 2**31 - 1, 0, 2**31 - 1])
    assert (index.match_length, index.copy(index.match_end + 1, 9)) == (2, [0, 2**31 - 1])


@pytest.mark.parametrize("bad", [[1, -1], [1, 2**31], [1, 2.0], [1, None], [1, "2"]])
def test_invalid_ids_leave_the_index_as_it_was(bad: list[Any]) -> None:
    index = SequenceIndex()
    index.append([1, 2, 1])
    with pytest.raises((ValueError, OverflowError, TypeError)):
        index.append(bad)
    assert (len(index), index.match_length, index.copy(0, 9)) == (3, 1, [1, 2, 1])
    index.append([2])
    assert (index.match_length, index.match_end) == (2, 1)


def test_empty_index() -> None:
    index: TokenIndex = SequenceIndex(3)
    index.append([])
    assert (len(index), index.match_length, index.match_end, index.copy(0, 3)) == (0, 0, -1, [])


@pytest.mark.parametrize("max_match", [5, 50])
@pytest.mark.parametrize("text", TEXTS)
def test_B118_operations_do_not_grow_with_the_context(counted_lines: Any, text: str, max_match: int) -> None:
    """Indexing costs a constant number of operations a token on average, finding the match a constant number."""
    num_tokens = 5000
    tokens = TEXTS[text](num_tokens)
    index = SequenceIndex(max_match)
    with counted_lines() as building:
        index.append(tokens)
    assert building.lines <= 100 * num_tokens
    with counted_lines() as finding:
        index.copy(index.match_end + 1, 5)
        assert index.match_length <= max_match
    assert finding.lines <= 10


def test_B118_operations_of_a_step_at_1000_and_50000_tokens(counted_lines: Any) -> None:
    def most_operations_in_a_step(num_tokens: int) -> int:
        tokens = TEXTS["random300"](num_tokens + 200)
        index = SequenceIndex(50)
        index.append(tokens[:num_tokens])
        most = 0
        for token in tokens[num_tokens:]:
            with counted_lines() as step:
                index.append([token])
                index.copy(index.match_end + 1, 5)
            most = max(most, step.lines)
        return most

    assert most_operations_in_a_step(NUM_TOKENS) <= most_operations_in_a_step(1000) + 100


@pytest.mark.parametrize("max_match", [3, 50, 20_000])
def test_capped_match_in_periodic_text_takes_no_walk(counted_lines: Any, max_match: int) -> None:
    """The uncapped match is as long as the text; walking from it down to the cap would take one step a token."""
    index = SequenceIndex(max_match)
    index.append([7] * NUM_TOKENS)
    with counted_lines() as step:
        index.append([7])
    assert step.lines <= 60
    assert (index.match_length, index.match_end) == (max_match, max_match - 1)


@pytest.mark.parametrize("text", TEXTS)
def test_at_most_300_bytes_a_token(text: str) -> None:
    tokens = TEXTS[text](NUM_TOKENS)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        index = SequenceIndex(5)
        index.append(tokens)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == len(tokens)
    assert (after - before) / len(tokens) <= 300
