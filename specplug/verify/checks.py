"""Shapes, dtypes and devices of a verification problem, checked before anything is read or launched."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from specplug.errors import TensorError
from specplug.trees import misplaced_node
from specplug.types import Dense, Indirect, LawSpan
from specplug.verify.inputs import TREE_RULES, VerifyInputs

__all__ = ["check_inputs"]

_ID_DTYPES = (torch.int32, torch.int64)


def check_inputs(inputs: VerifyInputs, vocab_size: int | None = None) -> None:
    """Raise ``TensorError`` (a ``ValueError``) that names the tensor, what was expected and what was found."""
    for fault in _faults(inputs, vocab_size):
        raise TensorError(fault)


def _faults(inputs: VerifyInputs, vocab_size: int | None) -> Iterator[str]:
    logits, ids = inputs.target_logits, inputs.draft_token_ids
    num_slots, batch_size = sum(inputs.num_draft_tokens), len(inputs.num_draft_tokens)
    if len(inputs.rows) != batch_size:
        yield f"num_draft_tokens: expected one count for each of {len(inputs.rows)} rows, found {batch_size}"
    if min(inputs.num_draft_tokens, default=0) < 0:
        yield f"num_draft_tokens: expected counts of at least 0, found {min(inputs.num_draft_tokens)}"
    yield from _logits_faults(logits, num_slots + batch_size, vocab_size)
    if ids.dtype not in _ID_DTYPES:
        yield f"draft_token_ids: expected dtype int32 or int64, found {_name(ids.dtype)}"
    if tuple(ids.shape) != (num_slots,):
        yield f"draft_token_ids: expected shape [{num_slots}] (the sum of num_draft_tokens), found {list(ids.shape)}"
    if ids.device.type != "cpu" and ids.device != logits.device:
        yield f"draft_token_ids: expected device {logits.device} (of target_logits) or cpu, found {ids.device}"
    yield from _law_faults(inputs, num_slots)
    if inputs.parents is not None:
        yield from _tree_faults(inputs, inputs.parents, num_slots)


def _tree_faults(inputs: VerifyInputs, parents: tuple[int, ...], num_slots: int) -> Iterator[str]:
    if len(parents) != num_slots:
        yield f"parents: expected one for each of {num_slots} draft tokens, found {len(parents)}"
    for number, (start, stop) in enumerate(pairwise(inputs.slot_starts)):
        node = misplaced_node(parents[start:stop])
        if node is not None:
            found = parents[start + node]
            yield f"parents: expected -1 or an earlier node of row {number} for node {node}, found {found}"
    for number, (tree, row) in enumerate(zip(inputs.trees, inputs.rows, strict=True)):
        if tree is not None and row.rule not in TREE_RULES:
            yield f"parents: expected chains for the rule {row.rule!r}, found a tree in row {number}"


def _logits_faults(logits: torch.Tensor, num_rows: int, vocab_size: int | None) -> Iterator[str]:
    if not logits.dtype.is_floating_point:
        yield f"target_logits: expected dtype float32, bfloat16 or float16, found {_name(logits.dtype)}"
    width = vocab_size if vocab_size is not None else (logits.shape[1] if logits.dim() == 2 else "vocab")
    if logits.dim() != 2 or logits.shape[0] != num_rows or logits.shape[1] != width or width == 0:
        yield (
            f"target_logits: expected shape [{num_rows}, {width}] (num_draft_tokens + batch rows, vocabulary columns), "
            f"found {list(logits.shape)}"
        )


def _law_faults(inputs: VerifyInputs, num_slots: int) -> Iterator[str]:
    covered = 0
    for span in inputs.laws:
        if span.start != covered or span.stop < span.start:
            yield f"laws: expected a span that starts at slot {covered}, found [{span.start}, {span.stop})"
            return
        covered = span.stop
        yield from _span_faults(span, inputs)
    if covered != num_slots:
        yield f"laws: expected spans over all {num_slots} slots, found {covered} covered"


def _span_faults(span: LawSpan, inputs: VerifyInputs) -> Iterator[str]:
    law, num_slots, vocab_size = span.law, span.stop - span.start, int(inputs.target_logits.shape[1])
    if not isinstance(law, Dense | Indirect):
        return
    width = vocab_size if isinstance(law, Dense) else "draft vocab"
    shape = list(law.draft_logits.shape)
    if len(shape) != 2 or shape[0] != num_slots or (isinstance(law, Dense) and shape[1] != vocab_size):
        yield f"draft_logits: expected shape [{num_slots}, {width}] for slots {span.start}:{span.stop}, found {shape}"
    tensors = {"draft_logits": law.draft_logits}
    if isinstance(law, Indirect):
        yield from _indirect_faults(law, num_slots, vocab_size)
        tensors |= {"logsumexp": law.logsumexp, "target_to_draft_ids": law.target_to_draft_ids}
    for name, tensor in tensors.items():
        if tensor.device != inputs.target_logits.device:
            yield f"{name}: expected device {inputs.target_logits.device} (of target_logits), found {tensor.device}"


def _indirect_faults(law: Indirect, num_slots: int, vocab_size: int) -> Iterator[str]:
    if tuple(law.logsumexp.shape) != (num_slots,):
        yield f"logsumexp: expected shape [{num_slots}], found {list(law.logsumexp.shape)}"
    if tuple(law.target_to_draft_ids.shape) != (vocab_size,):
        yield f"target_to_draft_ids: expected shape [{vocab_size}], found {list(law.target_to_draft_ids.shape)}"
    if law.target_to_draft_ids.dtype not in _ID_DTYPES:
        yield f"target_to_draft_ids: expected dtype int32 or int64, found {_name(law.target_to_draft_ids.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
