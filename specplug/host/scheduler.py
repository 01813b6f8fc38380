"""Which requests take part in a step, and with how many tokens: continuous batching with chunked prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from specplug.host.request_state import RequestState

__all__ = ["Scheduler"]


class Scheduler:
    """First come, first served. Running requests are rows 0 .. n - 1 of the target, in ``running``'s order.

    Paused requests keep their rows, or their places in the waiting line, and take no part in steps.

    A step's tokens stay within ``max_num_batched_tokens``: decoding rows come first with one token each, then
    their drafts, then prompt chunks in the order of admission, none longer than ``max_chunk_tokens``.
    """

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, max_chunk_tokens: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_chunk_tokens = max_chunk_tokens
        self._waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []

    def __contains__(self, request_id: str) -> bool:
        return self.find(request_id) is not None

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self.running)

    @property
    def is_stuck(self) -> bool:
        """Whether there are requests and none can go on: those with rows are paused, and nobody may join them."""
        can_join = len(self.running) < self._max_num_seqs and any(not state.is_paused for state in self._waiting)
        return self.has_unfinished and not can_join and all(state.is_paused for state in self.running)

    def add(self, state: RequestState) -> None:
        self._waiting.append(state)

    def admit(self) -> Iterator[RequestState]:
        """Move waiting requests into free rows, one at a time; each runs once the caller asks for the next."""
        if len(self.running) == self._max_num_seqs:
            return
        for state in [state for state in self._waiting if not state.is_paused]:
            if len(self.running) == self._max_num_seqs:
                return
            yield state
            self._waiting.remove(state)
            self.running.append(state)

    def unfinished(self) -> list[RequestState]:
        """All requests, running and waiting."""
        return [*self.running, *self._waiting]

    def find(self, request_id: str) -> RequestState | None:
        """The request of this id, waiting or running."""
        return next((state for state in self.unfinished() if state.request_id == request_id), None)

    def taking_part(self) -> tuple[list[RequestState], list[int]]:
        """The running requests that are not paused, and their rows of the target, ascending."""
        rows = [row for row, state in enumerate(self.running) if not state.is_paused]
        return [self.running[row] for row in rows], rows

    def withdraw_aborted(self) -> list[RequestState]:
        """Take aborted requests out of the waiting line."""
        aborted = [state for state in self._waiting if state.is_aborted]
        for state in aborted:
            self._waiting.remove(state)
        return aborted

    def leave(self, row: int) -> None:
        """Row ``row`` is free; the last row moves into the hole, as in the target."""
        last = self.running.pop()
        if row < len(self.running):
            self.running[row] = last

    def draft_limits(self, states: Sequence[RequestState], num_speculative_tokens: int) -> list[int]:
        """Most draft tokens per request by K, the request's own limits and the token budget."""
        limits = [_draft_limit(state, num_speculative_tokens) for state in states]
        limits = [min(limit, self._max_chunk_tokens - 1) for limit in limits]
        num_decoding = sum(state.is_decoding for state in states)
        budget = self._max_num_batched_tokens - num_decoding
        if sum(limits) > budget:
            share = max(0, budget) // max(1, sum(limit > 0 for limit in limits))
            limits = [min(limit, share) for limit in limits]
        return limits

    def query_tokens(self, states: Sequence[RequestState], num_draft_tokens: Sequence[int]) -> list[int]:
        """Tokens each request brings to the forward: 1 + drafts, a prompt chunk, or 0 when the budget is spent."""
        budget = self._max_num_batched_tokens
        counts = [0] * len(states)
        for row, state in enumerate(states):
            if state.is_decoding:
                counts[row] = 1 + num_draft_tokens[row]
                budget -= counts[row]
        for row, state in enumerate(states):
            if not state.is_decoding:
                counts[row] = max(0, min(state.num_uncomputed_tokens, self._max_chunk_tokens, budget))
                budget -= counts[row]
        return counts


def _draft_limit(state: RequestState, num_speculative_tokens: int) -> int:
    speculation = state.request.speculation
    if not (state.is_decoding and state.may_draft and speculation.get("enabled", True)):
        return 0
    cap: int = speculation.get("num_speculative_tokens", num_speculative_tokens)
    return max(0, min(cap, num_speculative_tokens, state.remaining - 1))
