"""Drafting with Medusa heads: head i drafts the i-th token after the newest one, whatever the others draft."""

from __future__ import annotations

from typing import Any

import torch

from specplug.proposers.draft_sampling import DraftSampler
from specplug.proposers.heads.last_state import DraftSlots, LastStateProposer
from specplug_medusa.heads import MedusaHeads

__all__ = ["MedusaProposer"]


class MedusaProposer(LastStateProposer):
    """See :class:`LastStateProposer`; nothing here waits for the device."""

    def __init__(self, heads: MedusaHeads, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.heads = heads

    def draw(self, states: torch.Tensor, token_ids: torch.Tensor, slots: DraftSlots, sampler: DraftSampler) -> None:
        """A chain of each head's choice. Heads with one output head for all pass through it together."""
        features = self.heads(states)
        if self.heads.shares_output:
            features = torch.cat([features[number, :count] for number, count in enumerate(slots.counts)])
            self.choose(self.heads.logits(features, 0), range(len(features)), sampler)
            return
        for depth in range(slots.max_count):
            left = slots.longer_than(depth)
            rows = features[:, depth] if len(left) == len(features) else features[left, depth]
            self.choose(self.heads.logits(rows, depth), slots.at(depth), sampler)
