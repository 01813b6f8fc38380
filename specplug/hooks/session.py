"""The hooks of one session: its plugin instances behind guards, in the order of the configuration."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from specplug.draft_space import DraftSpace
from specplug.errors import PluginError
from specplug.hooks.contract import find_implementations, new_plugin_manager, register_checked
from specplug.hooks.draft_check import DraftCheck
from specplug.hooks.faults import FaultLog
from specplug.hooks.guard import Check, Guard
from specplug.hooks.manager import process_manager
from specplug.hooks.plan_check import PlanCheck, check_draft_space
from specplug.hooks.step import CurrentCall
from specplug.hooks.trace import enable_trace
from specplug.hooks.verification_check import VerificationCheck
from specplug.types import Batch, Draft, Request, Session, SessionSummary, StepOutcome, Verification

if TYPE_CHECKING:
    import torch

__all__ = ["SessionHooks"]

_live_sessions: weakref.WeakSet[SessionHooks] = weakref.WeakSet()
_live_lock = threading.Lock()


class SessionHooks:
    """One session's plugin instances behind guards, in configuration order (first configured is asked first).

    Instances belong to one session: one that another live session holds is refused, as are objects that break
    the contract (``PluginError``). Calls never raise for what a plugin does, unless ``strict``: faults are
    logged once, counted under a reason such as ``propose_raised:ngram``, and the session goes on without the
    answer or without the instance. ``KeyboardInterrupt`` and the like pass through.
    """

    def __init__(
        self,
        instances: Sequence[tuple[str, object]] = (),
        *,
        vocab_size: int,
        strict: bool = False,
        trace: bool = False,
        time_limit_s: float | None = None,
        verifier: object | None = None,
        describe: Callable[[str], str] | None = None,
        device: str | None = None,
    ) -> None:
        """``instances``: (name, instance) pairs; a name that comes twice gets ``#2``.

        ``verifier``: the host's own, asked last; it is neither guarded nor checked, so its exceptions pass.
        ``time_limit_s``: what one instance may take for one step hook; three overruns in a row detach it.
        ``describe``: distribution and version of a name for messages; by default the process manager's.
        ``device``: the target's, where drafts and their laws may be; by default it is not checked.
        """
        self._call = CurrentCall()
        self._faults = FaultLog(strict=strict, describe=describe or _describe)
        self._time_limit_s = time_limit_s
        self._guards: dict[str, Guard] = {}
        self._num_proposers = 0
        self._manager = new_plugin_manager()
        self._hook = self._manager.hook
        plan_check = PlanCheck(self._call)
        draft_check = DraftCheck(self._call, vocab_size=vocab_size, faults=self._faults, device=device)
        shared: dict[str, Check] = {
            "specplug_propose": draft_check,
            "specplug_verify": VerificationCheck(self._call, vocab_size=vocab_size),
            "specplug_draft_space": check_draft_space,
        }
        self._checks: Mapping[str, Check] = {**shared, "specplug_plan": plan_check}
        self._wrapper_checks: Mapping[str, Check] = {**shared, "specplug_plan": plan_check.answers}
        if trace:
            enable_trace(self._manager)
        if verifier is not None:
            find_implementations(verifier, "the host's verifier")
            register_checked(self._manager, verifier, "built-in verifier")
        with _live_lock:
            _live_sessions.add(self)
        try:
            for name, instance in reversed(_numbered(instances)):
                self.add_first(name, instance)
        except PluginError:
            self._end()
            raise

    def add_first(self, name: str, instance: object) -> None:
        """Add an instance in front of those already there: it is asked before them, its wrappers are outside theirs.

        For hosts that build instances one by one, last configured first. Raises ``PluginError``.
        """
        label = f'plugin "{name}"'
        implementations = find_implementations(instance, label)
        if not implementations:
            raise PluginError(
                f"{label}: {type(instance).__name__} object has no hooks; mark its methods with @hookimpl"
            )
        if name in self._guards:
            raise PluginError(f"{label}: the session already has an instance of that name")
        self._refuse_shared(label, instance)
        guard = Guard(
            name,
            instance,
            implementations,
            faults=self._faults,
            checks=self._checks,
            wrapper_checks=self._wrapper_checks,
            on_detach=self._detach,
            time_limit_s=self._time_limit_s,
        )
        register_checked(self._manager, guard, name)
        self._guards[name] = guard
        self._num_proposers += guard.is_proposer

    # --- session and requests

    def start_session(self, session: Session) -> None:
        """``specplug_start_session`` on every instance."""
        self._hook.specplug_start_session(session=session)

    def finish_session(self, summary: SessionSummary) -> None:
        """``specplug_finish_session`` on every instance, detached ones included; the instances are free afterwards."""
        try:
            self._hook.specplug_finish_session(summary=summary)
        finally:
            self._end()

    def start_request(self, request: Request) -> None:
        """``specplug_start_request`` on every instance."""
        self._hook.specplug_start_request(request=request)

    def finish_request(self, request: Request, reason: str) -> None:
        """``specplug_finish_request`` on every instance."""
        self._hook.specplug_finish_request(request=request, reason=reason)

    def draft_space(self, target: Any, draft: Any) -> DraftSpace | None:
        """The first ``specplug_draft_space`` answer; None when nobody answers (then the identity is used)."""
        space: DraftSpace | None = self._hook.specplug_draft_space(target=target, draft=draft)
        return space

    # --- step

    def plan(self, batch: Batch, limits: Sequence[int]) -> list[int]:
        """The elementwise minimum of ``limits`` ``[batch]`` and of every ``specplug_plan`` answer."""
        self._call.batch = batch
        answers: list[tuple[int, ...]] = self._hook.specplug_plan(batch=batch)
        planned = list(limits)
        for answer in answers:
            planned = list(map(min, planned, answer))
        return planned

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft | None:
        """The first ``specplug_propose`` answer through all wrappers: checked, cut to ``limits``, sources named.

        None when nobody drafts, or when every limit is 0 (then nobody is asked).
        """
        if not any(limits):
            return None
        fixed_limits = tuple(limits)  # what plugins are handed must not be the list that their answer is cut to
        self._call.batch, self._call.limits = batch, fixed_limits
        draft: Draft | None = self._hook.specplug_propose(batch=batch, limits=fixed_limits)
        return draft

    def verify(self, batch: Batch, draft: Draft, target_logits: torch.Tensor) -> Verification:
        """The first ``specplug_verify`` answer that is well formed; the built-in verifier is last.

        Raises ``PluginError`` when nobody answers, which cannot be with a built-in verifier.
        """
        self._call.batch, self._call.draft = batch, draft
        found: Verification | None = None
        for _ in range(2):  # again when a wrapper spoilt the answer: it is detached by then
            found = self._hook.specplug_verify(batch=batch, draft=draft, target_logits=target_logits)
            if found is not None:
                break
        self._call.draft = None  # its laws may be large
        if found is None:
            raise PluginError("no verifier answered specplug_verify; give SessionHooks(verifier=BuiltinVerifier(...))")
        return found

    def advance(self, batch: Batch) -> None:
        """``specplug_advance`` on every instance."""
        self._hook.specplug_advance(batch=batch)

    def accept_metrics(self, outcome: StepOutcome) -> None:
        """``specplug_accept_metrics`` on every instance."""
        self._hook.specplug_accept_metrics(outcome=outcome)

    # --- what the host asks

    @property
    def has_proposer(self) -> bool:
        """Whether an instance that proposes is still attached."""
        return self._num_proposers > 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the attached instances, the first asked first."""
        return tuple(name for name, guard in reversed(self._guards.items()) if not guard.is_detached)

    @property
    def faults(self) -> Mapping[str, int]:
        """Faults of the whole session: reason -> count."""
        return self._faults.total

    @property
    def plugin_manager(self) -> pluggy.PluginManager:
        """The pluggy manager, for hook-call monitoring."""
        return self._manager

    def take_faults(self) -> dict[str, int]:
        """Faults since the last call: reason -> count."""
        return self._faults.take()

    def instance(self, name: str) -> object | None:
        """The instance of that name; None when there is none or it was detached."""
        guard = self._guards.get(name)
        return None if guard is None or guard.is_detached else guard.instance

    # --- internals

    def _refuse_shared(self, label: str, instance: object) -> None:
        with _live_lock:
            for session in _live_sessions:
                if any(guard.instance is instance for guard in session._guards.values()):
                    where = "this session" if session is self else "another live session"
                    raise PluginError(
                        f"{label}: this {type(instance).__name__} object already belongs to {where}; an instance is "
                        "never shared: build a fresh one per session (the factory must not return a kept object)"
                    )

    def _detach(self, guard: Guard) -> None:
        self._num_proposers -= guard.is_proposer
        self._manager.unregister(guard)
        rest = guard.last_rites()
        if rest is not None:
            self._manager.register(rest, f"{guard.name} (detached)")

    def _end(self) -> None:
        with _live_lock:
            _live_sessions.discard(self)


def _describe(name: str) -> str:
    return process_manager().describe(name.partition("#")[0])


def _numbered(instances: Sequence[tuple[str, object]]) -> list[tuple[str, object]]:
    """The pairs with distinct names: the second of a name gets ``#2``, and so on."""
    seen: dict[str, int] = {}
    numbered: list[tuple[str, object]] = []
    for name, instance in instances:
        seen[name] = seen.get(name, 0) + 1
        numbered.append((name if seen[name] == 1 else f"{name}#{seen[name]}", instance))
    return numbered
