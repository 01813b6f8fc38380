"""Shapes of draft trees, and drafts that hold them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from specplug.trees import ROOT, Branch, Tree, chain_parents, misplaced_node, tree_of
from specplug.types import Dense, Draft, LawSpan, OneHot, SourceSpan

#        root
#       /    \\
#      0      1
#     / \\      \\
#    2   3      4
#    |
#    5
PARENTS = (-1, -1, 0, 0, 1, 2)
TOKENS = [10, 11, 12, 13, 14, 15]


def random_parents(rng: random.Random, num_nodes: int) -> tuple[int, ...]:
    return tuple(rng.randrange(-1, node) for node in range(num_nodes))


def test_depths_children_and_paths() -> None:
    tree = Tree(PARENTS)
    assert tree.depths == (1, 1, 2, 2, 2, 3)
    assert (tree.max_depth, len(tree), tree.is_chain) == (3, 6, False)
    assert [tree.children(node) for node in range(-1, 6)] == [(0, 1), (2, 3), (4,), (5,), (), (), ()]
    assert (tree.path(5), tree.path(ROOT), tree.first_path) == ((0, 2, 5), (), (0, 2, 5))
    assert tree.branches == (Branch((0, 3), 0), Branch((1, 4), 0), Branch((0, 2, 5), 1))


def test_a_chain_and_no_node() -> None:
    chain = tree_of(chain_parents(4))
    assert (chain.parents, chain.is_chain, chain.first_path) == ((-1, 0, 1, 2), True, (0, 1, 2, 3))
    assert chain.branches == (Branch((0, 1, 2, 3), 0),)
    nothing = tree_of(())
    assert (nothing.max_depth, nothing.is_chain, nothing.first_path, nothing.branches) == (0, True, (), ())


def test_random_trees_agree_with_walks_from_each_node() -> None:
    rng = random.Random(0)
    for _ in range(100):
        tree = tree_of(random_parents(rng, rng.randint(1, 12)))
        paths = [tree.path(node) for node in range(len(tree))]
        assert tree.depths == tuple(map(len, paths))
        expected = [[other in path for other in range(len(tree))] for path in paths]
        assert np.array_equal(tree.ancestry, expected)
        new = [node for branch in tree.branches for node in branch.nodes[branch.num_shared :]]
        assert sorted(new) == list(range(len(tree)))
        seen: set[int] = set()
        for nodes, num_shared in tree.branches:
            assert seen.issuperset(nodes[:num_shared])
            assert seen.isdisjoint(nodes[num_shared:])
            seen.update(nodes)


@pytest.mark.parametrize(
    ("parents", "node"), [((), None), (PARENTS, None), ((0,), 0), ((-1, 2, 0), 1), ((-1, 1), 1), ((-1, -2), 1)]
)
def test_misplaced_nodes(parents: tuple[int, ...], node: int | None) -> None:
    assert misplaced_node(parents) == node


def test_from_trees() -> None:
    draft = Draft.from_trees([TOKENS, [], [7, 8]], [PARENTS, [], np.array([-1, 0])], source="mine")
    assert draft.draft_token_ids.tolist() == [*TOKENS, 7, 8]
    assert draft.num_draft_tokens == (6, 0, 2)
    assert draft.parents == (*PARENTS, -1, 0)
    assert all(type(parent) is int for parent in draft.parents)
    assert draft.sources == (SourceSpan(0, 8, "mine"),)
    assert [tree and tree.parents for tree in draft.trees()] == [PARENTS, None, None]
    with pytest.raises(ValueError, match="row 1 has 2 draft tokens and 1 parents"):
        Draft.from_trees([[], [1, 2]], [[], [-1]])
    with pytest.raises(TypeError, match=r"0\.5 is no token id"):
        Draft.from_trees([[1]], [[0.5]])  # type: ignore[list-item]


def test_truncation_counts_nodes_and_keeps_ancestors() -> None:
    rng = random.Random(1)
    for _ in range(50):
        parents = [random_parents(rng, rng.randint(0, 8)) for _ in range(3)]
        draft = Draft.from_trees([[rng.randrange(9) for _ in row] for row in parents], parents)
        limits = [rng.randint(0, 8) for _ in parents]
        cut = draft.truncate(limits)
        assert cut.num_draft_tokens == tuple(min(len(row), limit) for row, limit in zip(parents, limits, strict=True))
        kept = tuple(parent for row, limit in zip(parents, limits, strict=True) for parent in row[:limit])
        chains = tuple(parent for count in cut.num_draft_tokens for parent in chain_parents(count))
        assert cut.parents == (None if kept == chains and cut is not draft else kept)
        assert misplaced_node(kept[: cut.num_draft_tokens[0]]) is None


def test_selecting_nodes_takes_laws_sources_confidence_and_parents_along() -> None:
    logits = torch.arange(6.0)[:, None].expand(6, 4)
    draft = Draft(
        torch.tensor([*TOKENS, 7]),
        (6, 1),
        (LawSpan(0, 6, Dense(logits)), LawSpan(6, 7, OneHot())),
        (SourceSpan(0, 2, "a"), SourceSpan(2, 7, "b")),
        torch.arange(7.0),
        (*PARENTS, -1),
    )
    some = draft.select_nodes([[0, 1, 3, 4], None])
    assert some.draft_token_ids.tolist() == [10, 11, 13, 14, 7]
    assert some.parents == (-1, -1, 0, 1, -1)
    assert some.num_draft_tokens == (4, 1)
    law = some.laws[0].law
    assert isinstance(law, Dense)
    assert law.draft_logits[:, 0].tolist() == [0.0, 1.0, 3.0, 4.0]
    assert some.sources == (SourceSpan(0, 2, "a"), SourceSpan(2, 5, "b"))
    assert some.confidence is not None
    assert some.confidence.tolist() == [0, 1, 3, 4, 6]
    assert draft.select_nodes([None, None]) is draft
    chains = Draft.from_lists([[1, 2, 3]]).select_nodes([[0, 1]])
    assert (chains.draft_token_ids.tolist(), chains.parents) == ([1, 2], None)


def test_flattening_keeps_first_paths() -> None:
    draft = Draft.from_trees([TOKENS, [1, 2, 3], [4, 5]], [PARENTS, [-1, 0, 1], [-1, -1]])
    flat = draft.to_chains()
    assert (flat.num_draft_tokens, flat.draft_token_ids.tolist(), flat.parents) == (
        (3, 3, 1),
        [10, 12, 15, 1, 2, 3, 4],
        None,
    )
    some = draft.to_chains([0])
    assert (some.num_draft_tokens, some.parents) == ((3, 3, 2), (-1, 0, 1, -1, 0, 1, -1, -1))
    assert draft.select_rows([2, 1]).parents == (-1, -1, -1, 0, 1)
    chains = Draft.from_lists([[1], [2]])
    assert chains.to_chains() is chains
