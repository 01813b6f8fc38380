"""What one step is about: the rows that take part, and what goes into the forward for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from specplug.host.request_state import RequestState
from specplug.types import Batch, Draft, cumulative

__all__ = ["LogitsLayout", "StepPlan", "Work", "batch_of", "plan_step"]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The rows of a step, all sequences aligned. ``target_rows``: where each stands in the target, ascending."""

    states: list[RequestState]
    target_rows: list[int]
    batch: Batch
    draft: Draft
    skip_reasons: list[str | None]

    def select(self, rows: Sequence[int]) -> Work:
        """Some rows only, in the order given; ``self`` when that is all of them."""
        if len(rows) == len(self.states):
            return self
        return Work(
            states=[self.states[row] for row in rows],
            target_rows=[self.target_rows[row] for row in rows],
            batch=self.batch.select(rows),
            draft=self.draft.select_rows(rows),
            skip_reasons=[self.skip_reasons[row] for row in rows],
        )

    def still_wanted(self) -> Work:
        """Without the rows of requests that were paused, aborted or finished since the step began."""
        return self.select([row for row, state in enumerate(self.states) if not state.is_withdrawn])

    def with_draft(self, draft: Draft, reason: str) -> Work:
        """Another draft; rows that lose theirs have been skipped for ``reason``."""
        counts = zip(self.skip_reasons, draft.num_draft_tokens, strict=True)
        skip_reasons = [reason if not count and given is None else given for given, count in counts]
        return replace(self, draft=draft, skip_reasons=skip_reasons)


@dataclass(frozen=True, slots=True)
class LogitsLayout:
    """Which of a step's positions get logits, in order: those that verification needs, and prompt positions.

    ``verify_slots``: where the former are among the logits, None when that is all. ``prompt_spans``: row of the work ->
    where its prompt positions begin and stop among the logits.
    """

    positions: list[int]
    verify_slots: list[int] | None
    prompt_spans: dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What goes into the forward. ``starts``: where each row's query tokens begin, and the total last."""

    num_query_tokens: list[int]
    starts: list[int]
    verify_rows: list[int]
    """Rows that have logits: those that decode, and those whose prompt ends in this step."""
    num_prefill_tokens: int
    layout: LogitsLayout

    def num_target_tokens(self, work: Work, num_rows: int) -> list[int]:
        """Query tokens of every row of the target: none for those that take no part."""
        if len(work.states) == num_rows:
            return self.num_query_tokens
        counts = [0] * num_rows
        for row, count in zip(work.target_rows, self.num_query_tokens, strict=True):
            counts[row] = count
        return counts

    def input_ids(self, work: Work, device: torch.device) -> torch.Tensor:
        """``[T]`` int64: each row's uncomputed tokens of this step, then its draft."""
        ids = np.zeros(self.starts[-1], dtype=np.int64)
        draft_slots: list[int] = []
        for row, state in enumerate(work.states):
            start, stop = self.starts[row], self.starts[row + 1]
            num_committed = stop - start - work.draft.num_draft_tokens[row]
            first = state.num_computed_tokens
            ids[start : start + num_committed] = state.span(first, first + num_committed)
            draft_slots.extend(range(start + num_committed, stop))
        input_ids = torch.from_numpy(ids).to(device)
        if draft_slots:
            tokens = work.draft.draft_token_ids.to(device=device, dtype=torch.int64)
            # -1 marks a token that may not be embedded; verification stops there, so any id will do
            input_ids[torch.tensor(draft_slots, device=device)] = tokens.clamp(min=0)
        return input_ids


def plan_step(work: Work, num_query_tokens: list[int], *, has_features: bool) -> StepPlan:
    """Lay the rows out: which of them are verified, and which positions need logits.

    ``has_features``: whether some request of the session may want more than to be sampled.
    """
    verify_rows, num_prefill_tokens = [], 0
    for row, state in enumerate(work.states):
        count = num_query_tokens[row]
        if not state.is_decoding:
            num_prefill_tokens += count
        if state.is_decoding or (count and count == state.num_uncomputed_tokens):
            verify_rows.append(row)
    starts = cumulative(num_query_tokens)
    layout = _layout_with_prompts if has_features else _layout
    return StepPlan(num_query_tokens, starts, verify_rows, num_prefill_tokens, layout(work, starts, verify_rows))


def _layout(work: Work, starts: list[int], verify_rows: list[int]) -> LogitsLayout:
    positions: list[int] = []
    counts = work.draft.num_draft_tokens
    for row in verify_rows:
        positions += range(starts[row + 1] - counts[row] - 1, starts[row + 1])
    return LogitsLayout(positions, None, {})


def _layout_with_prompts(work: Work, starts: list[int], verify_rows: list[int]) -> LogitsLayout:
    if not any(state.features.prompt_logprobs is not None for state in work.states):
        return _layout(work, starts, verify_rows)
    positions: list[int] = []
    counts = work.draft.num_draft_tokens
    verify_slots: list[int] = []
    prompt_spans: dict[int, tuple[int, int]] = {}
    is_verified = set(verify_rows)
    for row, state in enumerate(work.states):
        first = len(positions)
        positions += _prompt_positions(state, starts[row], starts[row + 1])
        if len(positions) > first:
            prompt_spans[row] = (first, len(positions))
        if row in is_verified:
            verify_slots += range(len(positions), len(positions) + counts[row] + 1)
            positions += range(starts[row + 1] - counts[row] - 1, starts[row + 1])
    return LogitsLayout(positions, verify_slots, prompt_spans)


def _prompt_positions(state: RequestState, start: int, stop: int) -> range:
    """Positions of the step that tell the log-probability of a prompt token: all of the prompt but its last."""
    if state.features.prompt_logprobs is None:
        return range(0)
    return range(start, min(stop, start + max(state.num_prompt_tokens - 1 - state.num_computed_tokens, 0)))


def batch_of(states: Sequence[RequestState]) -> Batch:
    """The plugins' view of these requests as they are now."""
    return Batch(
        requests=tuple(state.request for state in states),
        token_ids=tuple(state.token_ids() for state in states),
        num_computed_tokens=tuple(state.num_computed_tokens for state in states),
        remaining=tuple(state.remaining for state in states),
        num_verify_steps=tuple(state.num_verify_steps for state in states),
    )
