from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from specplug.errors import SpecplugError
from specplug.hooks import SessionHooks
from specplug.methods import PluginConfig, PluginContext
from specplug.proposers import ngram
from specplug.proposers.ngram import NgramOptions, NgramProposer
from specplug.types import Draft, Session


def make(
    shortest: int | None, longest: int | None, k: int, *, max_model_len: int = 10**6, backoff: bool = False
) -> NgramProposer:
    keys: dict[str, Any] = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest, "ngram_backoff": backoff}
    return NgramProposer(NgramOptions(**keys), num_speculative_tokens=k, max_model_len=max_model_len)


def rows_of(draft: Draft) -> list[list[int]]:
    flat, rows = draft.draft_token_ids.tolist(), []
    for count in draft.num_draft_tokens:
        rows.append(flat[:count])
        flat = flat[count:]
    return rows


@pytest.fixture(scope="session")
def look_up(make_batch: Any) -> Any:
    def draft_of(text: list[int], shortest: int, longest: int, k: int, max_model_len: int = 10**6) -> list[int]:
        proposer = make(shortest, longest, k, max_model_len=max_model_len)
        return rows_of(proposer.propose(make_batch([text]), [k]))[0]

    return draft_of


# --- vLLM's V1 contract -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shortest", "longest", "k", "draft"),
    [
        ([1, 2, 3, 4, 1, 2, 3, 5, 6], 2, 2, 2, []),
        ([1, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3], 2, 2, 2, [4, 1]),
        ([1, 2, 3, 4, 1, 2, 3], 1, 1, 3, [4, 1, 2]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 1, 1, 2, [6, 2]),
        ([1, 2, 3, 4, 5], 2, 2, 2, []),
        ([1, 2, 3, 4, 1, 2, 3], 4, 4, 2, []),
        ([1, 2, 3, 4, 1, 2, 3], 3, 4, 2, [4, 1]),
        ([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], 3, 4, 2, [1, 2]),
        ([3, 4, 5, 2, 3, 4, 1, 2, 3, 4], 2, 4, 2, [1, 2]),
        ([1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3], 3, 3, 2, [100, 1]),
    ],
)
def test_values_of_vllm(look_up: Any, text: list[int], shortest: int, longest: int, k: int, draft: list[int]) -> None:
    assert look_up(text, shortest, longest, k) == draft


def test_a_batch_of_vllm(make_batch: Any) -> None:
    draft = make(2, 2, 2).propose(make_batch([[1, 2, 3, 1, 2], [4, 5, 6]]), [2, 2])
    assert rows_of(draft) == [[3, 1], []]


def test_a_batch_of_vllm_with_a_row_inside_its_prompt(make_batch: Any) -> None:
    batch = make_batch([[1, 2, 3, 1, 2], [4, 5, 6, 4, 5], [7, 8, 9, 7, 8]], in_prompt=[1])
    assert rows_of(make(2, 2, 2).propose(batch, [2, 2, 2])) == [[3, 1], [], [9, 7]]


@pytest.mark.parametrize(
    ("text", "shortest", "longest", "k", "draft"),
    [
        ([7, 3, 5, 8, 3, 5], 2, 3, 4, [8, 3, 5]),
        ([5, 6, 7, 9, 5, 6, 8, 9, 5, 6], 2, 2, 2, [7, 9]),
        ([4, 4, 4], 1, 2, 3, [4]),
        ([7], 2, 2, 3, []),
        ([], 2, 2, 3, []),
    ],
)
def test_B117_ties_and_overlaps(
    look_up: Any, text: list[int], shortest: int, longest: int, k: int, draft: list[int]
) -> None:
    assert look_up(text, shortest, longest, k) == draft


def test_B118_longest_match_beats_recency_and_earliness(look_up: Any) -> None:
    assert look_up([1, 2, 9, 3, 1, 2, 7, 3, 1, 2], 1, 3, 2) == [7, 3]


@pytest.mark.parametrize(("max_model_len", "draft"), [(7, [1]), (6, [])])
def test_B118_drafts_end_with_the_context_window(look_up: Any, max_model_len: int, draft: list[int]) -> None:
    assert look_up([1, 2, 3, 1, 2, 3], 2, 3, 4, max_model_len) == draft


def test_limits_cut_rows(make_batch: Any) -> None:
    batch = make_batch([[1, 2, 3, 1, 2]] * 3)
    assert rows_of(make(2, 2, 4).propose(batch, [1, 0, 4])) == [[3], [], [3, 1, 2]]


small_texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=50))


@settings(max_examples=500, deadline=None)
@given(
    text=small_texts, shortest=st.integers(1, 4), extra=st.integers(0, 4), k=st.integers(1, 6), start=st.integers(0, 50)
)
def test_like_a_search_through_the_whole_text(
    make_batch: Any, text: list[int], shortest: int, extra: int, k: int, start: int
) -> None:
    def searched(tokens: list[int]) -> list[int]:
        for length in range(min(shortest + extra, len(tokens) - 1), shortest - 1, -1):
            for end in range(length, len(tokens)):
                if tokens[end - length : end] == tokens[len(tokens) - length :]:
                    return tokens[end : end + k]
        return []

    proposer = make(shortest, shortest + extra, k)
    for num_tokens in range(start, len(text) + 1):
        draft = proposer.propose(make_batch([text[:num_tokens]]), [k])
        assert rows_of(draft)[0] == searched(text[:num_tokens])


# --- rows of the catalogue ----------------------------------------------------------------------------------


def test_B05_a_missing_bound_is_the_other(look_up: Any) -> None:
    resolved = NgramOptions(**{"prompt_lookup_max": 3})
    assert (resolved.prompt_lookup_min, resolved.prompt_lookup_max) == (3, 3)
    assert look_up([7, 1, 7], resolved.prompt_lookup_min, resolved.prompt_lookup_max, 2) == []
    assert look_up([7, 1, 7], 1, 3, 2) == [1, 7]


def test_B59_draft_without_an_eos(look_up: Any) -> None:
    assert look_up([21, 22, 23, 24, 22, 23], 2, 2, 3) == [24, 22, 23]


def test_B68_one_and_eight_threads_draft_the_same(make_batch: Any) -> None:
    source = random.Random(0)
    contexts = [source.choices(range(3), k=60) for _ in range(20)]

    def drafts(_: int) -> list[list[int]]:
        return rows_of(make(1, 5, 4).propose(make_batch(contexts), [4] * len(contexts)))

    expected = drafts(0)
    assert any(expected)
    with ThreadPoolExecutor(max_workers=8) as pool:
        assert all(found == expected for found in pool.map(drafts, range(200)))


def test_B91_nothing_is_drafted_from_an_unfinished_prompt(make_batch: Any) -> None:
    proposer = make(1, 2, 3)
    prompt = [1, 2, 1, 2, 1, 2, 1, 2, 1]
    inside = make_batch([prompt], in_prompt=[0])
    proposer.specplug_start_request(inside.requests[0])
    for _ in range(2):
        assert rows_of(proposer.propose(inside, [3])) == [[]]
        proposer.specplug_advance(inside)
    assert rows_of(proposer.propose(make_batch([prompt]), [3])) == [[2, 1, 2]]


def test_B116_skipped_rows_do_not_shift_drafts(make_batch: Any) -> None:
    batch = make_batch([[1, 2, 1, 2], [1, 2, 1, 2], [8, 9, 8, 9], [8, 9, 8, 9, 8]], in_prompt=[0, 2])
    draft = make(2, 2, 2).propose(batch, [0, 2, 0, 2])
    assert rows_of(draft) == [[], [1, 2], [], [9, 8]]


# --- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "bounds"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_max": 2}, (2, 2)),
        ({"prompt_lookup_min": None, "prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": None, "prompt_lookup_max": None}, (5, 5)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_bounds(keys: dict[str, Any], bounds: tuple[int, int]) -> None:
    resolved = NgramOptions(**keys)
    assert (resolved.prompt_lookup_min, resolved.prompt_lookup_max) == bounds
    assert resolved.ngram_backoff


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min=5 is above prompt_lookup_max=3"),
        ({"prompt_lookup_min": 0}, "greater than or equal to 1"),
        ({"prompt_lookup_max": 2.5}, "valid integer"),
        ({"prompt_lookup_max": True}, "valid integer"),
        ({"ngram_backoff": "maybe"}, "valid boolean"),
        ({"ngram_back_off": True}, "Extra inputs"),
    ],
)
def test_wrong_options(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        NgramOptions(**keys)


# --- life of a request --------------------------------------------------------------------------------------


def test_state_goes_with_the_request(make_batch: Any) -> None:
    proposer = make(1, 2, 2)
    batch = make_batch([[1, 2, 1]])
    proposer.specplug_start_request(batch.requests[0])
    assert rows_of(proposer.propose(batch, [2])) == [[2, 1]]
    proposer.specplug_finish_request(batch.requests[0])
    proposer.specplug_advance(batch)
    assert proposer._states == {}
    again = make_batch([[5, 6, 7, 5]])
    proposer.specplug_start_request(again.requests[0])
    assert rows_of(proposer.propose(again, [2])) == [[6, 7]]


def test_rows_may_change_places(make_batch: Any) -> None:
    proposer = make(1, 2, 2)
    one, two = [1, 2, 1], [5, 6, 7, 5]
    assert rows_of(proposer.propose(make_batch([one, two], ids=["a", "b"]), [2, 2])) == [[2, 1], [6, 7]]
    batch = make_batch([[*two, 6], [*one, 2]], ids=["b", "a"])
    assert rows_of(proposer.propose(batch, [2, 2])) == [[7, 5], [1, 2]]


def test_a_long_prompt_is_indexed_in_pieces(make_batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_TOKENS_PER_STEP", 4)
    proposer = make(1, 2, 2)
    batch = make_batch([[1, 2, 3, 4, 5, 6, 7, 8, 9, 1]])
    answers = [rows_of(proposer.propose(batch, [2]))[0] for _ in range(4)]
    assert answers == [[], [], [2, 3], [2, 3]]


def test_advance_indexes_what_was_computed_only(make_batch: Any) -> None:
    proposer = make(1, 2, 2)
    batch = make_batch([[1, 2, 3, 1]])
    proposer.specplug_start_request(batch.requests[0])
    proposer.specplug_advance(batch)
    assert len(proposer._states["r0"].index) == 3


def test_backoff_drafts_only_what_has_proved_itself_in_a_large_batch(make_batch: Any) -> None:
    proposer, off = make(1, 2, 4, backoff=True), make(1, 2, 4)
    text = [1, 2, 3, 4, 5, 1, 9, 1, 8, 1, 7, 1, 6, 1]

    def num_drafted(proposer: NgramProposer, text: list[int]) -> int:
        (count,) = set(proposer.propose(make_batch([text] * 8), [4] * 8).num_draft_tokens)
        return count

    stops = range(6, len(text) + 1, 2)
    assert [num_drafted(proposer, text[:stop]) for stop in stops] == [0] * 5
    repeated = [2, 3, 4, 5, 1] * 6
    came_back = [num_drafted(proposer, text + repeated[:stop]) for stop in range(1, len(repeated))]
    assert came_back[0] == 0
    assert max(came_back) == 4
    assert all(num_drafted(off, text[:stop]) == 4 for stop in stops)


def test_backoff_drafts_more_the_fewer_requests_there_are(make_batch: Any) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    lengths = {
        num_rows: make(1, 1, 8, backoff=True).propose(make_batch([text] * num_rows), [8] * num_rows).num_draft_tokens[0]
        for num_rows in (1, 4, 8, 32)
    }
    assert lengths == {1: 8, 4: 3, 8: 0, 32: 0}


def test_one_weak_draft_in_a_large_batch_is_not_worth_a_step(make_batch: Any) -> None:
    texts = [[1, 2, 3, 1], *([10 + row, 20 + row] for row in range(5))]
    assert make(1, 1, 4, backoff=True).propose(make_batch(texts), [4] * 6).num_slots == 0
    assert make(1, 1, 4).propose(make_batch(texts), [4] * 6).num_slots == 3


# --- in a session -------------------------------------------------------------------------------------------


def test_registration_and_factory(make_batch: Any) -> None:
    (spec,) = ngram.specplug_register()
    assert (spec.name, spec.kind, spec.options) == ("ngram", "proposer", NgramOptions)
    session = Session(vocab_size=10, max_num_seqs=2, max_model_len=7, num_speculative_tokens=4)

    def refuse(*_: Any) -> Any:
        raise SpecplugError("not used")

    context = PluginContext(session, SimpleNamespace(model=None, tokenizer=None), refuse, refuse)
    options = NgramOptions(**{"prompt_lookup_min": 2, "prompt_lookup_max": 3})
    instance = spec.factory(PluginConfig("ngram", 4, options), context)
    hooks = SessionHooks([("ngram", instance)], vocab_size=10, strict=True)
    batch = make_batch([[1, 2, 3, 1, 2, 3]])
    hooks.start_session(session)
    hooks.start_request(batch.requests[0])
    draft = hooks.propose(batch, [4])
    assert draft is not None
    assert rows_of(draft) == [[1]]
    assert [span.source for span in draft.sources] == ["ngram"]
    hooks.finish_request(batch.requests[0], "stop")


@pytest.mark.parametrize("backoff", [False, True])
def test_B118_a_proposal_at_50000_tokens_takes_as_many_operations_as_at_500(
    make_batch: Any, counted_lines: Any, backoff: bool
) -> None:
    text = random.Random(1).choices(range(50), k=50_100)

    def most_operations(num_tokens: int) -> int:
        proposer = make(1, 50, 5, backoff=backoff)
        for indexed in range(0, num_tokens + 1, ngram.MAX_TOKENS_PER_STEP):
            proposer.propose(make_batch([text[: indexed + ngram.MAX_TOKENS_PER_STEP][:num_tokens]]), [5])
        most = 0
        for length in range(num_tokens, num_tokens + 50):
            batch = make_batch([text[:length]])
            with counted_lines() as step:
                proposer.propose(batch, [5])
            most = max(most, step.lines)
        return most

    at_500, at_50000 = most_operations(500), most_operations(50_000)
    assert at_50000 <= at_500 + 100
    assert at_50000 < 500
