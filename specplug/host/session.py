"""The decoding loop: plan, propose, one target forward, verify, commit, advance, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specplug.hooks import SessionHooks
from specplug.host.commit import commit
from specplug.host.outputs import FinishReason, RequestOutput
from specplug.host.request_state import RequestState
from specplug.host.scheduler import Scheduler
from specplug.host.target import Target, TargetOutput
from specplug.types import Batch, Draft, RequestStep, SessionSummary, StepOutcome, TokenIds, cumulative

__all__ = ["HostSession"]

_EMPTY_IDS = TokenIds(np.empty(0, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class _StepPlan:
    """What goes into the forward. ``starts``: where each row's query tokens begin, and the total last."""

    draft: Draft
    num_query_tokens: list[int]
    starts: list[int]
    verify_rows: list[int]
    """Rows that have logits: those that decode, and those whose prompt ends in this step."""
    num_prefill_tokens: int


class _Clock:
    """Wall-clock seconds between phases."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


class HostSession:
    """Drives one target with one set of plugins. Not thread-safe; one step at a time."""

    def __init__(
        self,
        target: Target,
        hooks: SessionHooks,
        scheduler: Scheduler,
        *,
        num_speculative_tokens: int,
        proposer_name: str = "",
        verify_method: Callable[[], str] = lambda: "",
        request_metrics: Callable[[str], Any] = lambda request_id: None,
    ) -> None:
        self.target = target
        self.hooks = hooks
        self.scheduler = scheduler
        self.num_speculative_tokens = num_speculative_tokens
        self._proposer_name = proposer_name
        self._verify_method = verify_method
        self._request_metrics = request_metrics
        self._num_steps = 0
        self._num_requests = 0
        self._step_faults: dict[str, int] = {}
        self._aborted: set[str] = set()
        self._is_closed = False

    # --- requests ---------------------------------------------------------------------------------------

    def add(self, state: RequestState) -> None:
        """Queue a request; it joins the batch in the next step that has a free row."""
        self.scheduler.add(state)
        self._num_requests += 1

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, or after the step that is running. Unknown ids are ignored."""
        state = self.scheduler.withdraw(request_id)
        if state is not None:  # never admitted: no plugin has heard of it
            state.finish("abort")
            return state.output(is_last=True)
        if request_id in self.scheduler:
            self._aborted.add(request_id)
        return None

    def apply_aborts(self) -> list[RequestOutput]:
        """Let aborted requests leave without a step; returns their last outputs."""
        if not self._aborted:
            return []
        self._end_aborted()
        return self._retire([])

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def close(self) -> None:
        """Abort what is left and tell the plugins that the session ends. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for state in self.scheduler.running:
            state.finish("abort")
        self._retire([])
        self.hooks.finish_session(SessionSummary(self._num_steps, self._num_requests, dict(self.hooks.faults)))

    # --- the step ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that got output in it or ended with it."""
        finished = self.apply_aborts()
        try:
            self._admit()
            return finished + (self._step() if self.scheduler.running else [])
        except BaseException:
            self._rollback()  # a failed or interrupted step leaves every request where commit left it
            raise

    def _step(self) -> list[RequestOutput]:
        clock = _Clock()
        batch = self._batch()
        limits, skip_reasons = self._limits(batch)
        host_s = clock.lap()
        draft = self._propose(batch, limits, skip_reasons)
        propose_s = clock.lap()
        plan = self._plan(draft)
        inputs = self._inputs(plan)
        host_s += clock.lap()
        output = self.target.forward(inputs[0], plan.num_query_tokens, inputs[1])
        forward_s = clock.lap()
        steps, verify_s = self._verify_and_commit(batch, plan, output, skip_reasons, clock)
        new_token_ids = self._keep(batch, plan)
        self.hooks.advance(self._advance_batch(new_token_ids, plan, output))
        self._collect_faults()
        faults, self._step_faults = self._step_faults, {}
        self._num_steps += 1
        self.hooks.accept_metrics(
            StepOutcome(
                step=self._num_steps,
                rows=tuple(steps),
                num_prefill_tokens=plan.num_prefill_tokens,
                verify_method=self._verify_method(),
                propose_s=propose_s,
                forward_s=forward_s,
                verify_s=verify_s,
                host_s=host_s + clock.lap(),
                faults=faults,
            )
        )
        self._end_aborted()
        return self._retire([step.request_id for step in steps if step.num_emitted_tokens])

    # --- phases -----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        admitted = []
        for state in self.scheduler.admit():
            self.target.acquire(state.request)
            admitted.append(state)
        for state in admitted:
            self.hooks.start_request(state.request)

    def _batch(self) -> Batch:
        states = self.scheduler.running
        return Batch(
            requests=tuple(state.request for state in states),
            token_ids=tuple(state.token_ids() for state in states),
            num_computed_tokens=tuple(state.num_computed_tokens for state in states),
            remaining=tuple(state.remaining for state in states),
            num_verify_steps=tuple(state.num_verify_steps for state in states),
        )

    def _limits(self, batch: Batch) -> tuple[list[int], list[str | None]]:
        """Draft limits after the plan hook, and why a row with limit 0 gets no draft."""
        states = self.scheduler.running
        limits = [0] * len(states)
        if self.num_speculative_tokens and self.hooks.has_proposer and any(state.is_decoding for state in states):
            limits = self.scheduler.draft_limits(self.num_speculative_tokens)
            limits = self.hooks.plan(batch, limits)
        return limits, [self._skip_reason(state, limit) for state, limit in zip(states, limits, strict=True)]

    def _skip_reason(self, state: RequestState, limit: int) -> str | None:
        if not state.is_decoding:
            return "prefill"
        if not (self.num_speculative_tokens and state.request.speculation.get("enabled", True)):
            return "disabled"
        if not self.hooks.has_proposer:
            return "no_proposer"
        return None if limit else "limit"

    def _propose(self, batch: Batch, limits: list[int], skip_reasons: list[str | None]) -> Draft:
        self._collect_faults()  # those of the plan hook do not explain a missing draft
        draft = self.hooks.propose(batch, limits) if any(limits) else None
        reason = "fault" if self._collect_faults() and draft is None else "no_proposal"
        if draft is None:
            draft = Draft.empty(len(batch))
        for row, count in enumerate(draft.num_draft_tokens):
            if not count and skip_reasons[row] is None:
                skip_reasons[row] = reason
        return draft

    def _plan(self, draft: Draft) -> _StepPlan:
        counts = self.scheduler.query_tokens(draft.num_draft_tokens)
        verify_rows, num_prefill_tokens = [], 0
        for row, state in enumerate(self.scheduler.running):
            if not state.is_decoding:
                num_prefill_tokens += counts[row]
            if state.is_decoding or (counts[row] and counts[row] == state.num_uncomputed_tokens):
                verify_rows.append(row)
        return _StepPlan(draft, counts, cumulative(counts), verify_rows, num_prefill_tokens)

    def _inputs(self, plan: _StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """``input_ids`` ``[T]`` and ``logits_indices``: every row's tokens, and the positions verify needs."""
        ids = np.zeros(plan.starts[-1], dtype=np.int64)
        draft_slots: list[int] = []
        logits: list[int] = []
        counts = plan.draft.num_draft_tokens
        for row, state in enumerate(self.scheduler.running):
            start, num_query = plan.starts[row], plan.num_query_tokens[row]
            num_committed = num_query - counts[row]
            first = state.num_computed_tokens
            ids[start : start + num_committed] = state.span(first, first + num_committed)
            draft_slots.extend(range(start + num_committed, start + num_query))
        for row in plan.verify_rows:
            stop = plan.starts[row + 1]
            logits.extend(range(stop - counts[row] - 1, stop))
        device = self.target.device
        input_ids = torch.from_numpy(ids).to(device)
        if draft_slots:
            tokens = plan.draft.draft_token_ids.to(device=device, dtype=torch.int64)
            # -1 marks a token that may not be embedded; verification stops there, so any id will do
            input_ids[torch.tensor(draft_slots, device=device)] = tokens.clamp(min=0)
        return input_ids, torch.tensor(logits, dtype=torch.int64, device=device)

    def _verify_and_commit(
        self, batch: Batch, plan: _StepPlan, output: TargetOutput, skip_reasons: Sequence[str | None], clock: _Clock
    ) -> tuple[list[RequestStep], float]:
        """The rows with logits, verified and committed; and the seconds the rule took."""
        rows, draft = plan.verify_rows, plan.draft
        if not rows:
            return [], 0.0
        if len(rows) < len(batch):
            batch, draft = batch.select(rows), draft.select_rows(rows)
        verification = self.hooks.verify(batch, draft, output.logits)
        verify_s = clock.lap()
        steps = commit(
            [self.scheduler.running[row] for row in rows],
            draft,
            verification,
            default_source=self._proposer_name,
            skip_reasons=[skip_reasons[row] for row in rows],
        )
        return steps, verify_s

    def _keep(self, batch: Batch, plan: _StepPlan) -> list[TokenIds]:
        """Roll the target back to what stands; returns the tokens newly computed and kept, per row."""
        verified = set(plan.verify_rows)
        new_token_ids = []
        for row, state in enumerate(self.scheduler.running):
            before = batch.num_computed_tokens[row]
            if row not in verified:  # a prompt chunk, kept whole
                state.num_computed_tokens = before + plan.num_query_tokens[row]
            elif state.num_computed_tokens < before + plan.num_query_tokens[row]:
                self.target.rollback(row, state.num_computed_tokens)
            new = state.span(before, state.num_computed_tokens)
            new_token_ids.append(TokenIds(new) if len(new) else _EMPTY_IDS)
        return new_token_ids

    def _advance_batch(self, new_token_ids: list[TokenIds], plan: _StepPlan, output: TargetOutput) -> Batch:
        batch = self._batch()
        hidden_states = {
            layer: tuple(
                states[start : start + len(new)] for start, new in zip(plan.starts, new_token_ids, strict=False)
            )
            for layer, states in output.hidden_states.items()
        }
        return Batch(
            requests=batch.requests,
            token_ids=batch.token_ids,
            num_computed_tokens=batch.num_computed_tokens,
            remaining=batch.remaining,
            num_verify_steps=batch.num_verify_steps,
            new_token_ids=tuple(new_token_ids),
            new_hidden_states=hidden_states,
        )

    def _collect_faults(self) -> bool:
        """Count the plugin faults since the last call; says whether there were any."""
        new = self.hooks.take_faults()
        for reason, count in new.items():
            self._step_faults[reason] = self._step_faults.get(reason, 0) + count
        return bool(new)

    # --- the ends ---------------------------------------------------------------------------------------

    def _end_aborted(self) -> None:
        for state in self.scheduler.running:
            if state.request_id in self._aborted:
                state.finish("abort")
        self._aborted.clear()

    def _retire(self, emitted_ids: Sequence[str]) -> list[RequestOutput]:
        """Outputs of the step; finished requests leave their rows."""
        outputs = []
        emitted = set(emitted_ids)
        for row in range(len(self.scheduler.running) - 1, -1, -1):
            state = self.scheduler.running[row]
            if state.finish_reason is not None:
                outputs.append(self._leave(row, state, state.finish_reason))
            elif state.request_id in emitted and state.output_kind != "final_only":
                outputs.append(state.output(is_last=False))
        return outputs[::-1]

    def _leave(self, row: int, state: RequestState, reason: FinishReason) -> RequestOutput:
        output = state.output(is_last=True, spec_decode_metrics=self._request_metrics(state.request_id))
        self.hooks.finish_request(state.request, reason)
        self.target.release(row)
        self.scheduler.leave(row)
        return output

    def _rollback(self) -> None:
        for row, state in enumerate(self.scheduler.running):
            self.target.rollback(row, state.num_computed_tokens)
