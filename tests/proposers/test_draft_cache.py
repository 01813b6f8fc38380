"""What a draft's cache keeps when its context changes, through a space that re-expresses texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specplug.draft_space import DraftContext, IdentityDraftSpace
from specplug.models.runner import TargetRunner
from specplug.proposers.draft_cache import DraftCache, Reading
from specplug.sampling_params import SamplingParams
from specplug.testing.models import tiny_llama
from specplug.types import Request, TokenIds


def ids(values: Sequence[int]) -> TokenIds:
    return TokenIds(np.asarray(values, dtype=np.int32))


def request(name: str) -> Request:
    return Request(name, ids([1]), SamplingParams(), 0)


class Scripted(IdentityDraftSpace):
    """Answers given contexts, whatever the text."""

    def __init__(self, *contexts: tuple[list[int], int]) -> None:
        super().__init__(64)
        self.contexts = list(contexts)

    def context(self, request_id: str, token_ids: TokenIds) -> DraftContext:
        return DraftContext(*self.contexts.pop(0))


def runner(*, sliding_window: int | None = None, max_query_tokens: int = 8) -> TargetRunner:
    return TargetRunner(
        tiny_llama(sliding_window=sliding_window), max_num_seqs=3, max_model_len=64, max_query_tokens=max_query_tokens
    )


def fresh_logits(text: Sequence[int], *, sliding_window: int | None = None) -> torch.Tensor:
    model = tiny_llama(sliding_window=sliding_window)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0, -1]


def read(cache: DraftCache, name: str, text: Sequence[int] = (1,)) -> tuple[Reading, torch.Tensor]:
    reading = cache.open(request(name), ids(text))
    past = (reading.num_past, list(reading.token_ids))
    logits = cache.read([reading])
    return Reading(name, past[0], past[1]), logits[-1]


def test_a_context_that_changed_is_read_from_where_it_changed() -> None:
    space = Scripted(([1, 2, 3, 4, 5], 0), ([1, 2, 9, 8], 2), ([1, 2, 9, 8], 4), ([1, 2], 2), ([7], 0))
    cache = DraftCache(runner(), space)
    expected = [(0, [1, 2, 3, 4, 5]), (2, [9, 8]), (3, [8]), (1, [2]), (0, [7])]
    for past, new in expected:
        text = space.contexts[0][0]
        reading, logits = read(cache, "a")
        assert (reading.num_past, reading.token_ids) == (past, new)
        torch.testing.assert_close(logits, fresh_logits(text), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("context", "num_kept"),
    [
        ([1, 2, 3, 10, 11, 12, 50], 5),  # accepted whole: the last draft token was never fed
        ([1, 2, 3, 10, 40], 4),
        ([1, 2, 3, 40], 3),
        ([1, 2, 3, 10], 3),  # the newest token is read again even where the cache has it
        ([1, 2, 40], 2),
    ],
)
def test_accepted_draft_tokens_stay(context: list[int], num_kept: int) -> None:
    unchanged = 3 if context[2:3] == [3] else 2
    cache = DraftCache(runner(), Scripted(([1, 2, 3], 0), (context, unchanged)))
    read(cache, "a")
    drafted = torch.tensor([10, 11, 12])
    for token in drafted[:2]:
        cache.append(token[None], ["a"])
    cache.note_drafted(drafted, [("a", 0, 2)])
    assert cache.length("a") == 5
    reading, logits = read(cache, "a")
    assert (reading.num_past, reading.token_ids) == (num_kept, context[num_kept:])
    torch.testing.assert_close(logits, fresh_logits(context), atol=1e-4, rtol=1e-4)


def test_a_long_text_is_read_in_chunks_beside_a_short_one() -> None:
    cache = DraftCache(runner(max_query_tokens=8), IdentityDraftSpace(64))
    long, short = list(range(30)), [5, 6]
    readings = cache.in_order([cache.open(request("long"), ids(long)), cache.open(request("short"), ids(short))])
    logits = cache.read(readings)
    torch.testing.assert_close(logits[0], fresh_logits(long), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1], fresh_logits(short), atol=1e-4, rtol=1e-4)


def test_rows_move_when_a_request_leaves() -> None:
    cache = DraftCache(runner(), IdentityDraftSpace(64))
    for name, text in (("a", [1, 2]), ("b", [3, 4, 5]), ("c", [6])):
        read(cache, name, text)
    cache.forget("a")
    cache.forget("unknown")
    assert [name in cache for name in "abc"] == [False, True, True]
    _, logits = read(cache, "c", [6, 7])
    torch.testing.assert_close(logits, fresh_logits([6, 7]), atol=1e-4, rtol=1e-4)
    _, logits = read(cache, "a", [9])  # the same name anew
    torch.testing.assert_close(logits, fresh_logits([9]), atol=1e-4, rtol=1e-4)
    _, logits = read(cache, "b", [3, 4, 5, 1])
    torch.testing.assert_close(logits, fresh_logits([3, 4, 5, 1]), atol=1e-4, rtol=1e-4)


def test_a_window_that_lost_the_older_tokens_starts_over() -> None:
    """A space may change a context further back than a sliding-window cache can roll back."""
    first, second = list(range(40)), [*range(10), *range(50, 56)]
    cache = DraftCache(runner(sliding_window=8), Scripted((first, 0), (second, 10)))
    read(cache, "a")
    reading, logits = read(cache, "a")
    assert (reading.num_past, reading.token_ids) == (0, second)
    torch.testing.assert_close(logits, fresh_logits(second, sliding_window=8), atol=1e-4, rtol=1e-4)


def test_an_empty_context_has_nothing_to_read() -> None:
    cache = DraftCache(runner(), Scripted(([], 0)))
    assert list(cache.open(request("a"), ids([1])).token_ids) == []


# --- steps that were interrupted --------------------------------------------------------------------------------


def interrupted(draft: TargetRunner, at: int, run: Callable[[], object]) -> None:
    """Run it, with ctrl-C in the middle of the ``at``-th forward from now on."""
    left = at

    def stop(module: torch.nn.Module, args: Any, output: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt

    handle = draft.model.model.layers[0].register_forward_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        handle.remove()


@pytest.mark.parametrize("sliding_window", [None, 6])
@pytest.mark.parametrize(("at", "num_read"), [(1, 0), (2, 8), (4, 22)])
def test_an_interrupted_prompt_counts_as_far_as_it_was_read(sliding_window: int | None, at: int, num_read: int) -> None:
    draft = runner(sliding_window=sliding_window)
    cache = DraftCache(draft, IdentityDraftSpace(64))
    read(cache, "other", [4, 5])
    text = list(range(30))
    interrupted(draft, at, lambda: read(cache, "a", text))
    assert cache.length("a") == draft.cache.lengths[cache.row("a")] == num_read
    reading, logits = read(cache, "a", [*text, 40])
    assert reading.num_past == num_read
    torch.testing.assert_close(logits, fresh_logits([*text, 40], sliding_window=sliding_window), atol=1e-4, rtol=1e-4)
    _, logits = read(cache, "other", [4, 5, 6])
    torch.testing.assert_close(logits, fresh_logits([4, 5, 6], sliding_window=sliding_window), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("at", [1, 2])
def test_draft_tokens_fed_before_an_interruption_are_rolled_back(at: int) -> None:
    """Nobody told the cache of them: they must not pass for the text that came instead."""
    draft = runner()
    cache = DraftCache(draft, IdentityDraftSpace(64))
    read(cache, "a", [1, 2, 3])
    interrupted(draft, at, lambda: [cache.append(torch.tensor([token]), ["a"]) for token in (10, 11)])
    assert cache.length("a") == 3
    reading, logits = read(cache, "a", [1, 2, 3, 40, 41])
    assert (reading.num_past, draft.cache.lengths[0]) == (3, 5)
    torch.testing.assert_close(logits, fresh_logits([1, 2, 3, 40, 41]), atol=1e-4, rtol=1e-4)


def test_masks_leave_the_cache_with_the_next_reading() -> None:
    draft = runner()
    cache = DraftCache(draft, IdentityDraftSpace(64))
    reading = cache.open(request("a"), ids([1, 2, 3]))
    reading.token_ids, reading.num_logits, reading.num_masks = [*reading.token_ids, 63, 63], 3, 2
    assert len(cache.read([reading])) == 3
    assert (cache.length("a"), draft.cache.lengths) == (3, [5])
    reading, logits = read(cache, "a", [1, 2, 3, 63, 5])  # also where the text goes on as the masks did
    assert (reading.num_past, draft.cache.lengths) == (3, [5])
    torch.testing.assert_close(logits, fresh_logits([1, 2, 3, 63, 5]), atol=1e-4, rtol=1e-4)
