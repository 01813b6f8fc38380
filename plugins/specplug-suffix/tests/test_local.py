from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specplug_suffix.local import MAX_WAITING, REACH, LocalIndex

texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=60))


def occurrences(text: list[int]) -> tuple[int, list[int]]:
    """Length of the longest ending that occurred before, and where a token followed it; by trying all."""
    for length in range(len(text) - 1, 0, -1):
        ending = text[len(text) - length :]
        starts = [end for end in range(length, len(text)) if text[end - length : end] == ending]
        if starts:
            return length, starts
    return 0, []


def check(index: LocalIndex) -> None:
    """The match is the longest, at a place where it occurred."""
    longest, starts = occurrences(index.token_ids.tolist())
    length, start, _ = index.match()
    assert length == index.match_length == longest
    assert start in (starts or [0])


@settings(max_examples=2000, deadline=None)
@given(text=texts, chunk=st.integers(1, 7))
def test_longest_match_newest_occurrence(text: list[int], chunk: int) -> None:
    index = LocalIndex()
    for start in range(0, len(text), chunk):
        index.append(text[start : start + chunk])
        length, starts = occurrences(text[: start + chunk])
        found, at, _ = index.match()
        assert found == length
        assert not starts or at == starts[-1]


@settings(max_examples=2000, deadline=None)
@given(prompt=texts, output=texts, chunk=st.integers(1, 7))
def test_output_gets_the_longest_match_however_it_comes(prompt: list[int], output: list[int], chunk: int) -> None:
    one_by_one, in_chunks = LocalIndex(), LocalIndex()
    one_by_one.append(prompt)
    in_chunks.append(prompt)
    for start in range(0, len(output), chunk):
        in_chunks.append_output(output[start : start + chunk])
        for token_id in output[start : start + chunk]:
            one_by_one.append_output([token_id])
            check(one_by_one)
        assert in_chunks.match() == one_by_one.match()
    assert in_chunks.token_ids.tolist() == prompt + output


def follow(prompt: list[int], output: list[int]) -> LocalIndex:
    index = LocalIndex()
    index.append(prompt)
    index.append_output(output)
    return index


def test_a_copy_goes_on_after_a_replaced_token() -> None:
    prompt = [*range(100, 130), 7, *range(200, 210), 7, 300]
    output = [*range(100, 130), 8, 200]
    length, start, carried = follow(prompt, output).match()
    assert (length, start) == (1, 32), "the 200 of the copied stretch"
    assert carried == 30 // 4
    length, start, carried = follow(prompt, [*output, 201]).match()
    assert (length, start, carried) == (2, 33, 7)


def test_a_copy_goes_on_where_it_was_and_not_where_the_token_was_newest() -> None:
    stretch = [*range(100, 120), 5, *range(120, 130)]
    prompt = [*stretch, 5, 99]
    _, start, _ = follow(prompt, [*range(100, 120), 77, 5]).match()
    assert prompt[start] == 120
    alone = LocalIndex()
    alone.append([*prompt, *range(100, 120), 77, 5])
    assert prompt[alone.match()[1]] == 99, "without following copies it is the newest"


@pytest.mark.parametrize(("num_between", "goes_on"), [(8, True), (9, False)])
def test_a_break_is_waited_out_for_some_tokens(num_between: int, goes_on: bool) -> None:
    prompt = [*range(100, 140), 50, 60]
    output = [*range(100, 120), *range(1000, 1000 + num_between), 120, 121]
    length, start, carried = follow(prompt, output).match()
    assert (length, start) == (2, 22)
    assert (carried > 0) == goes_on


def test_a_copy_goes_on_within_reach_only() -> None:
    far = list(range(200, 200 + REACH))
    prompt = [*range(100, 120), *far, 7, 8]
    assert follow(prompt, [*range(100, 120), 7]).match()[2] == 0
    assert follow(prompt, [*range(100, 120), far[-1]]).match()[2] > 0


def test_a_period_goes_on_past_the_end() -> None:
    index = follow([9], [1, 2, 3, 1, 2])
    length, start, _ = index.match()
    assert length == 2
    assert index.copy(start, 8).tolist() == [3, 1, 2, 3, 1, 2, 3, 1]
    constant = follow([7], [7])
    assert constant.copy(constant.match()[1], 5).tolist() == [7] * 5


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("num_copied", [1, MAX_WAITING - 1, MAX_WAITING, 100])
def test_a_copy_is_indexed_later(num_copied: int, counts: bool) -> None:
    prompt = list(range(1000, 1200))
    index, at_once = LocalIndex(counts=counts), LocalIndex(counts=counts)
    index.append(prompt)
    at_once.append([*prompt, *prompt[:num_copied]])
    for token_id in prompt[:num_copied]:
        index.append_output([token_id])
    assert index.match() == (num_copied, num_copied, 0)
    assert index.automaton.lengths[index.match_state] == num_copied
    assert index.match_state == at_once.match_state
    assert index.automaton.num_states == at_once.automaton.num_states


def test_empty_and_unmatched() -> None:
    index = LocalIndex()
    assert (len(index), index.match()) == (0, (0, 0, 0))
    assert follow([], [1, 2]).match()[0] == 0


def test_smallest_and_largest_ids() -> None:
    index = follow([0, 2**31 - 1], [0])
    length, start, _ = index.match()
    assert (length, index.copy(start, 2).tolist()) == (1, [2**31 - 1, 0])


@pytest.mark.parametrize("bad", [[1, -1], [1, 2**31], [1, 2.0], [1, None], [1, "2"]])
@pytest.mark.parametrize("method", ["append", "append_output"])
def test_invalid_ids_change_nothing(bad: list[Any], method: str) -> None:
    index = follow([1, 2], [1])
    before = index.match()
    with pytest.raises((ValueError, OverflowError, TypeError)):
        getattr(index, method)(bad)
    assert (index.match(), index.token_ids.tolist()) == (before, [1, 2, 1])
    index.append_output([2])
    assert index.match()[0] == 2


def test_random_texts_of_many_sizes() -> None:
    """Tens of thousands of positions against trying all."""
    chance = random.Random(0)
    for _ in range(400):
        text = chance.choices(range(chance.randint(1, 5)), k=60)
        split = chance.randint(0, 59)
        index = LocalIndex()
        index.append(text[:split])
        for position in range(split, 60):
            index.append_output(text[position : position + 1])
            check(index)
