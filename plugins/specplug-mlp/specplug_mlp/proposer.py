"""Drafting with an MLP speculator: stage by stage, each reading the token that the one before drafted."""

from __future__ import annotations

from typing import Any

import torch

from specplug.proposers.draft_sampling import DraftSampler
from specplug.proposers.heads.last_state import DraftSlots, LastStateProposer
from specplug_mlp.head import MlpHead

__all__ = ["MlpProposer"]


class MlpProposer(LastStateProposer):
    """See :class:`LastStateProposer`; nothing here waits for the device."""

    def __init__(self, head: MlpHead, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.head = head

    def draw(self, states: torch.Tensor, token_ids: torch.Tensor, slots: DraftSlots, sampler: DraftSampler) -> None:
        """Stage d drafts slot d of every request that has one."""
        states = self.head.start(states)
        going_on = slots.longer_than(0)
        for depth in range(slots.max_count):
            left = slots.longer_than(depth)
            if len(left) < len(going_on):
                kept = torch.tensor([going_on.index(number) for number in left], device=states.device)
                states, token_ids, going_on = states[kept], token_ids[kept], left
            states = self.head(states, token_ids, depth)
            chosen = self.choose(self.head.logits(states, depth), slots.at(depth), sampler)
            token_ids = self.space.to_target_ids(chosen)
