"""One verification problem in host values and tensors, the same for every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from specplug.trees import Tree, split_trees
from specplug.types import Batch, Draft, Law, LawSpan, cumulative

if TYPE_CHECKING:
    import torch

    from specplug.sampling_params import SamplingParams

__all__ = ["RULES", "TREE_RULES", "RowInputs", "Rule", "VerifyInputs", "build_inputs", "slot_laws"]

Rule: TypeAlias = Literal["greedy", "match", "standard", "block", "synthetic", "coupled"]

RULES: tuple[Rule, ...] = ("greedy", "match", "standard", "block", "synthetic", "coupled")
TREE_RULES: tuple[Rule, ...] = ("greedy", "match", "coupled")
"""Rules that emit the target's own draws: they descend a tree as they walk a chain."""


@dataclass(frozen=True, slots=True)
class RowInputs:
    """One request: how it is verified, its filters, and the key of its noise.

    ``position`` is where the first token of this step will stand; slot i draws for ``position + i``, in a tree the
    node at depth i for ``position + i``.
    """

    rule: Rule
    seed: int = 0
    position: int = 0
    step: int = 0
    is_greedy: bool = False
    """Only read under ``synthetic``, where it decides how the ending token is chosen."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def has_filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, eq=False)
class VerifyInputs:
    """``target_logits`` ``[num_draft_tokens + batch, vocab]``, each row's n + 1 logit rows consecutive.

    ``draft_token_ids`` ``[num_draft_tokens]`` int; ``laws`` cover the slots in order; ``synthetic_rates``:
    chance of acceptance of slot i given that slots before it were accepted. ``parents`` as in ``Draft``: logit row
    1 + i of a row is about the token that follows its node i.
    """

    target_logits: torch.Tensor
    draft_token_ids: torch.Tensor
    num_draft_tokens: tuple[int, ...]
    laws: tuple[LawSpan, ...]
    rows: tuple[RowInputs, ...]
    synthetic_rates: tuple[float, ...] = ()
    parents: tuple[int, ...] | None = None

    @property
    def vocab_size(self) -> int:
        return int(self.target_logits.shape[1])

    @property
    def slot_starts(self) -> list[int]:
        """``[batch + 1]``: where each row's draft slots start; its logit rows start at this plus its index."""
        return cumulative(self.num_draft_tokens)

    @property
    def trees(self) -> list[Tree | None]:
        """Per row its tree; None for chains."""
        return split_trees(self.parents, self.num_draft_tokens)

    @property
    def max_depth(self) -> int:
        """Most draft tokens that a row can accept."""
        rows = zip(self.trees, self.num_draft_tokens, strict=True)
        return max((count if tree is None else tree.max_depth for tree, count in rows), default=0)


def slot_laws(laws: Sequence[LawSpan]) -> list[tuple[Law, int]]:
    """Per slot: its law, and the slot's row in the law's tensors."""
    return [(span.law, slot - span.start) for span in laws for slot in range(span.start, span.stop)]


def _row(params: SamplingParams, rule: Rule, seed: int, position: int, step: int) -> RowInputs:
    is_greedy = params.is_greedy or params.top_k == 1  # top_k=1 is greedy, also where two logits tie
    return RowInputs(
        rule="greedy" if is_greedy and rule != "synthetic" else rule,
        seed=seed,
        position=position,
        step=step,
        is_greedy=is_greedy,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
    )


def build_inputs(
    batch: Batch, draft: Draft, target_logits: torch.Tensor, rule: Rule, synthetic_rates: Sequence[float] = ()
) -> VerifyInputs:
    """The problem of one step: ``rule`` for random rows, ``greedy`` for greedy ones.

    ``standard`` and ``block`` are rules for chains: rows with a tree are verified by ``match``, which only emits the
    target's own draws and so needs no law.
    """
    rows = tuple(
        _row(
            request.sampling_params,
            "match" if tree is not None and rule in ("standard", "block") else rule,
            request.seed,
            len(token_ids),
            step,
        )
        for request, token_ids, step, tree in zip(
            batch.requests, batch.token_ids, batch.num_verify_steps, draft.trees(), strict=True
        )
    )
    return VerifyInputs(
        target_logits=target_logits,
        draft_token_ids=draft.draft_token_ids,
        num_draft_tokens=tuple(draft.num_draft_tokens),
        laws=tuple(draft.laws),
        rows=rows,
        synthetic_rates=tuple(synthetic_rates),
        parents=draft.parents,
    )
