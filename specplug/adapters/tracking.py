"""Which request is which, where a server shows texts and no names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from specplug.types import Request

__all__ = ["DoorRow", "RequestTracker", "TokenArray", "TrackedRequest"]

TokenArray: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]

MAX_STEPS_ABSENT = 512
"""A request that has not been shown for so many steps has left."""


class DoorRow(NamedTuple):
    """One request of a step, as a server shows it.

    ``token_ids``: ``[num_tokens]`` int32, prompt and output so far; only read, and copied.
    ``num_new``: tokens at its end that came since the last step; 0 for a request inside its prompt; None where the
    server does not tell, and then every draft must have been verified.
    ``limit``: most draft tokens of the row; None: as many as are configured.
    ``key``: the server's own name of the request; None: it is told by its text.
    """

    token_ids: TokenArray
    num_new: int | None = None
    limit: int | None = None
    key: str | None = None


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request that was seen, with its text, and the draft that it was given last."""

    request_id: str
    key: str | None
    buffer: TokenArray
    """The text, in its first ``num_tokens`` places."""
    num_tokens: int = 0
    num_before: int = 0
    """Length of the text before this step's tokens came; with ``is_new``, of the prompt."""
    is_new: bool = True
    request: Request | None = None
    draft: tuple[int, ...] = ()
    sources: tuple[tuple[str, int], ...] = ()
    """Proposer and number of tokens, for each part of the draft."""
    skip_reason: str | None = "prefill"
    """Why ``draft`` is empty."""
    num_verify_steps: int = 0
    last_step: int = 0

    @property
    def text(self) -> TokenArray:
        """``[num_tokens]``, a view."""
        return self.buffer[: self.num_tokens]

    def grow_to(self, token_ids: TokenArray) -> None:
        """Take over what ``token_ids`` has beyond the text."""
        start, stop = self.num_tokens, len(token_ids)
        if stop > len(self.buffer):  # views of the old buffer stay what they are
            buffer = np.empty(max(stop, 2 * len(self.buffer)), dtype=np.int32)
            buffer[:start] = self.buffer[:start]
            self.buffer = buffer
        self.buffer[start:stop] = token_ids[start:]
        self.num_tokens = stop


class RequestTracker:
    """Follows requests from step to step by what they say, whatever rows they move to.

    A row belongs to the request whose text it continues: the one in the same row if that fits, else the longest.
    Requests with equal texts are interchangeable. What continues nothing is a new request. The text is compared to its
    beginning in every step: a microsecond for a thousand tokens.
    """

    def __init__(self, max_num_seqs: int) -> None:
        """``max_num_seqs``: most requests that are remembered, absent ones included; plugins have room for no more."""
        self._max_requests = max_num_seqs
        self._requests: dict[str, TrackedRequest] = {}
        self._last_rows: list[TrackedRequest] = []
        self._num_steps = 0
        self._num_requests = 0

    def __len__(self) -> int:
        return len(self._requests)

    def follow(self, rows: Sequence[DoorRow], *, after_a_gap: bool = False) -> list[TrackedRequest]:
        """The request of every row, in order, its text brought up to the row's.

        ``after_a_gap``: the server may have taken steps that were not shown since the last call. Otherwise a longer
        text is another request: the next turn of a chat begins with the whole text of the one before.
        """
        self._num_steps += 1
        found: list[TrackedRequest | None] = [None] * len(rows)
        for number, (row, request) in enumerate(zip(rows, self._last_rows, strict=False)):
            if self._continues(request, row):
                found[number] = self._take(request, row)
        self._last_rows = [
            request if request is not None else self._find(row, after_a_gap=after_a_gap) or self._start(row)
            for row, request in zip(rows, found, strict=True)
        ]
        return list(self._last_rows)

    def leave(self, key: str) -> TrackedRequest | None:
        """Forget the request of that key; None when there is none."""
        request = next((each for each in self._requests.values() if each.key == key), None)
        return None if request is None else self._requests.pop(request.request_id)

    def take_absent(self) -> list[TrackedRequest]:
        """Forget the requests that have left, as far as one can tell: long absent, or too many to be running."""
        absent = [each for each in self._requests.values() if each.last_step < self._num_steps]
        absent.sort(key=lambda each: each.last_step)
        num_over = max(0, len(self._requests) - self._max_requests)
        gone = [
            each
            for number, each in enumerate(absent)
            if number < num_over or self._num_steps - each.last_step > MAX_STEPS_ABSENT
        ]
        for each in gone:
            del self._requests[each.request_id]
        return gone

    def take_all(self) -> list[TrackedRequest]:
        """Forget all requests."""
        requests = list(self._requests.values())
        self._requests.clear()
        self._last_rows.clear()
        return requests

    # --- inside -----------------------------------------------------------------------------------------------

    def _continues(self, request: TrackedRequest, row: DoorRow, *, after_a_gap: bool = False) -> bool:
        """Whether ``row`` is ``request`` one step later, or more steps ``after_a_gap``."""
        num_tokens = request.num_tokens
        if request.last_step == self._num_steps or request.request_id not in self._requests or request.key != row.key:
            return False
        num_came = len(row.token_ids) - num_tokens
        if row.num_new is not None:
            fits = num_came > row.num_new if after_a_gap else num_came == row.num_new
        else:  # one verification gives a prefix of the draft and one token more
            accepted = row.token_ids[num_tokens:-1]
            fits = 0 < num_came <= len(request.draft) + 1 and accepted.tolist() == list(request.draft[: num_came - 1])
        return fits and bool((request.text == row.token_ids[:num_tokens]).all())

    def _find(self, row: DoorRow, *, after_a_gap: bool) -> TrackedRequest | None:
        for is_gap in (False, True) if after_a_gap else (False,):
            fitting = [each for each in self._requests.values() if self._continues(each, row, after_a_gap=is_gap)]
            if fitting:
                return self._take(max(fitting, key=lambda each: each.num_tokens), row)
        return None

    def _take(self, request: TrackedRequest, row: DoorRow) -> TrackedRequest:
        request.num_before = request.num_tokens
        request.is_new = False
        request.grow_to(row.token_ids)
        request.last_step = self._num_steps
        return request

    def _start(self, row: DoorRow) -> TrackedRequest:
        num_tokens = len(row.token_ids)
        request = TrackedRequest(
            str(self._num_requests),
            row.key,
            np.empty(2 * num_tokens, dtype=np.int32),
            num_before=num_tokens - (1 if row.num_new is None else row.num_new),
            last_step=self._num_steps,
        )
        request.grow_to(row.token_ids)
        self._num_requests += 1
        self._requests[request.request_id] = request
        return request
