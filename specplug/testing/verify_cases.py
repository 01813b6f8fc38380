"""Random verification problems for comparing implementations, and the comparison itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specplug.types import Dense, Indirect, LawSpan, OneHot, Unknown, Verification
from specplug.verify.inputs import RULES, TREE_RULES, RowInputs, Rule, VerifyInputs

__all__ = ["VerifyCase", "differences", "random_inputs"]


@dataclass(frozen=True)
class VerifyCase:
    """What a random problem looks like. ``num_drafts``: per row, None draws 0 to ``max_drafts``."""

    vocab_size: int
    batch_size: int = 4
    max_drafts: int = 4
    num_drafts: tuple[int, ...] | None = None
    rules: tuple[Rule, ...] = RULES
    laws: tuple[str, ...] = ("one_hot", "dense", "indirect", "unknown")
    dtype: torch.dtype = torch.float32
    draft_dtype: torch.dtype | None = None
    is_strided: bool = False
    has_filters: bool = False
    has_placeholders: bool = False
    has_nan: bool = False
    has_trees: bool = False
    """Draft tokens of rows whose rule takes trees form random ones."""
    device: str = "cpu"
    seed: int = 0


def random_inputs(case: VerifyCase) -> VerifyInputs:
    """A problem in which acceptances, rejections and every rule and law of ``case`` occur. CPU-seeded."""
    generator = torch.Generator().manual_seed(case.seed)
    counts = case.num_drafts or tuple(_ints(generator, 0, case.max_drafts + 1, case.batch_size))
    num_slots, vocab = sum(counts), case.vocab_size
    logits = torch.randn(num_slots + len(counts), vocab, generator=generator) * 3.0
    logits[:, _ints(generator, 0, vocab, 3)] += 6.0  # a few likely tokens, so that drafts are often right
    rows = [
        start + number for number, start in enumerate(_starts(counts)) for start in range(start, start + counts[number])
    ]
    slot_logits = logits[rows] + 0.5 * torch.randn(num_slots, vocab, generator=generator)
    ids = torch.empty(num_slots, dtype=torch.int64)
    laws = []
    for slot in range(num_slots):
        kind = case.laws[_ints(generator, 0, len(case.laws), 1)[0]]
        span, ids[slot] = _law(case, kind, slot, slot_logits[slot], generator)
        laws.append(span)
    request_rows = _rows(case, len(counts), generator)
    parents = _plant_trees(ids, logits, counts, request_rows, generator) if case.has_trees else None
    if case.has_placeholders and num_slots:
        ids[_ints(generator, 0, num_slots, 1 + num_slots // 6)] = -1
        ids[_ints(generator, 0, num_slots, 1)] = vocab
    if case.has_nan:
        logits[_ints(generator, 0, len(logits), 1)[0], vocab // 2] = torch.nan
    target = logits.to(case.dtype).to(case.device)
    if case.is_strided:
        target = target.t().contiguous().t()
    rates = (0.9, 0.7, 0.5, 0.5)
    return VerifyInputs(target, ids.to(case.device), tuple(counts), tuple(laws), request_rows, rates, parents)


def _plant_trees(
    ids: torch.Tensor,
    logits: torch.Tensor,
    counts: Sequence[int],
    rows: Sequence[RowInputs],
    generator: torch.Generator,
) -> tuple[int, ...]:
    """Random parents, and likely tokens of the parent's row as the nodes, now and then the same in two siblings."""
    parents: list[int] = []
    for row, start, count, number in zip(rows, _starts(counts), counts, range(len(counts)), strict=True):
        for node in range(count):
            parent = _ints(generator, -1, node, 1)[0] if row.rule in TREE_RULES and node else node - 1
            parents.append(parent)
            if row.rule in TREE_RULES:
                likely = logits[start + number + parent + 1].topk(3).indices
                ids[start + node] = likely[_ints(generator, 0, 3, 1)[0]]
    return tuple(parents)


def _ints(generator: torch.Generator, low: int, high: int, count: int) -> list[int]:
    values: list[int] = torch.randint(low, high, (count,), generator=generator).tolist()
    return values


def _starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:number]) for number in range(len(counts))]


def _law(
    case: VerifyCase, kind: str, slot: int, logits: torch.Tensor, generator: torch.Generator
) -> tuple[LawSpan, int]:
    dtype, device = case.draft_dtype or case.dtype, case.device
    if kind in ("one_hot", "unknown"):
        law = OneHot() if kind == "one_hot" else Unknown()
        return LawSpan(slot, slot + 1, law), int(logits.argmax())
    if kind == "dense":
        logits = logits.to(dtype)
        token_id = int(torch.multinomial(logits.float().softmax(0), 1, generator=generator))
        return LawSpan(slot, slot + 1, Dense(logits[None].to(device))), token_id
    # about half of the target ids, in another order
    order = torch.randperm(case.vocab_size, generator=generator)[: case.vocab_size // 2 + 1]
    draft_logits = logits[order].to(dtype)
    to_draft = torch.full((case.vocab_size,), -1, dtype=torch.int64)
    to_draft[order] = torch.arange(len(order))
    draft_id = int(torch.multinomial(draft_logits.float().softmax(0), 1, generator=generator))
    lse = draft_logits.float().logsumexp(0, keepdim=True)
    law_of = Indirect(draft_logits[None].to(device), lse.to(device), to_draft.to(device))
    return LawSpan(slot, slot + 1, law_of), int(order[draft_id])


def _rows(case: VerifyCase, batch_size: int, generator: torch.Generator) -> tuple[RowInputs, ...]:
    rows = []
    for number in range(batch_size):
        rule = case.rules[number % len(case.rules)]
        position, step, top_k = _ints(generator, 1, 500, 3)
        filtered = case.has_filters and rule != "greedy" and number % 4 != 3
        rows.append(
            RowInputs(
                rule=rule,
                seed=2**64 - 1 - 7 * number - case.seed,
                position=position,
                step=step,
                is_greedy=rule == "greedy" or (rule == "synthetic" and number % 2 == 0),
                temperature=(1.0, 0.7, 1.3)[number % 3],
                top_k=2 + top_k % 60 if filtered and number % 2 else 0,
                top_p=(1.0, 0.9, 0.5)[number % 3] if filtered else 1.0,
                min_p=0.02 if filtered and number % 4 == 0 else 0.0,
            )
        )
    return tuple(rows)


def differences(got: Verification, want: Verification) -> list[str]:
    """One line per tensor that differs; empty when the two agree in every id, count and flag."""
    found = []
    names = ["output_token_ids", "num_accepted_tokens", "is_invalid"]
    if got.accepted_draft_indices is not None or want.accepted_draft_indices is not None:
        names.append("accepted_draft_indices")
    for name in names:
        one, other = (
            torch.tensor([]) if each is None else each.cpu() for each in (getattr(got, name), getattr(want, name))
        )
        if one.shape != other.shape or not torch.equal(one.long(), other.long()):
            found.append(f"{name}: {one.tolist()} against {other.tolist()}")
    return found
