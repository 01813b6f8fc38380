"""EAGLE-2's dynamic draft tree: as many guesses as the head is unsure of, in one verification.

Algorithm of Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024): a node's value
is the product of the head's probabilities on its path. At each depth the children of the ``width`` best nodes are
scored, the ``width`` best of them are expanded next; of all scored nodes the most valuable are drafted. Values only
fall along a path, so these form a tree, and the best n of them are also the tree for a limit of n.

The shape depends on the head's probabilities, so each depth is read back from the device. All nodes expanded so far are
run again at each depth: they are few, and a tree's nodes see each other within one forward only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from specplug.proposers.heads.proposer import HeadProposer
from specplug.trees import ROOT, tree_of
from specplug.types import Batch, Draft

__all__ = ["TreeHeadProposer"]


@dataclass(slots=True)
class _Growth:
    """The scored nodes of one request; ``parents`` are indices of these, ``ROOT`` for the first ones."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    """Sums of the log-probabilities from the root."""
    frontier: list[int] = field(default_factory=list)
    """The nodes to expand next."""
    expanded: list[int] = field(default_factory=list)

    def add(
        self, parents: Sequence[int], token_ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]
    ) -> None:
        """Score children of ``parents``, a list for each, and make the best ``len(log_probs[0])`` the frontier."""
        first = len(self.values)
        for parent, ids, scores in zip(parents, token_ids, log_probs, strict=True):
            value = 0.0 if parent == ROOT else self.values[parent]
            self.token_ids += ids
            self.parents += [parent] * len(ids)
            self.log_probs += scores
            self.values += [value + score for score in scores]
        self.frontier = self._best(range(first, len(self.values)), len(log_probs[0]))

    def _best(self, nodes: Sequence[int], count: int) -> list[int]:
        """Of equal values the first, so that parents stay before their children."""
        return sorted(nodes, key=lambda node: -self.values[node])[:count]

    def drafted(self, count: int) -> list[int]:
        """The most valuable nodes, parents first."""
        possible = [node for node, value in enumerate(self.values) if value > -torch.inf]
        return self._best(possible, count)

    def parents_among(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """The parents of ``nodes`` as places in that list."""
        places = {node: place for place, node in enumerate(nodes)}
        return tuple(places.get(self.parents[node], ROOT) for node in nodes)


class TreeHeadProposer(HeadProposer):
    """Drafts trees with paths of at most ``depth`` tokens; a row's limit counts nodes. No node is drawn at random."""

    def __init__(self, *args: Any, depth: int, width: int, **settings: Any) -> None:
        """``width``: children scored of each node, and nodes expanded at each depth. Others: see ``HeadProposer``."""
        super().__init__(*args, **settings)
        self.depth = depth
        self.width = width

    def _room(self, request_id: str) -> int:
        room = super()._room(request_id)
        return room if room > (self.depth - 1) * self.width else 0

    def _draft(self, batch: Batch, counts: Sequence[int]) -> Draft:
        rows = self._wanted(batch, counts)
        with torch.inference_mode():
            grown = dict(
                zip((row.request_id for row in rows), self._grow([row.request_id for row in rows]), strict=True)
            )
        token_ids: list[list[int]] = []
        parents: list[Sequence[int]] = []
        confidence: list[float] = []
        for request_id, count in zip(batch.request_ids, counts, strict=True):
            growth = grown.get(request_id) or _Growth()
            nodes = growth.drafted(count)
            token_ids.append([growth.token_ids[node] for node in nodes])
            parents.append(growth.parents_among(nodes))
            confidence += [growth.log_probs[node] for node in nodes]
        return replace(Draft.from_trees(token_ids, parents), confidence=torch.tensor(confidence).exp())

    def _grow(self, request_ids: Sequence[str]) -> list[_Growth]:
        outputs = self._reader.read(request_ids, None, [1] * len(request_ids))
        grown = [_Growth() for _ in request_ids]
        token_ids, log_probs = self._children(outputs)
        for number, growth in enumerate(grown):
            growth.add([ROOT], [token_ids[number]], [log_probs[number]])
        features = outputs[:, None].expand(-1, len(token_ids[0]), -1)
        fed = features[:, :0]
        for _ in range(1, self.depth):
            fed = torch.cat((fed, features), 1)
            outputs = self._run(request_ids, grown, fed)
            features = self._expand(grown, outputs[:, -features.shape[1] :])
        return grown

    def _run(self, request_ids: Sequence[str], grown: Sequence[_Growth], fed: torch.Tensor) -> torch.Tensor:
        """Read all nodes expanded so far, the frontier last; outputs ``[requests, nodes, hidden]``."""
        for growth in grown:
            growth.expanded += growth.frontier
        ids = [growth.token_ids[node] for growth in grown for node in growth.expanded]
        trees = [tree_of(growth.parents_among(growth.expanded)) for growth in grown]
        outputs = self._reader.append_trees(
            torch.tensor(ids, device=fed.device), fed.flatten(0, 1), dict(zip(request_ids, trees, strict=True))
        )
        return outputs.view(fed.shape)

    def _expand(self, grown: Sequence[_Growth], outputs: torch.Tensor) -> torch.Tensor:
        """Score the children of the frontier ``[requests, width, hidden]``; the features of the next one."""
        num_rows, num_nodes, _ = outputs.shape
        token_ids, log_probs = self._children(outputs.flatten(0, 1))
        chosen: list[int] = []
        for number, growth in enumerate(grown):
            start, old = number * num_nodes, list(growth.frontier)
            of_row = slice(start, start + num_nodes)
            growth.add(old, token_ids[of_row], log_probs[of_row])
            chosen += [start + old.index(growth.parents[node]) for node in growth.frontier]
        index = torch.tensor(chosen, device=outputs.device)
        return outputs.flatten(0, 1)[index].view(num_rows, -1, outputs.shape[-1])

    def _children(self, outputs: torch.Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """The ``width`` likeliest target ids after each output, and their log-probabilities."""
        logits = self._space.restrict(self.head.logits(outputs)).float()
        best = logits.log_softmax(-1).topk(min(self.width, logits.shape[-1]))
        return self._space.to_target_ids(best.indices).tolist(), best.values.tolist()
