"""Drafting in another vocabulary, greedy or sampled, for any proposer with a draft model."""

from __future__ import annotations

import torch

from specplug.draft_space import DraftContext, DraftSpace, IdentityDraftSpace
from specplug.tli.context import DraftEncoder, RequestText, TargetText, num_common
from specplug.tli.mapping import VocabularyMap
from specplug.tli.vocabulary import Vocabulary
from specplug.types import Indirect, Law, TokenIds

__all__ = ["SameVocabulary", "TliDraftSpace"]


class SameVocabulary(IdentityDraftSpace):
    """The two tokenizers turned out to be equal: the ids are shared as they are, special tokens included."""


class TliDraftSpace(DraftSpace):
    """Drafts are restricted to the shared tokens; their law stays in the draft's vocabulary.

    Nothing as wide as the target's vocabulary is made per step: verification reads the law through the map.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary, shared: VocabularyMap) -> None:
        """Raises ``ConfigError`` for a draft tokenizer that cannot say where its tokens lie in a text."""
        self.shared = shared
        self._text = TargetText(target)
        self._encoder = DraftEncoder(draft)
        self._requests: dict[str, RequestText] = {}
        self._tables: dict[torch.device, _Tables] = {}

    def context(self, request_id: str, token_ids: TokenIds) -> DraftContext:
        known = self._requests.get(request_id)
        if known is not None and known.num_read <= len(token_ids):
            return known.update(token_ids)
        self._requests[request_id] = RequestText(self._text, self._encoder)
        context = self._requests[request_id].update(token_ids)
        if known is None:
            return context
        return DraftContext(context.token_ids, num_common(known.ids, context.token_ids))

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def restrict(self, draft_logits: torch.Tensor) -> torch.Tensor:
        return draft_logits.masked_fill(self._on(draft_logits).is_alone, -torch.inf)

    def to_target_ids(self, draft_token_ids: torch.Tensor) -> torch.Tensor:
        return self._on(draft_token_ids).draft_to_target_ids[draft_token_ids]

    def law(self, draft_logits: torch.Tensor) -> Law:
        return Indirect(draft_logits, draft_logits.float().logsumexp(-1), self._on(draft_logits).target_to_draft_ids)

    def _on(self, tensor: torch.Tensor) -> _Tables:
        tables = self._tables.get(tensor.device)
        if tables is None:
            tables = self._tables[tensor.device] = _Tables(self.shared, tensor.device)
        return tables


class _Tables:
    """The map on one device. ``is_alone`` ``[draft vocabulary]``: draft ids without a counterpart."""

    def __init__(self, shared: VocabularyMap, device: torch.device) -> None:
        with torch.inference_mode(False):  # what is made inside it could not be used outside
            self.target_to_draft_ids = torch.from_numpy(shared.target_to_draft_ids).to(device)
            self.draft_to_target_ids = torch.from_numpy(shared.draft_to_target_ids).to(device)
            self.is_alone = self.draft_to_target_ids < 0
