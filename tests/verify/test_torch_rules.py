"""The vectorised torch path gives the reference's results, id for id."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from specplug.errors import TensorError
from specplug.testing.verify_cases import VerifyCase, differences, random_inputs
from specplug.trees import chain_parents
from specplug.types import Dense, Indirect, LawSpan, OneHot, Verification
from specplug.verify.checks import check_inputs
from specplug.verify.inputs import RowInputs, VerifyInputs
from specplug.verify.reference import verify_reference
from specplug.verify.torch_rules import TorchRules
from specplug.verify.trees import verify_trees

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filters": {"has_filters": True},
    "placeholders": {"has_placeholders": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16 with filters": {"dtype": torch.float16, "has_filters": True},
    "float32 drafts": {"dtype": torch.float16, "draft_dtype": torch.float32},
    "strided": {"is_strided": True},
    "nan": {"has_nan": True},
    "nan with filters": {"has_nan": True, "has_filters": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("vocab_size", [3, 129, 1000, 1025, 3001])
def test_equals_the_reference(vocab_size: int, variant: str) -> None:
    rules = TorchRules()
    for seed in range(6):
        inputs = random_inputs(VerifyCase(vocab_size, batch_size=7, seed=seed, **VARIANTS[variant]))
        assert differences(rules.verify(inputs), verify_reference(inputs)) == []


@pytest.mark.parametrize("vocab_size", [32001, 49152, 151936])
def test_equals_the_reference_at_real_vocabularies(vocab_size: int) -> None:
    inputs = random_inputs(VerifyCase(vocab_size, batch_size=6, max_drafts=2, seed=vocab_size, has_filters=True))
    assert differences(TorchRules().verify(inputs), verify_reference(inputs)) == []


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("vocab_size", [3, 129, 1025])
def test_trees_equal_the_reference_by_a_walk_and_by_single_rows(vocab_size: int, variant: str) -> None:
    """Mixed with chains of every rule; the second way is that of implementations that know chains only."""
    rules, num_branched = TorchRules(), 0
    for seed in range(12):
        case = VerifyCase(vocab_size, batch_size=7, max_drafts=9, has_trees=True, seed=seed, **VARIANTS[variant])
        inputs = random_inputs(case)
        check_inputs(inputs, vocab_size)
        expected = verify_reference(inputs)
        assert differences(rules.verify(inputs), expected) == []
        assert differences(verify_trees(inputs, rules.verify), expected) == []
        assert expected.accepted_draft_indices is not None
        num_branched += sum(any(row[row >= 0].diff() > 1) for row in expected.accepted_draft_indices)
    assert num_branched >= 3, "the cases must accept paths that leave out nodes"


def test_a_tree_of_width_1_is_the_chain() -> None:
    for seed in range(6):
        chains = random_inputs(VerifyCase(129, batch_size=6, max_drafts=5, rules=("greedy", "match"), seed=seed))
        parents = tuple(parent for count in chains.num_draft_tokens for parent in chain_parents(count))
        expected = TorchRules().verify(chains)
        for found in (
            TorchRules().verify(replace(chains, parents=parents)),
            verify_reference(replace(chains, parents=parents)),
        ):
            indices = found.accepted_draft_indices
            assert indices is not None
            assert differences(replace(found, accepted_draft_indices=None), expected) == []
            assert [row[row >= 0].tolist() for row in indices] == [list(range(n)) for n in expected.num_accepted_tokens]


def test_nan_behind_a_node_that_is_not_reached_does_not_matter() -> None:
    logits = torch.full((4, 5), -9.0)
    for row, token_id in enumerate((1, 3, 2, 4)):
        logits[row, token_id] = 9.0
    logits[1] = torch.nan  # behind node 0, a sibling of the accepted node 1
    one_hot = (LawSpan(0, 3, OneHot()),)
    inputs = VerifyInputs(logits, torch.tensor([0, 1, 2]), (3,), one_hot, (RowInputs("greedy"),), parents=(-1, -1, 1))
    for found in (TorchRules().verify(inputs), verify_trees(inputs, TorchRules().verify), verify_reference(inputs)):
        assert found.output_token_ids.tolist() == [[1, 2, 4]]
        assert found.accepted_draft_indices is not None
        assert found.accepted_draft_indices.tolist() == [[1, 2]]
        assert found.is_invalid is not None and not found.is_invalid.any()


@pytest.mark.parametrize(
    ("rule", "parents", "match"),
    [
        ("standard", (-1, -1), "parents: expected chains for the rule 'standard', found a tree in row 0"),
        ("synthetic", (-1, -1), "parents: expected chains for the rule 'synthetic'"),
        ("match", (-1,), "parents: expected one for each of 2 draft tokens, found 1"),
        ("match", (1, -1), "parents: expected -1 or an earlier node of row 0 for node 0, found 1"),
    ],
)
def test_trees_that_cannot_be_verified_are_refused(rule: Any, parents: tuple[int, ...], match: str) -> None:
    one_hot = (LawSpan(0, 2, OneHot()),)
    inputs = VerifyInputs(torch.zeros(3, 5), torch.tensor([1, 2]), (2,), one_hot, (RowInputs(rule),), parents=parents)
    with pytest.raises(TensorError, match=re.escape(match)):
        check_inputs(inputs, 5)


def test_nan_matters_only_where_block_needs_the_row() -> None:
    flagged = set()
    for seed in range(40):
        case = VerifyCase(5, num_drafts=(2,), rules=("block",), laws=("dense",), has_nan=True, seed=seed)
        inputs = random_inputs(case)
        found = TorchRules().verify(inputs)
        assert differences(found, verify_reference(inputs)) == []
        flagged.add(bool(found.is_invalid))
    assert flagged == {True, False}


def test_the_cases_exercise_acceptance_and_rejection() -> None:
    counts = [0, 0]
    for seed in range(6):
        inputs = random_inputs(VerifyCase(129, batch_size=7, seed=seed))
        accepted = verify_reference(inputs).num_accepted_tokens.tolist()
        for num_accepted, num_drafts in zip(accepted, inputs.num_draft_tokens, strict=True):
            counts[0] += num_accepted
            counts[1] += num_drafts > num_accepted
    assert min(counts) > 5


def test_a_changed_id_is_noticed() -> None:
    inputs = random_inputs(VerifyCase(129))
    want = verify_reference(inputs)
    got = TorchRules().verify(inputs)
    wrong = replace(got, output_token_ids=got.output_token_ids + 1)
    assert differences(wrong, want)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    inputs = random_inputs(VerifyCase(129, num_drafts=(3, 2, 3, 1, 2, 0), seed=4))
    together: Verification = TorchRules().verify(inputs)
    for row, (start, stop) in enumerate(zip(inputs.slot_starts, inputs.slot_starts[1:], strict=False)):
        laws = [span for span in inputs.laws if start <= span.start < stop]
        alone = replace(
            inputs,
            target_logits=inputs.target_logits[start + row : stop + row + 1],
            draft_token_ids=inputs.draft_token_ids[start:stop],
            num_draft_tokens=(stop - start,),
            laws=tuple(replace(span, start=span.start - start, stop=span.stop - start) for span in laws),
            rows=(inputs.rows[row],),
        )
        found = TorchRules().verify(alone).output_token_ids[0].tolist()
        assert found == together.output_token_ids[row, : len(found)].tolist()


@pytest.mark.parametrize("vocab_size", [100, 8193, 10000, 151936])
def test_ids_stay_in_range_when_the_tail_holds_no_mass(vocab_size: int) -> None:
    inputs = random_inputs(VerifyCase(vocab_size, batch_size=6, max_drafts=1))
    logits = torch.full_like(inputs.target_logits, -torch.inf)
    logits[:, 1] = 0.0
    found = TorchRules().verify(replace(inputs, target_logits=logits))
    assert (found.output_token_ids < vocab_size).all()
    last = found.output_token_ids.gather(1, found.num_accepted_tokens.long()[:, None])
    assert (last == 1).all()


def test_inference_mode_and_gradients_do_not_matter() -> None:
    inputs = random_inputs(VerifyCase(129, batch_size=6, seed=2))
    for span in inputs.laws:
        if isinstance(span.law, Dense | Indirect):
            span.law.draft_logits.requires_grad_()
    rules, want = TorchRules(), verify_reference(inputs)
    with torch.inference_mode():
        assert differences(rules.verify(inputs), want) == []
    assert differences(rules.verify(replace(inputs, target_logits=inputs.target_logits.requires_grad_())), want) == []


def test_the_default_dtype_does_not_matter() -> None:
    inputs = random_inputs(VerifyCase(1025, batch_size=7, seed=4, has_filters=True))
    expected = TorchRules().verify(inputs)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = TorchRules().verify(inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    assert differences(found, expected) == []
