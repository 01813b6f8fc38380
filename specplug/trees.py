"""The shape of one row's draft tree, worked out once per shape and kept: static trees cost nothing per step.

A tree is given by its *parents*: for each draft token (*node*) of the row the index of the node before it, -1 for a
node that continues the text itself. Parents come before their children, so every prefix of the nodes is a tree too.
A chain is the tree ``-1, 0, 1, ...``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ROOT", "Branch", "Tree", "chain_parents", "misplaced_node", "split_trees", "tree_of"]

ROOT = -1
"""The parent of a node that follows the newest committed token."""


class Branch(NamedTuple):
    """A path from the root to a leaf. Its first ``num_shared`` nodes lie on branches listed before it."""

    nodes: tuple[int, ...]
    num_shared: int


class Tree:
    """What the host, the target and the rules need to know of one row's tree. Get it from :func:`tree_of`."""

    def __init__(self, parents: tuple[int, ...]) -> None:
        self.parents = parents
        depths: list[int] = []
        children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
        for node, parent in enumerate(parents):
            depths.append(1 if parent == ROOT else depths[parent] + 1)
            children[parent + 1].append(node)
        self.depths = tuple(depths)
        """Nodes on the path to each node, itself included: it stands that many positions behind the root."""
        self._children = tuple(map(tuple, children))

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        return len(self.parents) == self.max_depth

    @property
    def max_depth(self) -> int:
        """Nodes on the longest path: the most that can be accepted."""
        return max(self.depths, default=0)

    def children(self, node: int) -> tuple[int, ...]:
        """The nodes that continue ``node`` (or ``ROOT``), in the proposer's order."""
        return self._children[node + 1]

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root to ``node``, itself included; none for ``ROOT``."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def has_path(self, nodes: Sequence[int]) -> bool:
        """Whether ``nodes`` is a path from the root, the empty one included."""
        last = nodes[-1] if nodes else ROOT
        return ROOT <= last < len(self) and self.path(last) == tuple(nodes)

    @cached_property
    def first_path(self) -> tuple[int, ...]:
        """From the root to a leaf by every node's first child: the best where likelier siblings come first."""
        nodes: list[int] = []
        while children := self.children(nodes[-1] if nodes else ROOT):
            nodes.append(children[0])
        return tuple(nodes)

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """One path for each leaf, in the leaves' order; every node is new on exactly one of them."""
        seen: set[int] = set()
        branches = []
        for leaf in (node for node in range(len(self)) if not self.children(node)):
            nodes = self.path(leaf)
            branches.append(Branch(nodes, sum(node in seen for node in nodes)))
            seen.update(nodes)
        return tuple(branches)

    @cached_property
    def ancestry(self) -> NDArray[np.bool_]:
        """``[num_nodes, num_nodes]``: entry (i, j) is whether j lies on the path to i, i itself included."""
        import numpy as np

        ancestry: NDArray[Any] = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                ancestry[node] |= ancestry[parent]
        ancestry.flags.writeable = False
        return ancestry


@lru_cache(maxsize=512)
def tree_of(parents: tuple[int, ...]) -> Tree:
    """The tree of well-formed ``parents`` (see :func:`misplaced_node`), kept for the next step of the same shape."""
    return Tree(parents)


def split_trees(parents: tuple[int, ...] | None, counts: Sequence[int]) -> list[Tree | None]:
    """Per row of ``counts`` nodes its tree; None where the row is a chain. ``parents`` as in ``Draft``."""
    if parents is None:
        return [None] * len(counts)
    ends = list(accumulate(counts, initial=0))
    trees = [tree_of(parents[start:stop]) for start, stop in pairwise(ends)]
    return [None if tree.is_chain else tree for tree in trees]


def chain_parents(num_nodes: int) -> tuple[int, ...]:
    """``-1, 0, 1, ...``."""
    return tuple(range(-1, num_nodes - 1))


def misplaced_node(parents: Sequence[int]) -> int | None:
    """The first node whose parent is neither -1 nor a node before it, which also rules out cycles; None if all fit."""
    return next((node for node, parent in enumerate(parents) if not ROOT <= parent < node), None)
