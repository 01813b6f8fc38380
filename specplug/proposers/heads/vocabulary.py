"""The vocabulary of a head's output, where it is a part of the target's."""

from __future__ import annotations

import torch

from specplug.draft_space import DraftContext, DraftSpace, IdentityDraftSpace
from specplug.errors import ModelError
from specplug.types import Indirect, Law, TokenIds

__all__ = ["ReducedVocabulary", "output_space"]


class ReducedVocabulary(DraftSpace):
    """Draft id i stands for target id ``target_ids[i]``. The head reads target ids, so contexts stay as they are."""

    def __init__(self, target_ids: torch.Tensor, vocab_size: int) -> None:
        """``target_ids``: ``[draft_vocab]`` int64, ids below ``vocab_size``.

        Of draft ids that stand for the same target id only the first is drafted. Raises ModelError for ids outside the
        target's vocabulary.
        """
        low, high = int(target_ids.min()), int(target_ids.max())
        if low < 0 or high >= vocab_size:
            raise ModelError(
                f"d2t maps draft ids to target ids from {low} to {high}, and the target has {vocab_size}; d2t holds "
                "offsets (target id = draft id + d2t[draft id]) for the target that the head was trained with"
            )
        draft_ids = torch.arange(len(target_ids), device=target_ids.device)
        first = torch.full((vocab_size,), len(target_ids), device=target_ids.device)
        first = first.scatter_reduce(0, target_ids, draft_ids, "amin")
        self.target_ids = target_ids
        """``[draft_vocab]``."""
        self._target_to_draft_ids = first.masked_fill(first == len(target_ids), -1)
        is_repeated = first[target_ids] != draft_ids
        self._repeated = is_repeated if bool(is_repeated.any()) else None

    @property
    def is_injective(self) -> bool:
        """Whether no two draft ids stand for one target id."""
        return self._repeated is None

    def context(self, request_id: str, token_ids: TokenIds) -> DraftContext:
        return DraftContext(token_ids, len(token_ids))

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""

    def restrict(self, draft_logits: torch.Tensor) -> torch.Tensor:
        return draft_logits if self._repeated is None else draft_logits.masked_fill(self._repeated, -torch.inf)

    def to_target_ids(self, draft_token_ids: torch.Tensor) -> torch.Tensor:
        return self.target_ids.take(draft_token_ids)

    def law(self, draft_logits: torch.Tensor) -> Law:
        return Indirect(draft_logits, draft_logits.logsumexp(-1), self._target_to_draft_ids)


def output_space(d2t: torch.Tensor | None, draft_vocab_size: int, vocab_size: int, device: torch.device) -> DraftSpace:
    """Between a head's output and the target. ``d2t``: ``[draft_vocab]`` offsets, None where ids are the same.

    Raises ModelError for a table that does not fit, and for one of zeros where the head drafts a part of the target's
    ids: it was never filled in.
    """
    if d2t is None:
        return IdentityDraftSpace(vocab_size, draft_vocab_size)
    if tuple(d2t.shape) != (draft_vocab_size,) or d2t.is_floating_point():
        raise ModelError(
            f"d2t is {d2t.dtype} of shape {list(d2t.shape)}; it must be {draft_vocab_size} whole numbers, one for each "
            "draft id (draft_vocab_size)"
        )
    if not bool(d2t.any()):
        if draft_vocab_size < vocab_size:
            raise ModelError(
                f"d2t holds zeros only, and the head drafts {draft_vocab_size} of the target's {vocab_size} token ids: "
                "the table was never filled in"
            )
        return IdentityDraftSpace(vocab_size, draft_vocab_size)
    draft_ids = torch.arange(draft_vocab_size, device=device)
    return ReducedVocabulary(d2t.to(device=device, dtype=torch.int64) + draft_ids, vocab_size)
