"""Greedy rows: vLLM's own table, ties, and rows that nobody needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specplug.types import Verification

P = -1
Verify = Callable[..., Verification]


@pytest.mark.parametrize(
    ("drafts", "targets", "expected"),
    [
        ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
        ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5, P, P]]),
        ([[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4, P]]),
        ([[1]], [[1, 2]], [[1, 2]]),
        ([[]], [[5]], [[5]]),
        ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7, P], [4, 8, P, P]]),
        ([[1]], [[2, 3]], [[2, P]]),
        ([[1, 2], [3, 4]], [[1, 5, 6], [3, 4, 7]], [[1, 5, P], [3, 4, 7]]),
    ],
)
def test_vllm_table(verify_lists: Verify, drafts: Any, targets: Any, expected: Any) -> None:
    found = verify_lists(drafts, targets)
    assert found.output_token_ids.tolist() == expected
    assert found.num_accepted_tokens.tolist() == [sum(token != P for token in row) - 1 for row in expected]
    assert found.output_token_ids.dtype == torch.int32


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1e-6}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_B46_ties_go_to_the_first_maximum(verify_lists: Verify, sampling: dict[str, Any], dtype: torch.dtype) -> None:
    tied = torch.tensor([[1.0, 1.0, 0.0]] * 2, dtype=dtype)
    assert verify_lists([[0]], tied, [sampling]).output_token_ids.tolist() == [[0, 0]]
    mixed = [sampling, {"temperature": 0.8}]
    for seed in range(5):
        found = verify_lists([[0], [0]], tied.repeat(2, 1), mixed, seeds=[seed, seed + 50])
        assert found.output_token_ids[0].tolist() == [0, 0]


def test_B45_greedy_and_random_rows_together(verify_lists: Verify) -> None:
    logits = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    plain = logits[:3].argmax(1).tolist()
    found = verify_lists([plain[:2], [3, 4]], logits, [{"temperature": 0.0}, {"temperature": 0.8}])
    assert found.output_token_ids[0].tolist() == plain
    assert (found.num_accepted_tokens >= 0).all()
    assert not found.is_invalid.any()  # type: ignore[union-attr]


def test_B128_rows_without_drafts_among_rows_with(verify_lists: Verify) -> None:
    found = verify_lists([[1, 2, 3], [], [4]], [[1, 2, 9, 9], [5], [4, 6]])
    assert found.output_token_ids.tolist() == [[1, 2, 9, P], [5, P, P, P], [4, 6, P, P]]
    plain = verify_lists([[], [], []], [[1], [5], [4]])
    assert plain.output_token_ids.tolist() == [[1], [5], [4]]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.5, "seed": 1}])
def test_B130_placeholders_stop_the_chain(verify_lists: Verify, sampling: dict[str, Any]) -> None:
    targets = [[5, 5, 5], [5, 5, 5], [5, 5, 5]]
    found = verify_lists([[-1, 5], [5, -1], [100, 5]], targets, [sampling] * 3)
    assert found.output_token_ids.tolist() == [[5, P, P], [5, 5, P], [5, P, P]]
    assert found.num_accepted_tokens.tolist() == [0, 1, 0]


@pytest.mark.parametrize("rule", ["auto", "standard", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", ["nan", "all nan", "all -inf", "inf"])
def test_B129_unusable_rows_are_flagged_and_harm_nobody(
    verify_lists: Verify, rule: str, temperature: float, bad: str
) -> None:
    logits = torch.full((6, 64), -100.0)
    logits[:, 7] = 100.0
    row, value = (1, slice(3, 4)) if bad in ("nan", "inf") else (1, slice(None))
    logits[row, value] = {"nan": torch.nan, "all nan": torch.nan, "all -inf": -torch.inf, "inf": torch.inf}[bad]
    found = verify_lists([[7, 7], [7, 7]], logits, [{"temperature": temperature}] * 2, rule=rule)
    assert found.is_invalid.tolist() == [True, False]  # type: ignore[union-attr]
    assert found.output_token_ids.tolist() == [[0, P, P], [7, 7, 7]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_behind_a_mismatch_are_never_read(verify_lists: Verify, temperature: float) -> None:
    logits = torch.full((3, 64), -100.0)
    logits[:, 7] = 100.0
    logits[1:] = torch.nan
    found = verify_lists([[8, 7]], logits, [{"temperature": temperature}])
    assert found.output_token_ids.tolist() == [[7, P, P]]
    assert not found.is_invalid.any()  # type: ignore[union-attr]
