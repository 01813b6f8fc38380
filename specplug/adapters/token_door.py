"""A door for servers that show token ids and verify drafts themselves: the plugins' hooks, driven from outside."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from specplug.adapters.tracking import DoorRow, RequestTracker, TrackedRequest
from specplug.config import EngineArgs, ResolvedConfig, resolve_speculative_config
from specplug.errors import ConfigError
from specplug.hooks import ProcessManager, SessionHooks, process_manager
from specplug.host.instances import InstanceBuilder
from specplug.metrics import AcceptanceMetrics
from specplug.sampling_params import SamplingParams
from specplug.types import (
    Batch,
    Draft,
    Request,
    RequestStep,
    Session,
    SessionSummary,
    SourceCount,
    StepOutcome,
    TokenIds,
    cumulative,
)

__all__ = ["DoorTarget", "TokenDoor"]

_LOGGER = logging.getLogger(__name__)
_GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
_WARM_UP = "specplug-warm-up"


@dataclass(frozen=True, slots=True)
class DoorTarget:
    """What is known of a server's model; plugins get it as ``context.target``.

    ``model`` and ``tokenizer`` are None where the server does not show them. ``vocab_size``: draft ids are below it.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int = 1
    max_query_tokens: int = 2048
    """Most tokens of one request that a draft model reads in one forward."""
    device: str = "cpu"
    dtype: str = "float32"
    eos_token_ids: frozenset[int] = frozenset()
    hidden_size: int | None = None
    num_layers: int | None = None
    model: Any = None
    tokenizer: Any = None

    def session(self, num_speculative_tokens: int) -> Session:
        """What plugins are told at the start."""
        return Session(
            vocab_size=self.vocab_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            num_speculative_tokens=num_speculative_tokens,
            device=self.device,
            dtype=self.dtype,
            eos_token_ids=self.eos_token_ids,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
        )


class TokenDoor:
    """One session of plugins behind a server that shows texts and takes draft tokens.

    The server verifies, so a draft's laws stay unused. What it accepted is read from the text of the next step. A step
    never raises: plugins are guarded as in our own host, and should the door itself fail, it drafts no more. Faults are
    logged once and counted.
    """

    def __init__(
        self,
        door: str,
        speculative_config: Mapping[str, Any],
        target: DoorTarget,
        *,
        plugins: Sequence[Mapping[str, Any] | str] = (),
        additional_config: Mapping[str, Any] | None = None,
        wrappers: Sequence[tuple[str, object]] = (),
        manager: ProcessManager | None = None,
        strict: bool = False,
    ) -> None:
        """``door``: the server's name, for messages. ``wrappers``: the door's own instances, by name, around those of
        the configuration. ``strict``: raise on faults (for tests).

        Raises ``ConfigError`` with every fault of the configuration, ``PluginError`` for plugins that cannot be built.
        """
        manager = manager or process_manager()
        self.config = _resolve(door, speculative_config, target, plugins, additional_config or {}, manager)
        self.target = target
        session = target.session(self.config.num_speculative_tokens)
        builder = InstanceBuilder(target, session, self.config, manager.methods)
        instances = builder.build()
        if builder.hidden_state_layers:
            raise ConfigError(
                f'method "{self.config.method}" reads hidden states, which {door} does not show; run it in specplug.LLM'
            )
        self.hooks = SessionHooks(
            [*wrappers, *instances],
            vocab_size=target.vocab_size,
            strict=strict,
            trace=manager.trace,
            describe=manager.describe,
            device=session.device,
        )
        builder.hooks = self.hooks
        self.hooks.start_session(session)
        self.drafts_trees = any(manager.methods[each.name].capabilities.tree for each in self.config.plugins)
        """Whether a proposer may draft token trees, which are cut to a path each."""
        self._strict = strict
        self._door = door
        self._tracker = RequestTracker(target.max_num_seqs)
        self._is_off = False
        self._next_cache_salt: str | None = None
        self._num_steps = 0
        self._num_requests = 0

    @property
    def num_speculative_tokens(self) -> int:
        """K: no draft is longer."""
        return self.config.num_speculative_tokens

    @property
    def acceptance(self) -> AcceptanceMetrics | None:
        """The session's acceptance accounting, or None when it is blocked."""
        observer = self.hooks.instance("acceptance")
        return observer if isinstance(observer, AcceptanceMetrics) else None

    @property
    def is_off(self) -> bool:
        """Whether the door itself failed; it drafts no more."""
        return self._is_off

    @property
    def num_requests(self) -> int:
        """Requests that are kept, absent ones included."""
        return len(self._tracker)

    @staticmethod
    def check(
        door: str,
        speculative_config: Mapping[str, Any],
        target: DoorTarget,
        *,
        plugins: Sequence[Mapping[str, Any] | str] = (),
        manager: ProcessManager | None = None,
    ) -> None:
        """Find what ``TokenDoor(...)`` would refuse in the configuration, without loading or building anything.

        Raises ``ConfigError``.
        """
        _resolve(door, speculative_config, target, plugins, {}, manager or process_manager())

    def warm_up(self) -> None:
        """Draft once for a made-up request, so that no real one pays for imports, compilation and first forwards.

        It has a ``cache_salt`` of its own and is taken out of the counts.
        """
        prompt = np.arange(32, dtype=np.int32) % min(8, self.target.vocab_size)
        acceptance, self._next_cache_salt = self.acceptance, _WARM_UP
        try:
            self.step([DoorRow(prompt, num_new=1, key=_WARM_UP)])
            self.finish(_WARM_UP)
        finally:
            self._next_cache_salt = None
        self._num_steps = self._num_requests = 0
        if acceptance is not None:
            acceptance.specplug_start_session(self.target.session(self.num_speculative_tokens))

    def step(
        self, rows: Sequence[DoorRow], *, after_a_gap: bool = False, step_price: float | None = None
    ) -> list[list[int]]:
        """Take the texts as they are now, and give one draft per row, ``[]`` for none.

        ``after_a_gap``: see ``RequestTracker.follow``; ``step_price``: as in ``Batch``.
        """
        if self._is_off:
            return [[] for _ in rows]
        try:
            return self._step(rows, after_a_gap, step_price)
        except Exception:
            if self._strict:
                raise
            self._is_off = True
            _LOGGER.exception("specplug's %s door failed; no drafts from now on, the server goes on", self._door)
            return [[] for _ in rows]

    def finish(self, key: str) -> None:
        """The request of that key has left. Unknown keys are ignored."""
        request = self._tracker.leave(key)
        if request is not None:
            self._finish([request])

    def close(self) -> None:
        """Finish all requests and tell the plugins that the session ends. A second call does nothing."""
        if not self._is_off:
            self._is_off = True
            self._finish(self._tracker.take_all())
            summary = SessionSummary(self._num_steps, self._num_requests, dict(self.hooks.faults))
            self.hooks.finish_session(summary)

    # --- the step ---------------------------------------------------------------------------------------------

    def _step(self, rows: Sequence[DoorRow], after_a_gap: bool, step_price: float | None) -> list[list[int]]:
        requests = self._tracker.follow(rows, after_a_gap=after_a_gap)
        self._finish(self._tracker.take_absent())
        for request in requests:
            if request.is_new:
                self._start(request)
        steps = [step for step in map(_settle, requests) if step is not None]
        batch = self._batch(requests, step_price)
        self.hooks.advance(self._advance_batch(requests, batch))
        started = time.perf_counter()
        drafts = self._propose(rows, requests, batch)
        self._num_steps += 1
        self.hooks.accept_metrics(
            StepOutcome(
                step=self._num_steps,
                rows=tuple(steps),
                propose_s=time.perf_counter() - started,
                faults=self.hooks.take_faults(),
            )
        )
        return drafts

    def _propose(self, rows: Sequence[DoorRow], requests: Sequence[TrackedRequest], batch: Batch) -> list[list[int]]:
        limits = self._limits(rows, batch)
        if any(limits):
            limits = self.hooks.plan(batch, limits)
        draft = (self.hooks.propose(batch, limits) or Draft.empty(len(batch))).to_chains()
        drafts = _chains(draft)
        sources = _sources_by_row(draft)
        reasons = draft.skip_reasons or (None,) * len(drafts)
        for request, limit, ids, names, reason in zip(requests, limits, drafts, sources, reasons, strict=True):
            request.draft, request.sources = tuple(ids), names
            request.skip_reason = None if ids else reason or self._skip_reason(request, limit)
        return drafts

    def _limits(self, rows: Sequence[DoorRow], batch: Batch) -> list[int]:
        most = self.num_speculative_tokens if self.hooks.has_proposer else 0
        return [
            max(0, min(most if row.limit is None else row.limit, most, room - 1)) if row.num_new != 0 else 0
            for row, room in zip(rows, batch.remaining, strict=True)
        ]

    def _skip_reason(self, request: TrackedRequest, limit: int) -> str:
        if request.request is not None and request.num_tokens == len(request.request.prompt_token_ids):
            return "prefill"
        if not self.hooks.has_proposer:
            return "no_proposer"
        return "no_proposal" if limit else "limit"

    def _batch(self, requests: Sequence[TrackedRequest], step_price: float | None) -> Batch:
        most = self.target.max_model_len
        return Batch(
            requests=tuple(each.request for each in requests if each.request is not None),
            token_ids=tuple(TokenIds(each.text) for each in requests),
            num_computed_tokens=tuple(each.num_tokens - 1 for each in requests),
            remaining=tuple(most - each.num_tokens for each in requests),
            num_verify_steps=tuple(each.num_verify_steps for each in requests),
            step_price=step_price,
        )

    def _advance_batch(self, requests: Sequence[TrackedRequest], batch: Batch) -> Batch:
        """With the tokens that the server has read since the last step."""
        new = [each.text[0 if each.is_new else each.num_before - 1 : -1] for each in requests]
        return replace(batch, new_token_ids=tuple(map(TokenIds, new)))

    def _start(self, tracked: TrackedRequest) -> None:
        prompt = TokenIds(tracked.buffer[: tracked.num_before].copy())
        tracked.request = Request(tracked.request_id, prompt, _GREEDY, seed=0, cache_salt=self._next_cache_salt)
        self._num_requests += 1
        self.hooks.start_request(tracked.request)

    def _finish(self, requests: Sequence[TrackedRequest]) -> None:
        for each in requests:
            if each.request is not None:
                self.hooks.finish_request(each.request, "stop")


def _resolve(
    door: str,
    speculative_config: Mapping[str, Any],
    target: DoorTarget,
    plugins: Sequence[Mapping[str, Any] | str],
    additional_config: Mapping[str, Any],
    manager: ProcessManager,
) -> ResolvedConfig:
    engine = EngineArgs(
        model=target.model,
        max_num_seqs=target.max_num_seqs,
        max_model_len=target.max_model_len,
        additional_config=dict(additional_config),
    )
    resolved = resolve_speculative_config(speculative_config, manager.methods, plugins=plugins, engine=engine)
    faults = []
    if resolved.verify_method != "auto":
        faults.append(f'the verification rule "{resolved.verify_method}" cannot act: {door} verifies drafts itself')
    if resolved.method is None:
        faults.append(f'the {door} door needs a method; write {{"method": "ngram", "num_speculative_tokens": 5}}')
    if faults:
        raise ConfigError(faults)
    return resolved


def _settle(request: TrackedRequest) -> RequestStep | None:
    """How the last draft did; None when no verification can be told from the text."""
    new = request.text[request.num_before :].tolist()
    if not new:
        return None
    num_accepted, draft = len(new) - 1, request.draft
    was_verified = tuple(new[:num_accepted]) == draft[:num_accepted] and new[-1:] != list(
        draft[num_accepted : len(new)]
    )
    if request.is_new:
        draft, num_accepted = (), 0
    elif not was_verified:  # dropped by the server, or steps that were not shown
        draft, num_accepted = (), 0
        request.skip_reason = "not_verified"
    request.num_verify_steps += 1
    return RequestStep(
        request_id=request.request_id,
        num_draft_tokens=len(draft),
        num_verified_accepted_tokens=num_accepted,
        num_accepted_tokens=num_accepted,
        num_emitted_tokens=len(new),
        sources=_source_counts(request.sources, num_accepted) if draft else (),
        skip_reason=request.skip_reason,
    )


def _source_counts(sources: Sequence[tuple[str, int]], num_accepted: int) -> tuple[SourceCount, ...]:
    counts = []
    for source, size in sources:
        accepted = min(num_accepted, size)
        num_accepted -= accepted
        counts.append(SourceCount(source, size, accepted, accepted))
    return tuple(counts)


def _chains(draft: Draft) -> list[list[int]]:
    """The token ids of every row."""
    ids = draft.draft_token_ids.tolist()
    starts = cumulative(draft.num_draft_tokens)
    return [ids[start:stop] for start, stop in pairwise(starts)]


def _sources_by_row(draft: Draft) -> list[tuple[tuple[str, int], ...]]:
    """For every row, proposer and number of tokens of each part of its draft."""
    rows: list[tuple[tuple[str, int], ...]] = []
    spans = iter(draft.sources)
    source, num_left = "", 0
    for count in draft.num_draft_tokens:
        parts = []
        while count:
            if not num_left:
                span = next(spans)
                source, num_left = span.source, span.stop - span.start
            size = min(count, num_left)
            count, num_left = count - size, num_left - size
            if size:
                parts.append((source, size))
        rows.append(tuple(parts))
    return rows
