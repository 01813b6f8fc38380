"""Convenience bases for proposers. A plugin may just as well be any object with ``@hookimpl`` methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from specplug.hooks.markers import hookimpl
from specplug.types import Batch, Draft, TokenIds

__all__ = ["Proposer", "RowProposer", "rows_to_draft"]


def rows_to_draft(batch: Batch, limits: Sequence[int]) -> list[int]:
    """The rows that may get draft tokens: their limit is above 0 and they are past their prompt."""
    return [
        row
        for row, (limit, is_decoding) in enumerate(zip(limits, batch.is_decoding, strict=True))
        if limit > 0 and is_decoding
    ]


class Proposer(ABC):
    """A proposer that drafts for the whole batch: write ``propose``.

    The base does one thing: it answers the hook ``specplug_propose`` with ``propose``. Any other hook is added
    as a method of the hook's name, marked with ``@hookimpl``; override ``propose``, not the hook.
    """

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft | None:
        return self.propose(batch, limits)

    @abstractmethod
    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft | None:
        """Draft at most ``limits[row]`` tokens for each row of ``batch``; None: not me, ask the next proposer."""


class RowProposer(Proposer):
    """A proposer of deterministic tokens that looks at one request at a time: write ``propose_row``.

    The drafts are handed over with the law ``one_hot``: draft the same tokens for the same context. Rows whose
    limit is 0 and rows inside their prompt are never asked.
    """

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        """The answers of ``propose_row`` as one draft.

        Raises ``TypeError`` when ``propose_row`` does not return a list, tuple, array or tensor of ids.
        """
        drafts: list[Sequence[int]] = [[] for _ in batch.requests]
        for row in rows_to_draft(batch, limits):
            draft: Any = self.propose_row(batch.token_ids[row], limits[row])
            if hasattr(draft, "tolist"):  # arrays and tensors
                draft = draft.tolist()
            if not isinstance(draft, list | tuple):
                raise TypeError(
                    f"{type(self).__name__}.propose_row returned {draft!r} for request "
                    f"{batch.request_ids[row]!r}; it must return a list of token ids, [] for no draft"
                )
            drafts[row] = draft
        return Draft.from_lists(drafts)

    @abstractmethod
    def propose_row(self, token_ids: TokenIds, limit: int) -> Sequence[int]:
        """At most ``limit`` (1 or more) ids that may follow ``token_ids`` (prompt and output so far), or ``[]``.

        A one-dimensional integer array or tensor is understood too.
        """
