from __future__ import annotations

import pytest
import torch

from specplug.draft_space import IdentityDraftSpace
from specplug.errors import ModelError
from specplug.proposers.heads.vocabulary import ReducedVocabulary, output_space
from specplug.types import Dense, Indirect

CPU = torch.device("cpu")


def test_B103_d2t_holds_offsets() -> None:
    space = output_space(torch.tensor([0, 2, 5]), 3, 64, CPU)
    assert space.to_target_ids(torch.tensor([0, 1, 2])).tolist() == [0, 3, 7]
    law = space.law(torch.tensor([[1.0, 2.0, 3.0]]))
    assert isinstance(law, Indirect)
    assert [law.target_to_draft_ids[token_id].item() for token_id in (0, 3, 7, 1, 63)] == [0, 1, 2, -1, -1]
    assert law.logsumexp.tolist() == pytest.approx([3.4076], abs=1e-4)


def test_B103_an_all_zero_table_is_for_equal_vocabularies_only() -> None:
    space = output_space(torch.zeros(64, dtype=torch.int64), 64, 64, CPU)
    assert isinstance(space, IdentityDraftSpace)
    assert isinstance(space.law(torch.zeros(1, 64)), Dense)
    with pytest.raises(ModelError, match="zeros only, and the head drafts 3 of the target's 64"):
        output_space(torch.zeros(3, dtype=torch.int64), 3, 64, CPU)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.tensor([0, 2]), r"shape \[2\]; it must be 3 whole numbers"),
        (torch.tensor([0.0, 2.0, 5.0]), "torch.float32"),
        (torch.tensor([0, 2, 70]), "target ids from 0 to 72, and the target has 64"),
        (torch.tensor([-1, 2, 5]), "target ids from -1 to 7"),
    ],
)
def test_tables_that_do_not_fit(table: torch.Tensor, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        output_space(table, 3, 64, CPU)


def test_of_draft_ids_with_one_target_id_the_first_is_drafted() -> None:
    space = ReducedVocabulary(torch.tensor([5, 2, 5]), 8)
    assert space.restrict(torch.zeros(1, 3)).tolist() == [[0.0, 0.0, -float("inf")]]
    law = space.law(space.restrict(torch.zeros(1, 3)))
    assert isinstance(law, Indirect)
    assert law.target_to_draft_ids.tolist() == [-1, -1, 1, -1, -1, 0, -1, -1]


def test_without_a_table_ids_are_the_same() -> None:
    space = output_space(None, 60, 64, CPU)
    assert space.to_target_ids(torch.tensor([59])).tolist() == [59]
    assert space.restrict(torch.zeros(1, 60)).shape == (1, 60)
