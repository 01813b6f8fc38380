"""The decoding loop: plan, propose, one target forward, verify, commit, advance, metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from specplug.hooks import SessionHooks
from specplug.host.commit import commit, entries_to_move, to_host
from specplug.host.features import (
    RawLogits,
    StepLogits,
    cut_to_grammars,
    process_step,
    record_logprobs,
    record_prompt_logprobs,
)
from specplug.host.outputs import RequestOutput
from specplug.host.request_state import RequestState
from specplug.host.scheduler import Scheduler
from specplug.host.work import StepPlan, Work, batch_of, plan_step
from specplug.models.target import Target, TargetOutput
from specplug.types import Batch, Draft, RequestStep, SessionSummary, StepOutcome, TokenIds, cumulative

__all__ = ["HostSession"]

logger = logging.getLogger("specplug")

_EMPTY_IDS = TokenIds(np.empty(0, dtype=np.int32))


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
        verifies_trees: bool = True,
        request_metrics: Callable[[str], Any] = lambda request_id: None,
    ) -> None:
        """``verifies_trees``: False where the session's rule takes chains only."""
        self.target = target
        self.hooks = hooks
        self.scheduler = scheduler
        self.num_speculative_tokens = num_speculative_tokens
        self._proposer_name = proposer_name
        self._verify_method = verify_method
        self._takes_trees = verifies_trees and getattr(target, "supports_trees", False)
        self._num_flattened_trees = 0
        self._request_metrics = request_metrics
        self._num_steps = 0
        self._num_requests = 0
        self._step_faults: dict[str, int] = {}
        self._num_needing_features = 0
        self._raw_logits = RawLogits()
        self._outputs: list[RequestOutput] = []  # made and not yet returned, so that an interrupt loses none

    # --- requests ---------------------------------------------------------------------------------------

    def add(self, state: RequestState) -> None:
        """Queue a request; it joins the batch in the next step that has a free row."""
        self.scheduler.add(state)
        self._num_requests += 1

    def abort(self, request_id: str) -> None:
        """End a request: its last output comes with those of the next step. Unknown ids are ignored."""
        state = self.scheduler.find(request_id)
        if state is not None:
            state.is_aborted = True

    def pause(self, request_id: str) -> bool:
        """Take a request out of the steps, from the next phase of a running one on; False for an unknown id.

        Its row, its target state and its plugins' state stay; a draft it has is dropped.
        """
        return self._set_paused(request_id, True)

    def resume(self, request_id: str) -> bool:
        """Let a paused request go on in the next step; False for an unknown id."""
        return self._set_paused(request_id, False)

    def _set_paused(self, request_id: str, is_paused: bool) -> bool:
        state = self.scheduler.find(request_id)
        if state is None or state.is_finished:
            return False
        state.is_paused = is_paused
        return True

    def apply_aborts(self) -> list[RequestOutput]:
        """Let aborted requests leave without a step; returns their last outputs."""
        self._collect_outputs()
        return self._take_outputs()

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    @property
    def is_stuck(self) -> bool:
        """Whether there are requests and pauses keep all of them from going on."""
        return self.scheduler.is_stuck

    def close(self) -> list[RequestOutput]:
        """Abort what is left, and tell the plugins that the session ends; returns the last outputs."""
        for state in self.scheduler.unfinished():
            state.is_aborted = True
        self._collect_outputs()
        self.hooks.finish_session(SessionSummary(self._num_steps, self._num_requests, dict(self.hooks.faults)))
        return self._take_outputs()

    # --- the step ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that got output in it or ended with it."""
        try:
            self._collect_outputs()
            self._admit()
            if self.scheduler.running:
                self._step()
            return self._take_outputs()
        except BaseException:
            self._rollback()  # a failed or interrupted step leaves every request where commit left it
            raise

    def _step(self) -> None:
        clock, num_flattened_before = _Clock(), self._num_flattened_trees
        states, target_rows = self.scheduler.taking_part()
        batch = batch_of(states)
        limits, skip_reasons = self._limits(states, batch)
        host_s = clock.lap()
        draft = self._propose(batch, limits, skip_reasons)
        propose_s = clock.lap()
        work = self._without_stale_rows(Work(states, target_rows, batch, draft, skip_reasons))
        if not work.states:
            self._collect_outputs()
            return
        num_query_tokens = self.scheduler.query_tokens(work.states, work.draft.num_draft_tokens)
        plan = plan_step(work, num_query_tokens, has_features=self._num_needing_features > 0)
        host_s += clock.lap()
        output = self._forward(work, plan)
        forward_s = clock.lap()
        steps, accepted_nodes, verify_s = self._verify_and_commit(work, plan, output, clock)
        self._keep_and_advance(work, plan, output, steps, accepted_nodes)
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
                num_flattened_trees=self._num_flattened_trees - num_flattened_before,
            )
        )
        self._collect_outputs({step.request_id for step in steps if step.num_emitted_tokens})

    # --- phases -----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        for state in self.scheduler.admit():
            self.target.acquire(state.request)
            self._num_needing_features += state.features.is_needed
        for state in self.scheduler.running:
            if not state.is_announced:
                state.is_announced = True
                self.hooks.start_request(state.request)

    def _limits(self, states: Sequence[RequestState], batch: Batch) -> tuple[list[int], list[str | None]]:
        """Draft limits after the plan hook, and why a row with limit 0 gets no draft."""
        limits = [0] * len(states)
        if self.num_speculative_tokens and self.hooks.has_proposer and any(state.is_decoding for state in states):
            limits = self.scheduler.draft_limits(states, self.num_speculative_tokens)
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
        draft = Draft.empty(len(batch)) if draft is None else self._fit(draft)
        own_reasons = draft.skip_reasons or [None] * len(batch)
        for row, (count, own_reason) in enumerate(zip(draft.num_draft_tokens, own_reasons, strict=True)):
            if not count and skip_reasons[row] is None:
                skip_reasons[row] = own_reason or reason
        return draft

    def _fit(self, draft: Draft) -> Draft:
        """The draft, its trees cut to their first paths where they cannot be verified."""
        if draft.parents is None or self._takes_trees:
            return draft
        if not self._num_flattened_trees:
            logger.warning(
                "draft trees are cut to their first path: %s takes chains only (counted as num_flattened_trees)",
                "the target" if not getattr(self.target, "supports_trees", False) else "the verification rule",
            )
        self._num_flattened_trees += sum(tree is not None for tree in draft.trees())
        return draft.to_chains()

    def _without_stale_rows(self, work: Work) -> Work:
        """Drop withdrawn rows with their drafts, and draft tokens outside a row's grammar."""
        work = work.still_wanted()
        if self._num_needing_features:
            work = work.with_draft(cut_to_grammars(work.states, work.draft), "grammar").still_wanted()
        return work

    def _forward(self, work: Work, plan: StepPlan) -> TargetOutput:
        device = self.target.device
        inputs = (
            plan.input_ids(work, device),
            plan.num_target_tokens(work, len(self.scheduler.running)),
            torch.tensor(plan.layout.positions, dtype=torch.int64, device=device),
        )
        if work.draft.parents is None:
            return self.target.forward(*inputs)
        trees = zip(work.target_rows, work.draft.trees(), strict=True)
        return self.target.forward(*inputs, trees={row: tree for row, tree in trees if tree is not None})

    def _verify_and_commit(
        self, work: Work, plan: StepPlan, output: TargetOutput, clock: _Clock
    ) -> tuple[list[RequestStep], Mapping[str, Sequence[int]], float]:
        """The rows with logits, verified and committed; of trees the accepted nodes, by request; and the seconds that
        processing and the rule took."""
        work = work.select(plan.verify_rows)
        slots = plan.layout.verify_slots
        raw = output.logits if slots is None else output.logits[slots]
        logits = StepLogits(raw, raw)
        if self._num_needing_features:
            logits = process_step(work.states, work.draft, raw, self._raw_logits)
        work, logits = _still_wanted(work, logits)
        if not work.states:
            return [], {}, clock.lap()
        verification = self.hooks.verify(work.batch, work.draft, logits.processed)
        verify_s = clock.lap()
        decided = to_host(verification, work.draft)
        if work.draft.parents is not None:
            self.target.compact(*entries_to_move(work.states, work.target_rows, decided))
        steps = commit(
            work.states, work.draft, decided, default_source=self._proposer_name, skip_reasons=work.skip_reasons
        )
        nodes = zip(work.states, decided.accepted_nodes, strict=True)
        accepted_nodes = {state.request_id: of_row for state, of_row in nodes if of_row is not None}
        if self._num_needing_features:
            self._record_logprobs(work, steps, accepted_nodes, logits)
        return steps, accepted_nodes, verify_s

    def _record_logprobs(
        self,
        work: Work,
        steps: Sequence[RequestStep],
        accepted_nodes: Mapping[str, Sequence[int]],
        logits: StepLogits,
    ) -> None:
        num_emitted = {step.request_id: step.num_emitted_tokens for step in steps}
        first_rows = [start + row for row, start in enumerate(cumulative(work.draft.num_draft_tokens)[:-1])]
        record_logprobs(
            work.states,
            first_rows,
            [num_emitted.get(state.request_id, 0) for state in work.states],
            logits,
            [accepted_nodes.get(state.request_id) for state in work.states],
        )

    def _keep_and_advance(
        self,
        work: Work,
        plan: StepPlan,
        output: TargetOutput,
        steps: Sequence[RequestStep],
        accepted_nodes: Mapping[str, Sequence[int]],
    ) -> None:
        """Roll the target back to what stands, and tell the plugins which tokens were newly computed and kept."""
        committed = {step.request_id for step in steps}
        verified = set(plan.verify_rows)
        kept: list[int] = []
        new_token_ids: list[TokenIds] = []
        for row, state in enumerate(work.states):
            before, num_query = work.batch.num_computed_tokens[row], plan.num_query_tokens[row]
            if state.request_id in committed if row in verified else not state.is_withdrawn:
                if row not in verified:  # a prompt chunk, kept whole
                    state.num_computed_tokens = before + num_query
                kept.append(row)
                new = state.span(before, state.num_computed_tokens)
                new_token_ids.append(TokenIds(new) if len(new) else _EMPTY_IDS)
                if row in plan.layout.prompt_spans:
                    record_prompt_logprobs(state, output.logits[slice(*plan.layout.prompt_spans[row])], before)
            if state.num_computed_tokens < before + num_query:
                self.target.rollback(work.target_rows[row], state.num_computed_tokens)
        if kept:
            self.hooks.advance(_advance_batch(work, plan, output, kept, new_token_ids, accepted_nodes))

    def _collect_faults(self) -> bool:
        """Count the plugin faults since the last call; says whether there were any."""
        new = self.hooks.take_faults()
        for reason, count in new.items():
            self._step_faults[reason] = self._step_faults.get(reason, 0) + count
        return bool(new)

    # --- the ends ---------------------------------------------------------------------------------------

    def _collect_outputs(self, emitted: Collection[str] = ()) -> None:
        """Finish what was aborted, and make the outputs of finished requests and of those that ``emitted``."""
        for state in self.scheduler.running:
            if state.is_aborted:
                state.finish("abort")
        for state in self.scheduler.withdraw_aborted():  # no plugin has heard of it
            state.finish("abort")
            self._outputs.append(state.output(is_last=True))
        first = len(self._outputs)
        for row in range(len(self.scheduler.running) - 1, -1, -1):  # a row that leaves is filled from behind
            self._make_output(row, emitted, first)

    def _make_output(self, row: int, emitted: Collection[str], index: int) -> None:
        state = self.scheduler.running[row]
        is_due = state.request_id in emitted and state.output_kind != "final_only"
        output = state.output(is_last=False) if is_due and not state.is_finished else None
        if state.is_finished:  # perhaps just now, by a tokenizer that cannot decode
            output = self._leave(row, state)
        if output is not None:
            self._outputs.insert(index, output)
            state.delivered()

    def _leave(self, row: int, state: RequestState) -> RequestOutput:
        output = state.output(is_last=True, spec_decode_metrics=self._request_metrics(state.request_id))
        if state.is_announced:
            state.is_announced = False
            self.hooks.finish_request(state.request, state.finish_reason or "abort")
        self._num_needing_features -= state.features.is_needed
        self.target.release(row)
        self.scheduler.leave(row)
        return output

    def _take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _rollback(self) -> None:
        for row, state in enumerate(self.scheduler.running):
            self.target.rollback(row, state.num_computed_tokens)


def _still_wanted(work: Work, logits: StepLogits) -> tuple[Work, StepLogits]:
    """Drop the rows of requests that were withdrawn since the forward, with their logits."""
    wanted = work.still_wanted()
    if wanted is work:
        return work, logits
    starts = cumulative(work.draft.num_draft_tokens)
    rows = [
        row
        for number, state in enumerate(work.states)
        if not state.is_withdrawn
        for row in range(starts[number] + number, starts[number + 1] + number + 1)
    ]
    return wanted, StepLogits(logits.raw[rows], logits.processed[rows])


def _advance_batch(
    work: Work,
    plan: StepPlan,
    output: TargetOutput,
    kept: Sequence[int],
    new_token_ids: Sequence[TokenIds],
    accepted_nodes: Mapping[str, Sequence[int]],
) -> Batch:
    batch = batch_of([work.states[row] for row in kept])
    if not output.hidden_states:
        return replace(batch, new_token_ids=tuple(new_token_ids))
    places = [
        _kept_places(work, plan, row, len(new), accepted_nodes.get(work.states[row].request_id))
        for row, new in zip(kept, new_token_ids, strict=True)
    ]
    hidden_states = {layer: tuple(states[each] for each in places) for layer, states in output.hidden_states.items()}
    return replace(batch, new_token_ids=tuple(new_token_ids), new_hidden_states=hidden_states)


def _kept_places(
    work: Work, plan: StepPlan, row: int, num_kept: int, accepted_nodes: Sequence[int] | None
) -> slice | torch.Tensor:
    """Where the step's query tokens that a row keeps stand among all: first ones, of a tree those on its path."""
    start = plan.starts[row]
    if accepted_nodes is None:
        return slice(start, start + num_kept)
    first_node = plan.starts[row + 1] - work.draft.num_draft_tokens[row]
    places = [*range(start, first_node), *(first_node + node for node in accepted_nodes)]
    return torch.tensor(places[:num_kept])
