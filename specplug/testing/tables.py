"""Next-token tables: what toy targets and sampling proposers are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

__all__ = ["Table", "check_probs", "lookup"]

Table: TypeAlias = Sequence[float] | Mapping[int, Sequence[float]] | Callable[[Sequence[int]], Sequence[float]]
"""One number per token id, in one of three forms: the same row everywhere; a mapping from the context's last token
id to its row; or a function of the context's token ids."""


def lookup(table: Table, token_ids: Sequence[int]) -> Sequence[float]:
    """The table's row after ``token_ids``. Raises ``ValueError`` for a last token that a mapping does not have."""
    if callable(table):
        return table(token_ids)
    if not isinstance(table, Mapping):
        return table
    try:
        return table[token_ids[-1]]
    except KeyError:
        raise ValueError(
            f"the table has no row after token {token_ids[-1]}; it has rows after {sorted(table)}"
        ) from None


def check_probs(table: Table) -> Table:
    """The table, after checking that each row known beforehand is a distribution. Raises ``ValueError``."""
    rows: list[Sequence[float]] = []
    if isinstance(table, Mapping):
        rows = list(table.values())
    elif not callable(table):
        rows = [table]
    for row in rows:
        if min(row) < 0 or abs(sum(row) - 1) > 1e-6:
            raise ValueError(f"{list(row)} is not a distribution: entries must be at least 0 and sum to 1")
    return table
