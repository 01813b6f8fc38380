"""Draft tokens in the order in which text would hold them: a chain is one path, a tree one for each of its leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from specplug.trees import Tree

__all__ = ["DraftPath", "Ids", "draft_paths"]

Ids: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class DraftPath:
    """Logit row ``rows[j]`` is about the token that follows the request's text and ``draft_ids[: first + j]``.

    The rows before ``first`` lie on another path of the same request: every logit row is on exactly one.
    """

    draft_ids: list[int]
    rows: Ids
    first: int = 0


def draft_paths(draft_ids: Sequence[int], first_row: int, tree: Tree | None) -> list[DraftPath]:
    """The paths of one request. ``draft_ids``: its draft tokens; ``first_row``: of its logit rows."""
    if tree is None:
        return [DraftPath(list(draft_ids), np.arange(first_row, first_row + len(draft_ids) + 1))]
    paths: list[DraftPath] = []
    for nodes, num_shared in tree.branches:
        rows = first_row + np.array((0, *(node + 1 for node in nodes)))
        first = num_shared + 1 if paths else 0
        paths.append(DraftPath([draft_ids[node] for node in nodes], rows[first:], first))
    return paths
