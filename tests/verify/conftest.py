"""Verification problems written as lists, and counted samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specplug.sampling_params import SamplingParams
from specplug.types import Batch, Dense, Draft, LawSpan, Request, TokenIds, Verification
from specplug.verify import BuiltinVerifier
from specplug.verify.inputs import RowInputs, Rule, VerifyInputs
from specplug.verify.torch_rules import TorchRules

MakeBatch = Callable[..., Batch]


def _make_batch(
    sampling: Sequence[dict[str, Any]],
    *,
    num_tokens: int | Sequence[int] = 3,
    steps: int = 0,
    seeds: Sequence[int] = (),
) -> Batch:
    lengths = [num_tokens] * len(sampling) if isinstance(num_tokens, int) else num_tokens
    ids = [TokenIds(np.arange(length, dtype=np.int32)) for length in lengths]
    requests = tuple(
        Request(f"r{row}", ids[row], SamplingParams(**params), seed=seeds[row] if seeds else row)
        for row, params in enumerate(sampling)
    )
    num = len(requests)
    return Batch(requests, tuple(ids), tuple(n - 1 for n in lengths), (99,) * num, (steps,) * num)


@pytest.fixture
def make_batch() -> MakeBatch:
    """A batch of rows with the given sampling parameters."""
    return _make_batch


def _wanted_rows(targets: Sequence[Sequence[int]], vocab_size: int = 100) -> torch.Tensor:
    """Logits whose arg-max is the id wanted: 100 there, 99 at id 15, -100 elsewhere."""
    flat = [token_id for row in targets for token_id in row]
    logits = torch.full((len(flat), vocab_size), -100.0)
    logits[:, 15] = 99.0
    logits[torch.arange(len(flat)), torch.tensor(flat)] = 100.0
    return logits


@pytest.fixture
def verify_lists() -> Callable[..., Verification]:
    """Verify one_hot drafts against target rows given as logits or as wanted ids, through ``BuiltinVerifier``."""

    def verify(
        drafts: Sequence[Sequence[int]],
        target: torch.Tensor | Sequence[Sequence[int]],
        sampling: Sequence[dict[str, Any]] | None = None,
        **batch: Any,
    ) -> Verification:
        logits = target if isinstance(target, torch.Tensor) else _wanted_rows(target)
        verifier = BuiltinVerifier(vocab_size=logits.shape[1], rule=batch.pop("rule", "auto"))
        rows = _make_batch(sampling or [{"temperature": 0.0}] * len(drafts), **batch)
        return verifier.specplug_verify(batch=rows, draft=Draft.from_lists(drafts), target_logits=logits)

    return verify


@pytest.fixture
def sample() -> Callable[..., Verification]:
    """One problem verified ``num`` times with different seeds: the batch holds a row for each."""

    def run(
        num: int,
        rule: Rule,
        target: Sequence[Sequence[float]],
        drafts: torch.Tensor,
        draft_probs: Sequence[Sequence[float]] | None = None,
        dtype: torch.dtype = torch.float32,
        **row: Any,
    ) -> Verification:
        """``target``: chances of each of K + 1 rows; ``drafts`` ``[num, K]``; ``draft_probs``: K rows, or one_hot."""
        num_drafts = drafts.shape[1]
        logits = torch.tensor(target).log().to(dtype).repeat(num, 1)
        slots = num * num_drafts
        if draft_probs is None:
            laws = Draft.from_lists([[0] * num_drafts] * num).laws
        else:
            laws = (LawSpan(0, slots, Dense(torch.tensor(draft_probs).log().to(dtype).repeat(num, 1))),)
        rows = tuple(RowInputs(rule, seed=number, position=5, step=2, **row) for number in range(num))
        inputs = VerifyInputs(logits, drafts.reshape(-1), (num_drafts,) * num, laws, rows)
        return TorchRules().verify(inputs)

    return run
