"""The vectorised torch path gives the reference's results, id for id."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specplug.testing.verify_cases import VerifyCase, differences, random_inputs
from specplug.types import Dense, Indirect, Verification
from specplug.verify.reference import verify_reference
from specplug.verify.torch_rules import TorchRules

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
