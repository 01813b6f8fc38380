"""Exact enumeration of the descent, and what it must notice."""

from __future__ import annotations

import pytest

from specplug.testing import tree_exactness
from specplug.testing.exactness import CONTROL_FLOOR, TOLERANCE, World
from specplug.testing.tree_exactness import ROWS, SCHEMES, check_tree, descent, recursive_rejection


def test_the_descent_is_exact_on_every_tree() -> None:
    findings = list(tree_exactness.tree_findings(num_worlds=2))
    assert [finding for finding in findings if finding.total_variation > TOLERANCE] == []
    assert len(findings) == len(ROWS) * len(SCHEMES)
    assert all((finding.mean_accepted or 0.0) > 0.3 for finding in findings)


def test_every_negative_control_fails() -> None:
    findings = list(tree_exactness.tree_controls(num_worlds=2))
    assert [finding for finding in findings if finding.total_variation < CONTROL_FLOOR] == []
    assert len(findings) == 6


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.is_fair])
def test_recursive_rejection_is_exact_on_fair_trees(name: str) -> None:
    """The controls fail for what the trees do, not for the rule that they are tried with."""
    distance, _ = check_tree(World.random(1, depth=2), SCHEMES[name], ROWS["match"], recursive_rejection)
    assert distance <= TOLERANCE


def test_certain_trees_are_accepted_as_often_by_both_rules() -> None:
    """Of deterministic trees the descent accepts what recursive rejection does, the most that can be."""
    world = World.random(1, depth=2)
    found = [
        check_tree(world, SCHEMES["likeliest tokens"], ROWS["match"], rule)[1]
        for rule in (descent, recursive_rejection)
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-12)
