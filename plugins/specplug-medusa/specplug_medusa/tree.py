"""Static trees over the heads: node by node which head drafts it and which of that head's likeliest tokens it is.

Since heads do not look at each other's drafts, a node is its *path* of ranks: ``(0, 2)`` is the third likeliest token
of the second head, after the likeliest of the first. The notation is that of Medusa's ``medusa_choices``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from specplug import ConfigError

__all__ = ["HeadTree", "likeliest_tree"]

_FIRST_RATE = 0.6
_HEAD_DECAY = 0.8
_RANK_DECAY = 0.3
"""A guess at how often the first head's likeliest token is right, and how that falls with every head and rank: about
what trained heads reach. Only the shape of the tree hangs on it."""


@dataclass(frozen=True)
class HeadTree:
    """``paths``: one per node, parents before children; of fewer nodes than there are the first are drafted."""

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Raises ConfigError for paths that form no tree."""
        seen: set[tuple[int, ...]] = {()}
        for path in self.paths:
            if not path or any(type(rank) is not int or rank < 0 for rank in path):
                raise ConfigError(f"medusa_tree: {list(path)} is no path; write ranks from 0 on, such as [0, 1]")
            if path in seen:
                raise ConfigError(f"medusa_tree names {list(path)} twice")
            if path[:-1] not in seen:
                raise ConfigError(f"medusa_tree: {list(path)} needs {list(path[:-1])} before it")
            seen.add(path)

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """As in ``Draft.parents``."""
        numbers = {path: number for number, path in enumerate(self.paths)}
        return tuple(numbers.get(path[:-1], -1) for path in self.paths)

    def widths(self, num_nodes: int) -> list[int]:
        """Per head how many of its likeliest tokens the first ``num_nodes`` nodes need."""
        paths = self.paths[:num_nodes]
        depth = max(map(len, paths), default=0)
        return [1 + max(path[-1] for path in paths if len(path) == head + 1) for head in range(depth)]


def likeliest_tree(num_nodes: int, num_heads: int) -> HeadTree:
    """The ``num_nodes`` likeliest paths of ``num_heads`` heads, likeliest first, by the guess above."""

    def chance(path: Sequence[int]) -> float:
        likely = 1.0
        for head, rank in enumerate(path):
            likely *= _FIRST_RATE * _HEAD_DECAY**head * _RANK_DECAY**rank
        return likely

    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-chance((0,)), (0,))]
    while waiting and len(paths) < num_nodes:
        _, path = heapq.heappop(waiting)
        paths.append(path)
        sibling = (*path[:-1], path[-1] + 1)
        heapq.heappush(waiting, (-chance(sibling), sibling))
        if len(path) < num_heads:
            heapq.heappush(waiting, (-chance((*path, 0)), (*path, 0)))
    return HeadTree(tuple(paths))
