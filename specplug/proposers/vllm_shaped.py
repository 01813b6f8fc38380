"""Runs a proposer written for vLLM's ``custom_class`` behind our hooks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from specplug.hooks.markers import hookimpl
from specplug.proposers.base import Proposer, rows_to_draft
from specplug.types import Batch, Draft, Request

if TYPE_CHECKING:
    import numpy as np

__all__ = ["VllmShapedProposer"]

_LOGGER = logging.getLogger(__name__)


class VllmShapedProposer(Proposer):
    """Calls ``propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None)`` once a step.

    ``sampled_token_ids``: per row the tokens that are new since the last call, ``[]`` for a row inside its
    prompt. ``num_tokens_no_spec``: int32 ``[max_num_seqs]``; ``token_ids_cpu``: int32
    ``[max_num_seqs, max_model_len]``; rows beyond the batch are garbage, as in vLLM.

    What comes back is checked: None, a wrong number of rows and ids that are not whole numbers raise, rows
    longer than K are cut with one warning, ``-1`` ends a row, an integer tensor or array is converted.
    """

    def __init__(
        self, proposer: Any, *, name: str, num_speculative_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self._proposer = proposer
        self._name = name
        self._num_speculative_tokens = num_speculative_tokens
        self._context = _ContextArrays(max_num_seqs, max_model_len)
        self._num_seen: dict[str, int] = {}
        self._warned = False

    @hookimpl
    def specplug_start_request(self, request: Request) -> None:
        self._num_seen[request.request_id] = len(request.prompt_token_ids)

    @hookimpl
    def specplug_finish_request(self, request: Request) -> None:
        self._num_seen.pop(request.request_id, None)
        self._context.forget(request.request_id)

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        """Raises ``TypeError`` or ``ValueError`` naming the class when its answer breaks the contract above."""
        import torch

        _check_contexts(batch)
        self._context.update(batch)
        sampled = self._new_tokens(batch)
        with torch.inference_mode():
            answer = self._proposer.propose(
                sampled, self._context.num_tokens, self._context.token_ids, slot_mappings=None
            )
        rows = self._checked_rows(answer, len(batch))
        drafts: list[list[int]] = [[] for _ in rows]
        for row in rows_to_draft(batch, limits):
            drafts[row] = rows[row][: limits[row]]
        return Draft.from_lists(drafts)

    def _new_tokens(self, batch: Batch) -> list[list[int]]:
        new_tokens: list[list[int]] = []
        for request, token_ids, is_decoding in zip(batch.requests, batch.token_ids, batch.is_decoding, strict=True):
            if not is_decoding:
                new_tokens.append([])
                continue
            num_seen = self._num_seen.get(request.request_id, len(request.prompt_token_ids))
            self._num_seen[request.request_id] = len(token_ids)
            new_tokens.append(token_ids[num_seen:])
        return new_tokens

    def _checked_rows(self, answer: Any, batch_size: int) -> list[list[int]]:
        if answer is None:
            raise TypeError(
                f"{self._name}.propose() returned None; it must return one list of token ids per request, "
                "[] for no draft"
            )
        if hasattr(answer, "tolist"):  # torch.Tensor, numpy.ndarray
            answer = answer.tolist()
        if not isinstance(answer, Sequence) or isinstance(answer, str):
            raise TypeError(
                f"{self._name}.propose() returned {type(answer).__name__}; it must return one list of token ids "
                "per request or an integer tensor [num_requests, k]"
            )
        if len(answer) != batch_size:
            raise ValueError(
                f"{self._name}.propose() returned {len(answer)} rows for {batch_size} requests; it must return "
                "one list per request, in order, [] for no draft"
            )
        return [self._checked_row(row, number) for number, row in enumerate(answer)]

    def _checked_row(self, row: Any, number: int) -> list[int]:
        values = row.tolist() if hasattr(row, "tolist") else row
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise TypeError(f"{self._name}.propose() returned {row!r} for row {number}; it must be a list of token ids")
        ids: list[int] = []
        for value in values:
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(
                    f"{self._name}.propose() returned {value!r} ({type(value).__name__}) in row {number}; "
                    "token ids must be whole numbers"
                )
            if value == -1:  # vLLM's filler for slots without a token
                break
            ids.append(int(value))
        if len(ids) > self._num_speculative_tokens:
            self._warn_too_long(len(ids), number)
        return ids[: self._num_speculative_tokens]

    def _warn_too_long(self, num_ids: int, number: int) -> None:
        if not self._warned:
            self._warned = True
            _LOGGER.warning(
                "%s.propose() returned %d ids in row %d, above num_speculative_tokens=%d; the rest is cut off, "
                "here and from now on without another warning",
                self._name,
                num_ids,
                number,
                self._num_speculative_tokens,
            )


def _check_contexts(batch: Batch) -> None:
    """A vLLM-shaped proposer reads whole contexts; part of one must never pass for the whole."""
    if len(batch.token_ids) != len(batch):
        raise ValueError(
            f"the batch has {len(batch)} requests and {len(batch.token_ids)} contexts; a vLLM-shaped proposer "
            "needs the whole context of every request"
        )
    for request, token_ids in zip(batch.requests, batch.token_ids, strict=True):
        if len(token_ids) < len(request.prompt_token_ids):
            raise ValueError(
                f"request {request.request_id!r} came with {len(token_ids)} of its {len(request.prompt_token_ids)} "
                "prompt tokens; a vLLM-shaped proposer needs the whole context"
            )


class _ContextArrays:
    """The arrays that vLLM hands over, kept in the batch's row order; a row is copied whole only when it moves."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        import numpy as np

        self.num_tokens: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(max_num_seqs, dtype=np.int32)
        self.token_ids: np.ndarray[Any, np.dtype[np.int32]] = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self._occupants: list[str | None] = [None] * max_num_seqs

    def update(self, batch: Batch) -> None:
        for row, (request_id, token_ids) in enumerate(zip(batch.request_ids, batch.token_ids, strict=True)):
            num_tokens = len(token_ids)
            start = int(self.num_tokens[row]) if self._occupants[row] == request_id else 0
            self.token_ids[row, start:num_tokens] = token_ids.array[start:]
            self.num_tokens[row] = num_tokens
            self._occupants[row] = request_id

    def forget(self, request_id: str) -> None:
        """The id may come again with another text."""
        self._occupants = [None if occupant == request_id else occupant for occupant in self._occupants]
