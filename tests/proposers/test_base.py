from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specplug.hooks import SessionHooks
from specplug.proposers import Proposer, RowProposer, rows_to_draft
from specplug.types import Batch, Draft, TokenIds


class LastToken(RowProposer):
    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []

    def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
        self.asked.append((token_ids.tolist(), limit))
        return [token_ids[-1]] * limit


def test_row_proposer_drafts_for_the_batch(make_batch: Any) -> None:
    draft = LastToken().propose(make_batch([[1, 2], [3, 4, 5]]), [2, 1])
    assert draft.draft_token_ids.tolist() == [2, 2, 5]
    assert draft.num_draft_tokens == (2, 1)
    assert len(draft.laws) == 1


def test_rows_with_limit_0_and_rows_in_their_prompt_are_never_asked(make_batch: Any) -> None:
    proposer = LastToken()
    batch = make_batch([[1, 2], [3, 4], [5, 6]], in_prompt=[2])
    assert proposer.propose(batch, [0, 3, 3]).num_draft_tokens == (0, 3, 0)
    assert proposer.asked == [([3, 4], 3)]
    assert rows_to_draft(batch, [0, 3, 3]) == [1]


@pytest.mark.parametrize("answer", [(1, 2), np.array([1, 2]), torch.tensor([1, 2]), [np.int32(1), torch.tensor(2)]])
def test_row_proposer_takes_ids_in_any_sequence(make_batch: Any, answer: Any) -> None:
    class Odd(RowProposer):
        def propose_row(self, token_ids: TokenIds, limit: int) -> Any:
            return answer

    draft = Odd().propose(make_batch([[1, 2]]), [2])
    assert (draft.draft_token_ids.tolist(), draft.num_draft_tokens) == ([1, 2], (2,))


@pytest.mark.parametrize("answer", [[1.7], (1.0,), np.array([1.5]), torch.tensor([1.5]), ["1"], [torch.tensor(1.5)]])
def test_ids_that_are_no_whole_numbers_are_never_cut_to_some(make_batch: Any, answer: Any) -> None:
    class Odd(RowProposer):
        def propose_row(self, token_ids: TokenIds, limit: int) -> Any:
            return answer

    with pytest.raises(TypeError, match="is no token id; a draft holds whole numbers"):
        Odd().propose(make_batch([[1, 2]]), [2])


@pytest.mark.parametrize("answer", [None, 5, torch.tensor(5), {1: 2}])
def test_row_proposer_names_itself_and_the_request_when_it_returns_no_list(make_batch: Any, answer: Any) -> None:
    class Odd(RowProposer):
        def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
            return answer  # type: ignore[no-any-return]

    with pytest.raises(TypeError, match=r"Odd\.propose_row returned .* for request 'r0'"):
        Odd().propose(make_batch([[1, 2]]), [1])


def test_the_hook_answers_with_propose_in_a_session(make_batch: Any) -> None:
    class Nobody(Proposer):
        def propose(self, batch: Batch, limits: Sequence[int]) -> Draft | None:
            return None

    hooks = SessionHooks([("nobody", Nobody()), ("last", LastToken())], vocab_size=10, strict=True)
    draft = hooks.propose(make_batch([[1, 2]]), [2])
    assert draft is not None
    assert draft.draft_token_ids.tolist() == [2, 2]
    assert [span.source for span in draft.sources] == ["last"]


def test_importing_the_proposers_leaves_torch_and_numpy_alone() -> None:
    modules = "specplug.proposers, specplug.proposers.ngram, specplug.proposers.custom_class"
    code = f"import {modules}, sys; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
