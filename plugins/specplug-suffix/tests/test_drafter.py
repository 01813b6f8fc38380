from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specplug_suffix.acceptance import FIRST_RATES
from specplug_suffix.drafter import DraftRules, RequestText, SuffixDrafter
from specplug_suffix.lengths import DraftLengths
from specplug_suffix.shared import SharedIndex

from specplug.proposers import Load

texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=30))


def drafter(
    *, k: int = 8, factor: float = 2.0, max_tokens: int = 10_000, max_requests: int = 1000, depth: int | None = None,
    counts: bool = False, **rules: Any,
) -> SuffixDrafter:  # fmt: skip
    lengths = DraftLengths(max_draft=k, factor=factor, max_depth=depth)
    shared = SharedIndex(max_tokens=max_tokens, max_requests=max_requests, counts=counts)
    return SuffixDrafter(DraftRules(lengths, k, **rules), shared)


def begin(made: SuffixDrafter, prompt: list[int], salt: str | None = None) -> RequestText:
    text = made.start(len(prompt), salt)
    made.append(text, prompt)
    return text


def run(made: SuffixDrafter, prompt: list[int], output: list[int], salt: str | None = None) -> None:
    text = begin(made, prompt, salt)
    made.append(text, output)
    made.finish(text)


def replay(made: SuffixDrafter, prompt: list[int], output: list[int], k: int = 8) -> list[list[int]]:
    """The drafts on the way to a known output; ends the request."""
    text = begin(made, prompt)
    made.append(text, output[:1])
    drafts, at = [], 1
    while at < len(output):
        draft = made.propose(text, k)
        num_accepted = next((i for i, token in enumerate(draft) if output[at + i : at + i + 1] != [token]), len(draft))
        drafts.append(draft)
        made.append(text, output[at : at + num_accepted + 1])
        at += num_accepted + 1
    made.finish(text)
    return drafts


@settings(max_examples=500, deadline=None)
@given(outputs=st.lists(texts, max_size=5), prompt=texts, output=texts)
def test_longest_match_over_own_text_and_finished_outputs(
    outputs: list[list[int]], prompt: list[int], output: list[int]
) -> None:
    made = drafter(k=100, factor=100.0)
    for each in outputs:
        run(made, [7, 7, 7], each)
    text = begin(made, prompt)
    made.append(text, output)
    draft = made.propose(text, 100)
    own = prompt + output

    def longest(document: list[int], ends: range) -> int:
        return max(
            (
                size
                for end in ends
                for size in range(1, end + 1)
                if document[end - size : end] == own[len(own) - size :]
            ),
            default=0,
        )

    matched = [longest(own, range(1, len(own)))] + [longest(each, range(1, len(each))) for each in outputs]
    assert bool(draft) == (max(matched) > 0)
    if draft and matched[0] < max(matched):
        size = max(matched)
        sources = [each for each, found in zip(outputs, matched[1:], strict=True) if found == size]
        assert text.origin == "shared"
        assert any(
            each[end - size : end] == own[len(own) - size :] and each[end:] == draft
            for each in sources
            for end in range(size, len(each))
        )
    elif draft:
        assert text.origin == "local"


def test_B119_oldest_requests_go_first() -> None:
    made = drafter(max_requests=2, counts=True, min_probability=1.0)
    for output in ([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 6]):
        run(made, [9], output)
        assert made.shared.num_requests <= 2
    text = begin(made, [9, 1, 2])
    assert made.propose(text, 4) == [5, 6], "with a probability of 1"
    kept = [document.tolist() for _, segment in made.shared.kept() for document in segment.documents]
    assert kept == [[1, 2, 5, 6]] * 2


@settings(max_examples=500, deadline=None)
@given(outputs=st.lists(texts, max_size=5), prompt=texts, output=texts, piece=st.integers(1, 7))
def test_drafts_do_not_depend_on_the_pieces_in_which_a_text_comes(
    outputs: list[list[int]], prompt: list[int], output: list[int], piece: int
) -> None:
    made = drafter(k=100, factor=100.0, shares_running=False)
    for each in outputs:
        run(made, [7, 7, 7], each)
    text, at_once = begin(made, prompt), begin(made, prompt)
    for start in range(0, len(output), piece):
        made.append(text, output[start : start + piece])
    made.append(at_once, output)
    assert made.propose(text, 100) == made.propose(at_once, 100)


def test_least_probability_counts_what_followed() -> None:
    def draft(least: float) -> list[int]:
        made = drafter(counts=True, min_probability=least)
        for output in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]):
            run(made, [9], output)
        return made.propose(begin(made, [9, 1, 2]), 4)

    assert draft(0.3) == [6, 7], "a third of what followed 1, 2"
    assert draft(0.4) == []


@pytest.mark.parametrize("limit", [0, -1, -100])
def test_B121_no_draft_under_a_limit_of_0_or_less(limit: int) -> None:
    made = drafter()
    text = begin(made, [1, 2, 1, 2, 1])
    assert made.propose(text, limit) == []
    assert made.propose(text, 2) == [2, 1]


def test_B121_drafts_are_bounded_by_k_without_a_limit() -> None:
    made = drafter(k=3, factor=10.0)
    assert len(made.propose(begin(made, [1, 2, 3, 4, 5, 6, 7] * 2), 1000)) == 3


def test_B124_interleaved_requests_draft_like_uninterrupted_ones() -> None:
    chance = random.Random(1)
    prompts = [chance.choices(range(4), k=20) for _ in range(2)]
    outputs = [chance.choices(range(4), k=60) for _ in range(2)]

    def steps(made: SuffixDrafter, number: int) -> Any:
        text = begin(made, prompts[number], f"salt {number}")
        for token in outputs[number]:
            made.append(text, [token])
            yield made.propose(text, 8)
        made.finish(text)

    apart = drafter()
    expected = [list(steps(apart, number)) for number in range(2)]
    made = drafter()
    interleaved = list(zip(steps(made, 0), steps(made, 1), strict=True))
    assert [list(column) for column in zip(*interleaved, strict=True)] == expected
    assert any(any(draft) for draft in expected[0])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_live_outputs_are_shared_in_pieces(data: st.DataObject) -> None:
    made = drafter(shares_running=data.draw(st.booleans()))
    writer = begin(made, [1])
    output = list(range(100, 140))
    for start in range(0, 40, 5):
        made.append(writer, output[start : start + 5])
    reader = begin(made, [100, 101])
    assert made.propose(reader, 4) == ([102, 103, 104, 105] if made.rules.shares_running else [])
    made.finish(writer)
    late = begin(made, [138])
    assert made.propose(late, 4) == [139]


def test_prompts_are_not_shared() -> None:
    made = drafter()
    run(made, [1, 2, 3, 4, 5], [8, 9])
    assert made.propose(begin(made, [2, 3]), 4) == []
    assert made.propose(begin(made, [8]), 4) == [9]


@pytest.mark.parametrize("max_tokens", [20, 64, 10_000])
def test_pointers_stay_valid_while_segments_come_and_go(max_tokens: int) -> None:
    """Many requests side by side under a small bound: drafts are always text that followed in one document."""
    chance = random.Random(2)
    made = drafter(max_tokens=max_tokens, k=4)
    base = chance.choices(range(50), k=40)
    written: list[list[int]] = []
    active: list[tuple[RequestText, list[int]]] = []
    for step in range(600):
        if step % 7 == 0:
            written.append(base[:2])
            text = begin(made, base[:2])
            active.append((text, written[-1]))
        for text, ids in list(active):
            source = base if chance.random() < 0.9 else chance.choices(range(50), k=40)
            new = source[len(ids) : len(ids) + chance.randint(1, 3)]
            if not new:
                made.finish(text)
                active.remove((text, ids))
                continue
            made.append(text, new)
            ids.extend(new)
            draft = made.propose(text, 4)
            if text.origin == "shared" and draft:
                joined = [ids[-1], *draft]
                assert any(each[at : at + len(joined)] == joined for each in written for at in range(len(each)))
            assert made.shared.num_tokens <= max_tokens


def test_B68_equal_calls_give_equal_drafts() -> None:
    chance = random.Random(3)
    requests = [(chance.choices(range(3), k=10), chance.choices(range(3), k=50)) for _ in range(20)]

    def drafts() -> list[list[list[int]]]:
        made = drafter(max_tokens=200)
        return [replay(made, prompt, output) for prompt, output in requests]

    first = drafts()
    assert all(drafts() == first for _ in range(5))
    assert any(any(map(len, each)) for each in first)


def test_all_drafts_of_a_step_are_bounded_together() -> None:
    made = drafter(k=8, step_tokens=10)
    long = begin(made, [1, 2, 3, 4, 5, 6, 7, 8] * 2)
    short = [begin(made, [20 + number, 9, 9, 20 + number]) for number in range(3)]
    alone = [len(draft) for draft in made.propose_all([long], [8])]
    together = [len(draft) for draft in made.propose_all([long, *short], [8] * 4)]
    assert alone == [8]
    assert together == [5, 1, 1, 1], "8, 2, 2, 2 in proportion"


def loaded(made: SuffixDrafter, prompt: list[int], output: list[int], num_rows: int) -> list[int]:
    """Draft lengths while a request among ``num_rows`` equal ones writes its output token by token."""
    load = Load(num_rows)
    texts = [begin(made, prompt) for _ in range(num_rows)]
    lengths = []
    for token in output:
        lengths.append(len(made.propose_all(texts, [8] * num_rows, load)[0]))
        for text in texts:
            made.append(text, [token])
    return lengths


def test_free_form_text_makes_it_stand_down_and_hits_bring_it_back() -> None:
    chance = random.Random(4)
    noise = [token for _ in range(300) for token in (7, 1000 + chance.randrange(10**6))]
    made = drafter(k=8, max_tokens=0)
    lengths = loaded(made, [7, 1, 7, 2], noise, num_rows=1)
    assert sum(lengths[:10]) > 0
    assert sum(lengths[-50:]) == 0
    assert loaded(made, [7, 1, 7, 2], list(range(30)) * 4, num_rows=1)[-1] == 8
    always = replay(drafter(k=8, max_tokens=0), [7, 1, 7, 2], noise)
    assert sum(map(len, always[-50:])) > 0


def test_drafts_are_shorter_the_more_requests_share_the_step() -> None:
    prompt, output = [1, 2, 3, 4, 9, 1, 2, 3, 4, 8] * 3, [1, 2, 3, 4, 7, 1, 2, 3, 4, 6] * 8
    totals = [sum(loaded(drafter(k=8, max_tokens=0), prompt, output, num_rows)) for num_rows in (1, 8, 64)]
    assert totals[0] > totals[1] > totals[2]


def test_a_draft_that_was_only_tried_in_part_is_no_miss() -> None:
    made = drafter(k=8)
    text = begin(made, list(range(30)) * 2)
    for token in range(30):
        assert made.propose(text, 8)[0] == token
        made.append(text, [token])
    rows = made.acceptance.rows()
    assert sum(row.num_misses for row in rows) == 0
    assert sum(row.num_draft_tokens for row in rows) == sum(row.num_accepted_tokens for row in rows) == 29


def test_longer_matches_are_trusted_more_until_drafts_have_shown_how_they_do() -> None:
    made = drafter(k=32)
    text = begin(made, [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2)
    made.propose(text, 8)
    assert made.acceptance_rate(text) == FIRST_RATES[3]
    made.append(text, [3])
    made.propose(text, 8)
    assert made.acceptance_rate(text) == FIRST_RATES[0]
    for number in range(20):
        made.append(text, [100 + number, 3])
        made.propose(text, 8)
    assert made.acceptance_rate(text) < FIRST_RATES[0] / 4


def test_acceptance_by_origin_and_match_length() -> None:
    made = drafter(k=4)
    replay(made, [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 77, 78], k=4)
    replay(made, [50], [77, 78, 79, 80])
    rows = {(row.origin, row.shortest_match, row.longest_match): row for row in made.acceptance.rows()}
    assert set(rows) == {("local", 1, 1), ("local", 4, 7), ("shared", 1, 1)}
    assert rows["local", 1, 1].num_accepted_tokens == 2
    assert rows["local", 4, 7].num_misses == 1
    text = begin(made, [1, 2, 3, 1])
    assert made.expected_accepted(text) == 0.0
    draft = made.propose(text, 4)
    rate = made.acceptance_rate(text)
    assert 0 < rate < 1
    assert made.expected_accepted(text) == pytest.approx(sum(rate ** (i + 1) for i in range(len(draft))))


@pytest.mark.parametrize("bad", [[1, -1], [2**31], [1.5], [None]])
def test_invalid_ids_change_nothing(bad: list[Any]) -> None:
    made, same = drafter(), drafter()
    texts = [begin(each, [1, 2, 3, 1, 2]) for each in (made, same)]
    for prompt in ([5, 6], []):
        broken = made.start(len(prompt))
        with pytest.raises((ValueError, OverflowError, TypeError)):
            made.append(broken, [*prompt, *bad])
        assert len(broken) == 0
    with pytest.raises((ValueError, OverflowError, TypeError)):
        made.append(texts[0], bad)
    for each, text in zip((made, same), texts, strict=True):
        each.append(text, [3])
    assert made.propose(texts[0], 8) == same.propose(texts[1], 8) == [1, 2, 3, 1, 2, 3]
    assert made.shared.num_tokens == 0


def workload(seed: int, num_requests: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, and outputs that copy them with edits; every fourth output is a variant of the one before."""
    chance = random.Random(seed)
    words = [chance.randrange(5000) for _ in range(400)]
    requests: list[tuple[list[int], list[int]]] = []
    for number in range(num_requests):
        prompt = [words[min(399, int(chance.expovariate(0.02)))] for _ in range(150)]
        output = list(requests[-1][1] if number % 4 == 3 else prompt)
        for _ in range(8):
            at = chance.randrange(len(output))
            output[at : at + chance.randrange(3)] = [words[chance.randrange(400)] for _ in range(chance.randrange(3))]
        requests.append((prompt, output))
    return requests


@pytest.mark.parametrize(
    ("rules", "num_steps"),
    [
        ({"k": 32}, 1010),
        ({"k": 32, "factor": 1.0, "counts_carried": False}, 1390),
        ({"k": 24, "factor": 1.0, "depth": 24, "counts": True, "min_probability": 0.1, "counts_carried": False}, 1437),
        ({"k": 32, "max_requests": 0}, 2164),
    ],
)
def test_golden_step_counts(rules: dict[str, Any], num_steps: int) -> None:
    """Counted, not timed: fewer steps are better; a change must be meant."""
    made = drafter(**rules)
    steps = [len(replay(made, prompt, output, k=32)) for prompt, output in workload(5, 40)]
    assert sum(steps) == num_steps
