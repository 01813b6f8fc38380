from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specplug.errors import PluginFaultError
from specplug.hooks import SessionHooks
from specplug.proposers.vllm_shaped import VllmShapedProposer
from specplug.types import Draft

K = 3


class Scripted:
    """vLLM-shaped: writes down what it gets, answers with ``answer(num_rows)``."""

    def __init__(self, answer: Callable[[int], Any]) -> None:
        self.answer = answer
        self.sampled: list[list[list[int]]] = []
        self.contexts: list[list[list[int]]] = []
        self.shapes: set[tuple[Any, ...]] = set()

    def propose(self, sampled_token_ids: Any, num_tokens: Any, token_ids: Any, slot_mappings: Any = "missing") -> Any:
        self.sampled.append([list(new) for new in sampled_token_ids])
        rows = range(len(sampled_token_ids))
        self.contexts.append([token_ids[row, : num_tokens[row]].tolist() for row in rows])
        self.shapes.add((num_tokens.shape, num_tokens.dtype.name, token_ids.shape, token_ids.dtype.name, slot_mappings))
        assert torch.is_inference_mode_enabled()
        return self.answer(len(sampled_token_ids))


def adapter(answer: Callable[[int], Any]) -> tuple[VllmShapedProposer, Scripted]:
    scripted = Scripted(answer)
    adapted = VllmShapedProposer(
        scripted, name="pkg.Scripted", num_speculative_tokens=K, max_num_seqs=4, max_model_len=16
    )
    return adapted, scripted


def rows_of(draft: Draft) -> list[list[int]]:
    flat, rows = draft.draft_token_ids.tolist(), []
    for count in draft.num_draft_tokens:
        rows.append(flat[:count])
        flat = flat[count:]
    return rows


def no_drafts(num_rows: int) -> list[list[int]]:
    return [[]] * num_rows


# --- what the class gets ------------------------------------------------------------------------------------


def test_arrays_as_in_vllm(make_batch: Any) -> None:
    adapted, scripted = adapter(no_drafts)
    adapted.propose(make_batch([[1, 2, 3], [4, 5]]), [K, K])
    assert scripted.shapes == {((4,), "int32", (4, 16), "int32", None)}
    assert scripted.contexts == [[[1, 2, 3], [4, 5]]]
    assert scripted.sampled == [[[3], [5]]]


def test_sampled_tokens_are_those_since_the_last_call(make_batch: Any) -> None:
    adapted, scripted = adapter(no_drafts)
    for text in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]):
        adapted.propose(make_batch([text], prompt_lengths=[2]), [K])
    assert scripted.sampled == [[[3]], [[4, 5]], [[6]]]


def test_rows_move_and_requests_come_and_go(make_batch: Any) -> None:
    adapted, scripted = adapter(no_drafts)
    first = make_batch([[1, 2], [5, 6, 7]], ids=["a", "b"])
    for request in first.requests:
        adapted.specplug_start_request(request)
    adapted.propose(first, [K, K])
    adapted.propose(make_batch([[5, 6, 7, 8], [1, 2, 3]], ids=["b", "a"], prompt_lengths=[2, 1]), [K, K])
    for request in first.requests:
        adapted.specplug_finish_request(request)
    again = make_batch([[9, 9, 9, 9, 4]], ids=["b"])
    adapted.specplug_start_request(again.requests[0])
    adapted.propose(again, [K])
    assert scripted.contexts == [[[1, 2], [5, 6, 7]], [[5, 6, 7, 8], [1, 2, 3]], [[9, 9, 9, 9, 4]]]
    assert scripted.sampled == [[[2], [7]], [[8], [3]], [[4]]]
    adapted.specplug_finish_request(again.requests[0])
    assert adapted._num_seen == {}


# --- what comes back ----------------------------------------------------------------------------------------


def test_lists_are_cut_to_the_limits(make_batch: Any) -> None:
    adapted, _ = adapter(lambda num_rows: [[1, 2, 3], [4], []])
    assert rows_of(adapted.propose(make_batch([[0, 0]] * 3), [2, 3, 3])) == [[1, 2], [4], []]
    assert rows_of(adapted.propose(make_batch([[0, 0]] * 3), [0, 3, 3])) == [[], [4], []]


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (None, TypeError, r"pkg\.Scripted\.propose\(\) returned None"),
        ([[1], [2]], ValueError, r"pkg\.Scripted\.propose\(\) returned 2 rows for 3 requests"),
        (0.5, TypeError, "returned float; it must return one list"),
        ("abc", TypeError, "returned str;"),
        ([[1], [2.0], []], TypeError, r"returned 2\.0 \(float\) in row 1"),
        ([[1], [True], []], TypeError, r"returned True \(bool\) in row 1"),
        ([[1], None, []], TypeError, "returned None for row 1"),
        ([1, 2, 3], TypeError, "returned 1 for row 0"),
        (torch.zeros(3, 2), TypeError, r"returned 0\.0 \(float\) in row 0"),
        (torch.zeros(3, dtype=torch.int64), TypeError, "returned 0 for row 0"),
        (torch.zeros(2, 2, dtype=torch.int64), ValueError, "returned 2 rows for 3 requests"),
        (torch.tensor(3), TypeError, "returned int;"),
    ],
)
def test_B152_wrong_shapes_are_errors(make_batch: Any, answer: Any, error: type[Exception], text: str) -> None:
    adapted, _ = adapter(lambda num_rows: answer)
    with pytest.raises(error, match=text):
        adapted.propose(make_batch([[0, 0]] * 3), [K] * 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_B152_integer_tensors_are_converted(make_batch: Any, dtype: torch.dtype) -> None:
    adapted, _ = adapter(lambda num_rows: torch.tensor([[1, 2], [3, 4], [5, -1]], dtype=dtype))
    assert rows_of(adapted.propose(make_batch([[0, 0]] * 3), [K] * 3)) == [[1, 2], [3, 4], [5]]


@pytest.mark.parametrize(
    "answer", [np.array([[1, 2]]), [np.array([1, 2])], [(1, 2)], ([np.int32(1), 2],), [torch.tensor([1, 2])]]
)
def test_arrays_and_tuples_are_converted(make_batch: Any, answer: Any) -> None:
    adapted, _ = adapter(lambda num_rows: answer)
    assert rows_of(adapted.propose(make_batch([[0, 0]]), [K])) == [[1, 2]]


def test_B152_long_rows_are_cut_with_one_warning(make_batch: Any, caplog: pytest.LogCaptureFixture) -> None:
    adapted, _ = adapter(lambda num_rows: [[1, 2, 3, 4, 5, 6]] * num_rows)
    with caplog.at_level(logging.WARNING, logger="specplug"):
        for _ in range(3):
            assert rows_of(adapted.propose(make_batch([[0, 0]] * 2), [5, 5])) == [[1, 2, 3]] * 2
    assert len(caplog.records) == 1
    assert "pkg.Scripted.propose() returned 6 ids in row 0, above num_speculative_tokens=3" in caplog.text


def test_B153_a_row_inside_its_prompt_has_no_sampled_token_and_gets_no_draft(make_batch: Any) -> None:
    adapted, scripted = adapter(lambda num_rows: [[1], [2]])
    draft = adapted.propose(make_batch([[1, 2, 3], [4, 5]], in_prompt=[0]), [0, K])
    assert scripted.sampled == [[[], [5]]]
    assert scripted.contexts == [[[1, 2, 3], [4, 5]]]
    assert rows_of(draft) == [[], [2]]


def test_B153_part_of_a_context_is_an_error(make_batch: Any) -> None:
    adapted, scripted = adapter(no_drafts)
    whole = make_batch([[1, 2, 3, 4]], prompt_lengths=[3])
    only_last = replace(whole, token_ids=make_batch([[4]]).token_ids, num_computed_tokens=(0,))
    with pytest.raises(ValueError, match="request 'r0' came with 1 of its 3 prompt tokens"):
        adapted.propose(only_last, [K])
    with pytest.raises(ValueError, match="1 requests and 0 contexts"):
        adapted.propose(replace(whole, token_ids=()), [K])
    assert scripted.sampled == []


def test_errors_are_faults_of_the_plugin_in_a_session(make_batch: Any) -> None:
    batch = make_batch([[0, 0]])
    lenient = SessionHooks([("custom_class", adapter(lambda num_rows: None)[0])], vocab_size=10)
    assert lenient.propose(batch, [K]) is None
    assert sum(lenient.take_faults().values()) == 1
    strict = SessionHooks([("custom_class", adapter(lambda num_rows: None)[0])], vocab_size=10, strict=True)
    with pytest.raises(PluginFaultError, match="returned None"):
        strict.propose(batch, [K])


def test_B104_an_id_outside_the_vocabulary_never_leaves_the_session(make_batch: Any) -> None:
    hooks = SessionHooks([("custom_class", adapter(lambda num_rows: [[64]])[0])], vocab_size=64)
    draft = hooks.propose(make_batch([[0, 0]]), [K])
    assert draft is None or draft.num_slots == 0
    assert sum(hooks.take_faults().values()) == 1
    strict = SessionHooks([("custom_class", adapter(lambda num_rows: [[64]])[0])], vocab_size=64, strict=True)
    with pytest.raises(PluginFaultError, match=r"(?s)(?=.*custom_class)(?=.*r0)(?=.*64)"):
        strict.propose(make_batch([[0, 0]]), [K])
