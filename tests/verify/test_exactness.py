"""Exact enumeration of the reference, and the mistakes it must notice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specplug.testing import exactness
from specplug.testing.exactness import CONTROL_FLOOR, TOLERANCE, Scheme, World, check_step
from specplug.verify import reference
from specplug.verify.inputs import RowInputs


def test_every_rule_and_law_is_exact() -> None:
    findings = list(exactness.exact_findings(num_worlds=2))
    assert [finding for finding in findings if finding.total_variation > TOLERANCE] == []
    assert len(findings) > 60


def test_every_negative_control_fails() -> None:
    findings = list(exactness.negative_controls())
    assert [finding for finding in findings if finding.total_variation < CONTROL_FLOOR] == []
    assert len(findings) == 5


def constant_world(target: list[float], draft: list[float], depth: int) -> World:
    contexts = [c for n in range(depth + 1) for c in itertools.product(range(len(target)), repeat=n)]
    return World(
        dict.fromkeys(contexts, np.array(target)), dict.fromkeys(contexts, np.array(draft)), len(target), depth
    )


@pytest.mark.parametrize(("depth", "block", "token"), [(2, 0.875, 0.75), (3, 1.125, 0.875)])
def test_B49_accepted_lengths_to_the_last_digit(depth: int, block: float, token: float) -> None:
    world, dense = constant_world([0.25, 0.75], [0.75, 0.25], depth), Scheme(("dense",))
    for rule, row, expected in (
        (reference.block, RowInputs("block"), block),
        (reference.standard, RowInputs("standard"), token),
    ):
        distance, accepted = check_step(world, dense, row, rule)
        assert distance <= TOLERANCE
        assert accepted == pytest.approx(expected, abs=1e-12)


def test_certain_drafts_make_all_rules_accept_alike() -> None:
    world = World.random(11)
    accepted = [
        check_step(world, Scheme(("one_hot",)), RowInputs(rule.__name__), rule)[1]  # type: ignore[arg-type]
        for rule in (reference.match, reference.standard, reference.block)
    ]
    assert accepted == pytest.approx([accepted[0]] * 3, abs=1e-12)


def test_the_table_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one = exactness.Finding("some rule", 1e-16, 1.5)
    monkeypatch.setattr(exactness, "exact_findings", lambda: iter([one]))
    monkeypatch.setattr(exactness, "negative_controls", lambda: iter([exactness.Finding("some control", 0.1)]))
    assert exactness.main() == 0
    assert "some rule" in capsys.readouterr().out
    monkeypatch.setattr(exactness, "negative_controls", lambda: iter([exactness.Finding("some control", 1e-9)]))
    assert exactness.main() == 1
