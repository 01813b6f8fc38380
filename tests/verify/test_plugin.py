"""The built-in verifier: which rule runs, what it refuses, what it says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specplug.errors import ConfigError, TensorError
from specplug.testing.verify_cases import VerifyCase, random_inputs
from specplug.types import Batch, Draft, LawSpan, OneHot
from specplug.verify import BuiltinVerifier, dispatch
from specplug.verify.checks import check_inputs
from specplug.verify.torch_rules import TorchRules

MakeBatch = Callable[..., Batch]


@pytest.mark.parametrize(
    ("rule", "laws", "effective"),
    [
        ("auto", {"one_hot"}, "match"),
        ("auto", {"one_hot", "unknown"}, "match"),
        ("auto", {"one_hot", "dense"}, "standard"),
        ("auto", {"indirect"}, "standard"),
        ("standard", {"one_hot"}, "standard"),
        ("match", {"dense"}, "match"),
        ("coupled", {"dense"}, "coupled"),
        ("block", {"dense"}, "block"),
    ],
)
def test_effective_rule(rule: str, laws: set[str], effective: str) -> None:
    assert BuiltinVerifier(vocab_size=9, rule=rule, laws=frozenset(laws)).method_effective == effective


def test_B25_block_without_sampled_laws_says_once_that_it_runs_per_token(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "specplug.verify"):
        verifier = BuiltinVerifier(vocab_size=9, rule="block", laws=frozenset({"one_hot"}))
    assert verifier.method_effective == "standard"
    assert [record.message.count("'block' acts as 'standard'") for record in caplog.records] == [1]


@pytest.mark.parametrize("rule", ["greedy", "fly", "typical"])
def test_unknown_rules_are_refused(rule: str) -> None:
    with pytest.raises(ConfigError, match="write one of auto, match, standard, block"):
        BuiltinVerifier(vocab_size=9, rule=rule)


def test_B135_without_a_gpu_torch_verifies_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch.say_once.cache_clear()
    with caplog.at_level(logging.INFO, "specplug.verify"):
        assert isinstance(dispatch.verifier_for(torch.device("cpu")), TorchRules)
        assert isinstance(dispatch.verifier_for(torch.device("cpu")), TorchRules)
    assert [record.message for record in caplog.records] == [
        "verification runs in torch: device cpu has no Triton kernels"
    ]


def test_B135_without_triton_torch_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert isinstance(dispatch.verifier_for(torch.device("cuda")), TorchRules)


INPUTS = random_inputs(VerifyCase(40, num_drafts=(2, 1), laws=("dense",), rules=("standard",)))
INDIRECT = random_inputs(VerifyCase(40, num_drafts=(1,), laws=("indirect",), rules=("standard",)))
INDIRECT_LAW: Any = INDIRECT.laws[0].law


def indirect(**changes: Any) -> Any:
    return replace(INDIRECT, laws=(LawSpan(0, 1, replace(INDIRECT_LAW, **changes)),))


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (
            replace(INPUTS, target_logits=INPUTS.target_logits[:4]),
            r"target_logits: expected shape \[5, 40\].*\[4, 40\]",
        ),
        (replace(INPUTS, target_logits=INPUTS.target_logits[:, :39]), r"target_logits: expected shape \[5, 40\]"),
        (replace(INPUTS, target_logits=INPUTS.target_logits[0]), r"target_logits: expected shape \[5, 40\].*\[40\]"),
        (replace(INPUTS, target_logits=INPUTS.target_logits.long()), "target_logits: expected dtype float32"),
        (
            replace(INPUTS, draft_token_ids=INPUTS.draft_token_ids.float()),
            "draft_token_ids: expected dtype int32 or int64, found float32",
        ),
        (
            replace(INPUTS, draft_token_ids=INPUTS.draft_token_ids[:2]),
            r"draft_token_ids: expected shape \[3\].*found \[2\]",
        ),
        (
            replace(INPUTS, draft_token_ids=INPUTS.draft_token_ids.to("meta")),
            r"draft_token_ids: expected device cpu \(of target_logits\) or cpu, found meta",
        ),
        (replace(INPUTS, rows=INPUTS.rows[:1]), "num_draft_tokens: expected one count for each of 1 rows, found 2"),
        (replace(INPUTS, num_draft_tokens=(4, -1)), "num_draft_tokens: expected counts of at least 0, found -1"),
        (replace(INPUTS, laws=INPUTS.laws[:2]), "laws: expected spans over all 3 slots, found 2 covered"),
        (replace(INPUTS, laws=INPUTS.laws[1:]), "laws: expected a span that starts at slot 0"),
        (
            replace(INPUTS, laws=(LawSpan(0, 2, INPUTS.laws[0].law), LawSpan(2, 3, OneHot()))),
            r"draft_logits: expected shape \[2, 40\] for slots 0:2, found \[1, 40\]",
        ),
        (indirect(logsumexp=torch.zeros(2)), r"logsumexp: expected shape \[1\], found \[2\]"),
        (
            indirect(target_to_draft_ids=torch.zeros(39, dtype=torch.int64)),
            r"target_to_draft_ids: expected shape \[40\]",
        ),
        (indirect(target_to_draft_ids=torch.zeros(40)), "target_to_draft_ids: expected dtype int32 or int64"),
        (indirect(logsumexp=torch.zeros(1, device="meta")), "logsumexp: expected device cpu .*found meta"),
    ],
)
def test_B134_what_does_not_fit_is_named(inputs: Any, text: str) -> None:
    with pytest.raises(TensorError, match=text) as caught:
        check_inputs(inputs, 40)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_B134_both_integer_dtypes_are_taken(dtype: torch.dtype) -> None:
    inputs = replace(INPUTS, draft_token_ids=INPUTS.draft_token_ids.to(dtype))
    check_inputs(inputs, 40)
    assert TorchRules().verify(inputs).output_token_ids.shape == (2, 3)


def test_a_step_is_checked_before_it_is_read(make_batch: MakeBatch) -> None:
    verifier = BuiltinVerifier(vocab_size=9)
    with pytest.raises(TensorError, match=r"target_logits: expected shape \[3, 9\]"):
        verifier.specplug_verify(
            batch=make_batch([{}]), draft=Draft.from_lists([[1, 2]]), target_logits=torch.zeros(3, 8)
        )
