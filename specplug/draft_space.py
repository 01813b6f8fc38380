"""Between a draft model's vocabulary and the target's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specplug.types import Dense, Law, TokenIds

if TYPE_CHECKING:
    import torch

__all__ = ["DraftContext", "DraftSpace", "IdentityDraftSpace"]


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One request's context in draft ids, and how much of it stands unchanged since the last call."""

    token_ids: list[int]
    num_unchanged: int


class DraftSpace(ABC):
    """A row-wise map, sequence to sequence, between target ids and draft ids; ``forget`` ends a request's state."""

    @abstractmethod
    def context(self, request_id: str, token_ids: TokenIds) -> DraftContext:
        """The request's target ids re-expressed in draft ids."""

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request; unknown ids are ignored."""

    @abstractmethod
    def restrict(self, draft_logits: torch.Tensor) -> torch.Tensor:
        """Mask draft tokens without a target id, before temperature: ``[rows, draft_vocab]`` in and out."""

    @abstractmethod
    def to_target_ids(self, draft_token_ids: torch.Tensor) -> torch.Tensor:
        """Target ids of draft ids that ``restrict`` left possible, any shape."""

    @abstractmethod
    def law(self, draft_logits: torch.Tensor) -> Law:
        """The law over target ids of processed ``draft_logits`` ``[num_slots, draft_vocab]``."""


class IdentityDraftSpace(DraftSpace):
    """Draft and target share their ids. Draft rows past the target's vocabulary are masked."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._seen: dict[str, int] = {}

    def context(self, request_id: str, token_ids: TokenIds) -> DraftContext:
        num_unchanged = min(self._seen.get(request_id, 0), len(token_ids))
        self._seen[request_id] = len(token_ids)
        return DraftContext(token_ids.tolist(), num_unchanged)

    def forget(self, request_id: str) -> None:
        self._seen.pop(request_id, None)

    def restrict(self, draft_logits: torch.Tensor) -> torch.Tensor:
        return draft_logits[:, : self.vocab_size]

    def to_target_ids(self, draft_token_ids: torch.Tensor) -> torch.Tensor:
        return draft_token_ids

    def law(self, draft_logits: torch.Tensor) -> Law:
        return Dense(draft_logits)
