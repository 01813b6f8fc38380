from __future__ import annotations

import pytest
from specplug_suffix.lengths import DraftLengths


def lengths(up_to: int, **rules: float) -> list[int]:
    table = DraftLengths(**rules)  # type: ignore[arg-type]
    return [table[match] for match in range(up_to)]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"max_draft": 8, "factor": 2.0}, [0, 2, 4, 6, 8, 8, 8]),
        ({"max_draft": 3, "factor": 1.0}, [0, 1, 2, 3, 3, 3, 3]),
        ({"max_draft": 8, "factor": 0.5}, [0, 0, 1, 1, 2, 2, 3]),
        ({"max_draft": 8, "factor": 0.0}, [0, 0, 0, 0, 0, 0, 0]),
        ({"max_draft": 8, "factor": 2.0, "min_match": 3}, [0, 0, 0, 6, 8, 8, 8]),
        ({"max_draft": 8, "factor": 1.0, "max_depth": 6}, [0, 1, 2, 3, 3, 3, 3]),
        ({"max_draft": 8, "factor": 2.0, "max_depth": 6}, [0, 2, 4, 4, 4, 4, 4]),
        ({"max_draft": 2, "factor": 2.0, "max_depth": 24}, [0, 2, 2, 2, 2, 2, 2]),
        ({"max_draft": 8, "factor": 2.0, "max_depth": 1}, [0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_draft_length_by_match(rules: dict[str, float], expected: list[int]) -> None:
    assert lengths(7, **rules) == expected


@pytest.mark.parametrize(("depth", "factor", "longest"), [(24, 1.0, 12), (64, 1.0, 32), (24, 4.0, 19), (64, 4.0, 51)])
def test_a_tree_of_that_depth_drafts_at_most(depth: int, factor: float, longest: int) -> None:
    """What was measured at vLLM's peer, with no other bound."""
    assert max(lengths(200, max_draft=1000, factor=factor, max_depth=depth)) == longest


def test_rounding_and_long_matches() -> None:
    assert DraftLengths(max_draft=100, factor=0.1)[30] == 3, "0.1 * 30 is 3, not 2.9999"
    assert DraftLengths(max_draft=100, factor=1e-9)[10**6] == 0
    assert DraftLengths(max_draft=100, factor=2.0)[10**9] == 100
