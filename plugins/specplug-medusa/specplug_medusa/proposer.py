"""Drafting with Medusa heads: head i drafts the i-th token after the newest one, whatever the others draft."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from specplug import Batch, Draft, LawSpan, OneHot
from specplug.proposers.draft_sampling import DraftSampler
from specplug.proposers.heads.last_state import DraftSlots, LastStateProposer
from specplug_medusa.heads import MedusaHeads
from specplug_medusa.tree import HeadTree

__all__ = ["MedusaProposer"]


class MedusaProposer(LastStateProposer):
    """See :class:`LastStateProposer`; nothing here waits for the device. ``tree``: None drafts chains."""

    def __init__(self, heads: MedusaHeads, *args: Any, tree: HeadTree | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.heads = heads
        self.tree = tree

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

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        """A chain of drawn or likeliest tokens, or the tree of the heads' likeliest."""
        if self.tree is None:
            return super().propose(batch, limits)
        counts = self.counts(batch, limits)
        rows = [row for row, count in enumerate(counts) if count]
        if not rows:
            return Draft.empty(len(batch))
        with torch.inference_mode():
            nodes = self._nodes(self.inputs(batch, rows)[0], max(counts))
            drafted = [nodes[number, : counts[row]] for number, row in enumerate(rows)]
            return Draft(
                draft_token_ids=torch.cat(drafted),
                num_draft_tokens=tuple(counts),
                laws=(LawSpan(0, sum(counts), OneHot()),),
                parents=tuple(parent for count in counts for parent in self.tree.parents[:count]),
            )

    def _nodes(self, states: torch.Tensor, num_nodes: int) -> torch.Tensor:
        """The tokens ``[n, num_nodes]`` of the first nodes of the tree."""
        if self.tree is None:
            raise ValueError("this proposer drafts chains")
        widths = self.tree.widths(num_nodes)
        features = self.heads(states)
        likeliest = []
        for head, width in enumerate(widths):
            logits = self.space.restrict(self.heads.logits(features[:, head], head))
            likeliest.append(logits.topk(width, dim=-1).indices)
        starts = [0, *accumulate(widths)]
        columns = [starts[len(path) - 1] + path[-1] for path in self.tree.paths[:num_nodes]]
        return self.space.to_target_ids(torch.cat(likeliest, dim=1)[:, columns])
