"""Exact enumeration for draft trees: the descent is exact whatever tree it is given, rules that read laws are not.

Trees are drawn in every way that proposers use, and in four ways that are known to bias rules which accept by laws
(recursive rejection, written here as the control): laws that are not renormalised after a draw without replacement,
duplicates dropped, siblings ordered by the probability of what was drawn, nodes pruned by it. The descent must be
exact on all of them, recursive rejection on the others only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from specplug.testing.exactness import Finding, Outcome, Tokens, World, distribution, processed, total_variation
from specplug.trees import ROOT
from specplug.types import LawSpan, OneHot
from specplug.verify import reference
from specplug.verify.inputs import RowInputs, VerifyInputs

__all__ = ["tree_controls", "tree_findings"]

Law: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Node:
    """A draft token, its parent, and the law it claims to be drawn from."""

    token_id: int
    parent: int
    law: Law


Nodes: TypeAlias = list[Node]
Change: TypeAlias = Callable[[World, Nodes], Nodes]
TreeRule: TypeAlias = Callable[[reference.RowProblem, Nodes, reference.Chance], list[int]]

SHAPE = (ROOT, ROOT, 0, 0, 1)
"""Two tokens, two behind the first, one behind the second."""


def path_of(nodes: Sequence[Node], node: int) -> Tokens:
    """The tokens from the root to ``node``, itself included."""
    tokens: Tokens = ()
    while node != ROOT:
        tokens = (nodes[node].token_id, *tokens)
        node = nodes[node].parent
    return tokens


# --- how trees come about ----------------------------------------------------------------------------------------


def _siblings_before(nodes: Nodes, parent: int) -> list[int]:
    return [node.token_id for node in nodes if node.parent == parent]


def _likeliest(world: World, chance: reference.Chance, nodes: Nodes, parent: int, law: Law) -> Node:
    rank = len(_siblings_before(nodes, parent))
    token_id = int(np.argsort(-law, kind="stable")[rank])
    return Node(token_id, parent, np.asarray(np.eye(world.vocab)[token_id]))


def _drawn(world: World, chance: reference.Chance, nodes: Nodes, parent: int, law: Law) -> Node:
    return Node(chance.draw(0, law), parent, law)


def _left(nodes: Nodes, parent: int, law: Law) -> Law:
    left = law.copy()
    left[_siblings_before(nodes, parent)] = 0.0
    return np.asarray(left / left.sum())


def _without_replacement(world: World, chance: reference.Chance, nodes: Nodes, parent: int, law: Law) -> Node:
    left = _left(nodes, parent, law)
    return Node(chance.draw(0, left), parent, left)


def _not_renormalised(world: World, chance: reference.Chance, nodes: Nodes, parent: int, law: Law) -> Node:
    return Node(chance.draw(0, _left(nodes, parent, law)), parent, law)


def _likeliest_then_drawn(world: World, chance: reference.Chance, nodes: Nodes, parent: int, law: Law) -> Node:
    grow = _without_replacement if _siblings_before(nodes, parent) else _likeliest
    return grow(world, chance, nodes, parent, law)


def _select(nodes: Nodes, kept: Sequence[int]) -> Nodes:
    """These nodes in this order; those whose parent is gone go too."""
    place = {ROOT: ROOT}
    selected: Nodes = []
    for number in kept:
        node = nodes[number]
        if node.parent in place:
            place[number] = len(selected)
            selected.append(Node(node.token_id, place[node.parent], node.law))
    return selected


def _chance_of(world: World, nodes: Nodes, number: int) -> float:
    return float(world.draft[path_of(nodes, nodes[number].parent)][nodes[number].token_id])


def _pruned(world: World, nodes: Nodes) -> Nodes:
    return _select(nodes, [number for number in range(len(nodes)) if _chance_of(world, nodes, number) >= 0.3])


def _likely_first(world: World, nodes: Nodes) -> Nodes:
    levels = [len(path_of(nodes, number)) for number in range(len(nodes))]
    order = sorted(range(len(nodes)), key=lambda number: (levels[number], -_chance_of(world, nodes, number)))
    return _select(nodes, order)


def _distinct(world: World, nodes: Nodes) -> Nodes:
    seen = {(node.parent, node.token_id): number for number, node in reversed(list(enumerate(nodes)))}
    return _select(nodes, sorted(seen.values()))


def _as_drawn(world: World, nodes: Nodes) -> Nodes:
    return nodes


@dataclass(frozen=True)
class TreeScheme:
    """``grow`` makes the next node behind a parent; ``change`` looks at the whole tree. ``is_fair``: whether rules
    that accept by laws may rely on the laws it claims."""

    grow: Callable[[World, reference.Chance, Nodes, int, Law], Node]
    change: Change = _as_drawn
    is_fair: bool = True


SCHEMES: dict[str, TreeScheme] = {
    "likeliest tokens": TreeScheme(_likeliest),
    "independent draws": TreeScheme(_drawn),
    "draws without replacement": TreeScheme(_without_replacement),
    "the likeliest, then a draw without it": TreeScheme(_likeliest_then_drawn),
    "law not renormalised without replacement": TreeScheme(_not_renormalised, is_fair=False),
    "duplicates dropped": TreeScheme(_drawn, _distinct, is_fair=False),
    "siblings ordered by their own probability": TreeScheme(_drawn, _likely_first, is_fair=False),
    "nodes pruned by their own probability": TreeScheme(_drawn, _pruned, is_fair=False),
}


def draw_tree(world: World, scheme: TreeScheme, chance: reference.Chance) -> Nodes:
    """A tree of ``SHAPE``, as the scheme's proposer makes it."""
    nodes: Nodes = []
    for parent in SHAPE:
        nodes.append(scheme.grow(world, chance, nodes, parent, world.draft[path_of(nodes, parent)]))
    return scheme.change(world, nodes)


# --- rules ---------------------------------------------------------------------------------------------------------


def descent(problem: reference.RowProblem, nodes: Nodes, chance: reference.Chance) -> list[int]:
    """What verifies trees here."""
    return reference.match(problem, chance)


def recursive_rejection(problem: reference.RowProblem, nodes: Nodes, chance: reference.Chance) -> list[int]:
    """SpecInfer's multi-step rule: test the children in order, each against what those before it left."""
    emitted: list[int] = []
    node = ROOT
    while True:
        left = problem.target_laws(node + 1)
        for child in [number for number, each in enumerate(nodes) if each.parent == node]:
            token_id, law = nodes[child].token_id, nodes[child].law
            if chance.accepts(0, min(1.0, float(left[token_id] / law[token_id]))):
                break
            rest = np.maximum(left - law, 0.0)
            left = rest / rest.sum()
        else:
            return [*emitted, chance.draw(0, left)]
        emitted.append(token_id)
        node = child


def _tested_one_by_one(problem: reference.RowProblem, nodes: Nodes, chance: reference.Chance) -> list[int]:
    """A mistake: every child is tested against the whole target law, whatever was rejected before it."""
    emitted: list[int] = []
    node = ROOT
    while True:
        law = problem.target_laws(node + 1)
        children = [number for number, each in enumerate(nodes) if each.parent == node]
        child = next((each for each in children if chance.accepts(0, float(law[nodes[each].token_id]))), None)
        if child is None:
            return [*emitted, chance.draw(0, law)]
        emitted.append(nodes[child].token_id)
        node = child


def _logits_of_first_children(problem: reference.RowProblem, nodes: Nodes, chance: reference.Chance) -> list[int]:
    """A mistake: the law after a node is read from the row of its first sibling."""
    emitted: list[int] = []
    node: int | None = ROOT
    while node is not None:
        row = node if node == ROOT else [each.parent for each in nodes].index(nodes[node].parent)
        emitted.append(chance.draw(len(emitted), problem.target_laws(row + 1)))
        node = problem.next_node(node, emitted[-1])
    return emitted


# --- the tables ----------------------------------------------------------------------------------------------------


def problem_of(world: World, row: RowInputs, nodes: Nodes) -> reference.RowProblem:
    """The verification problem that a host would pose for this tree."""
    num_nodes = len(nodes)
    contexts = [path_of(nodes, node) for node in range(-1, num_nodes)]
    logits = torch.stack([torch.from_numpy(world.target[context]).log() for context in contexts])
    ids = torch.tensor([node.token_id for node in nodes], dtype=torch.int64)
    laws = (LawSpan(0, num_nodes, OneHot()),) if num_nodes else ()
    parents = tuple(node.parent for node in nodes)
    return reference.row_problem(VerifyInputs(logits, ids, (num_nodes,), laws, (row,), parents=parents), 0)


def check_tree(world: World, scheme: TreeScheme, row: RowInputs, rule: TreeRule) -> tuple[float, float]:
    """One step of one request: total variation, and mean number of accepted tokens."""

    @cache
    def posed(drawn: tuple[tuple[int, int], ...]) -> reference.RowProblem:
        nodes = [Node(token_id, parent, world.draft[()]) for token_id, parent in drawn]
        return problem_of(world, row, nodes)

    def run(chance: reference.Chance) -> Outcome:
        nodes = draw_tree(world, scheme, chance)
        problem = posed(tuple((node.token_id, node.parent) for node in nodes))
        return (tuple(rule(problem, nodes, chance)),)

    emitted = distribution(run)
    mean_accepted = sum((len(tokens) - 1) * weight for (tokens,), weight in emitted.items())
    return total_variation(emitted, (processed(world, row),), world.depth + 1), mean_accepted


ROWS: dict[str, RowInputs] = {
    "greedy": RowInputs("greedy", is_greedy=True),
    "match": RowInputs("match"),
    "match, T 0.7, top-k 2": RowInputs("match", temperature=0.7, top_k=2),
}


def _worlds(num_worlds: int) -> list[World]:
    return [World.random(seed, vocab=3, depth=2, shared=0.4) for seed in range(num_worlds)]


def tree_findings(num_worlds: int = 3) -> Iterator[Finding]:
    """The descent on every kind of tree; the worst of ``num_worlds`` worlds. All must be exact."""
    for row_name, row in ROWS.items():
        for name, scheme in SCHEMES.items():
            found = [check_tree(world, scheme, row, descent) for world in _worlds(num_worlds)]
            worst, accepted = max(f[0] for f in found), sum(f[1] for f in found) / len(found)
            yield Finding(f"tree, {row_name} / {name}", worst, accepted)


def tree_controls(num_worlds: int = 3) -> Iterator[Finding]:
    """Recursive rejection on the trees that bias it, and mistakes of a descent. Each must fail."""
    row = ROWS["match"]
    for name, scheme in SCHEMES.items():
        if not scheme.is_fair:
            worst = max(check_tree(world, scheme, row, recursive_rejection)[0] for world in _worlds(num_worlds))
            yield Finding(f"tree, recursive rejection / {name}", worst)
    for rule, name in (
        (_tested_one_by_one, "children tested one by one against the whole law"),
        (_logits_of_first_children, "logits of a sibling's row"),
    ):
        worst = max(check_tree(world, SCHEMES["likeliest tokens"], row, rule)[0] for world in _worlds(num_worlds))
        yield Finding(f"tree, {name}", worst)
