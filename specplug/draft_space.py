"""Between a draft model's vocabulary and the target's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specplug.types import Dense, Indirect, Law, TokenIds

if TYPE_CHECKING:
    import torch

__all__ = ["DraftContext", "DraftSpace", "IdentityDraftSpace", "num_token_ids"]


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One request's context in draft ids, and how much of it stands unchanged since the last call."""

    token_ids: Sequence[int]
    """Indexing and slicing are all that is asked of it; slices are lists."""
    num_unchanged: int


class DraftSpace(ABC):
    """A row-wise map, sequence to sequence, between target ids and draft ids; ``forget`` ends a request's state.

    What a proposer with a draft model does with it. While a request is read, and before each of its drafts:
    ``context`` of the text so far (prompts come in growing prefixes; a text may also be shorter than the one before);
    the draft's cache is rolled back to ``num_unchanged`` and reads the rest. Per draft token: ``restrict`` the draft's
    raw logits, then temperature and filters, then arg-max or a draw; the chosen draft ids are fed back to the draft as
    they are. Once per step: ``to_target_ids`` of all chosen ids, and ``law`` of the very logits that were drawn from.
    Draft tokens that were accepted come back inside the next ``context``: where it spells them with the same draft ids,
    what the draft's cache holds of them is kept.
    """

    @abstractmethod
    def context(self, request_id: str, token_ids: TokenIds) -> DraftContext:
        """The request's target ids re-expressed in draft ids.

        ``token_ids``: prompt and output so far, whole. The answer's ids may be the space's own list, which the next
        call for the request changes in place (a copy would cost as much as the context is long), and may be empty
        where the text has nothing in draft ids.
        """

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request; unknown ids are ignored."""

    @abstractmethod
    def restrict(self, draft_logits: torch.Tensor) -> torch.Tensor:
        """Mask draft tokens without a target id, before temperature: ``[rows, draft_vocab]``, any float dtype.

        The result may be a view, or narrower where the draft's last ids are of no use; column j stays draft id j.
        """

    @abstractmethod
    def to_target_ids(self, draft_token_ids: torch.Tensor) -> torch.Tensor:
        """Target ids of draft ids that ``restrict`` left possible, any shape."""

    @abstractmethod
    def law(self, draft_logits: torch.Tensor) -> Law:
        """The law over target ids of processed ``draft_logits`` ``[num_slots, draft_vocab]``."""


class IdentityDraftSpace(DraftSpace):
    """Draft and target share their ids; rows of either vocabulary past the shared ids, its padding, are masked."""

    def __init__(self, vocab_size: int, num_ids: int | None = None, *, draft_vocab_size: int | None = None) -> None:
        """``vocab_size``: the target's; ``num_ids``: how many ids both know, by default all of the target's.

        ``draft_vocab_size``: ids that the draft can read, by default all of the target's.
        """
        self.vocab_size = vocab_size
        self.num_ids = vocab_size if num_ids is None else min(num_ids, vocab_size)
        self._num_readable = vocab_size if draft_vocab_size is None else draft_vocab_size
        self._seen: dict[str, int] = {}
        self._map: torch.Tensor | None = None

    @classmethod
    def between(cls, target: Any, draft: Any) -> IdentityDraftSpace:
        """For a target and a draft, each with ``vocab_size`` and ``tokenizer`` (which may be None)."""
        draft_vocab_size = getattr(draft, "vocab_size", target.vocab_size)
        tokenizers = [getattr(side, "tokenizer", None) for side in (target, draft)]
        sizes = [num_token_ids(tokenizer) for tokenizer in tokenizers if tokenizer is not None]
        num_ids = min([target.vocab_size, draft_vocab_size, *sizes])
        return cls(target.vocab_size, num_ids, draft_vocab_size=draft_vocab_size)

    def context(self, request_id: str, token_ids: TokenIds) -> DraftContext:
        num_unchanged = min(self._seen.get(request_id, 0), len(token_ids))
        self._seen[request_id] = len(token_ids)
        if self._num_readable < self.vocab_size:  # the target may write ids of its padding
            token_ids = TokenIds(token_ids.array.clip(max=self._num_readable - 1))
        return DraftContext(token_ids, num_unchanged)

    def forget(self, request_id: str) -> None:
        self._seen.pop(request_id, None)

    def restrict(self, draft_logits: torch.Tensor) -> torch.Tensor:
        return draft_logits[:, : self.num_ids]

    def to_target_ids(self, draft_token_ids: torch.Tensor) -> torch.Tensor:
        return draft_token_ids

    def law(self, draft_logits: torch.Tensor) -> Law:
        if draft_logits.shape[-1] == self.vocab_size:
            return Dense(draft_logits)
        return Indirect(draft_logits, draft_logits.logsumexp(-1), self._target_to_draft_ids(draft_logits))

    def _target_to_draft_ids(self, draft_logits: torch.Tensor) -> torch.Tensor:
        import torch

        if self._map is None or self._map.device != draft_logits.device:
            ids = torch.arange(self.vocab_size, device=draft_logits.device)
            self._map = ids.masked_fill(ids >= draft_logits.shape[-1], -1)
        return self._map


def num_token_ids(tokenizer: Any) -> int:
    """The ids that a tokenizer makes are below this: its largest id and one."""
    return int(max(tokenizer.get_vocab().values(), default=-1)) + 1
