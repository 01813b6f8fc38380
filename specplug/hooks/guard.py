"""Guards: what is registered with pluggy in an instance's place, so that its faults stay its own.

pluggy isolates nothing: one exception keeps every later implementation from being asked. A guard calls the
instance's function, and on a fault records it, detaches the instance where its state is no longer known, and
answers None, or, around a wrapper, the inner result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeAlias

from specplug.errors import ConfigError, ModelError, PluginFaultError
from specplug.hooks.contract import Implementation
from specplug.hooks.faults import FaultLog, Malformed

__all__ = ["Check", "Guard"]

Check: TypeAlias = Callable[[Any, str], Any]
"""``check(answer, plugin)`` returns the answer to use, or raises ``Malformed``."""

MAX_OVERRUNS_IN_A_ROW = 3
_VERIFY = "specplug_verify"
_FINISH_SESSION = "specplug_finish_session"
_BEFORE_REQUESTS = frozenset({"specplug_start_session", "specplug_draft_space"})
"""Here a ``ConfigError`` or ``ModelError`` passes: a session that cannot be must not start."""
_TIMED = frozenset({"specplug_plan", "specplug_propose", _VERIFY, "specplug_advance", "specplug_accept_metrics"})
_BROKEN_STATE = "the instance is detached for the rest of the session, because its state is no longer known"


class Guard:
    """One instance behind guards. Its hook functions are attributes named after their hooks."""

    def __init__(
        self,
        name: str,
        instance: object,
        implementations: Sequence[Implementation],
        *,
        faults: FaultLog,
        checks: Mapping[str, Check],
        wrapper_checks: Mapping[str, Check],
        on_detach: Callable[[Guard], None],
        time_limit_s: float | None,
    ) -> None:
        self.name = name
        self.instance = instance
        self.is_detached = False
        self.is_proposer = any(each.hook == "specplug_propose" and not each.is_wrapper for each in implementations)
        self._faults = faults
        self._on_detach = on_detach
        self._time_limit_s = time_limit_s
        self._num_overruns: dict[str, int] = {}
        for each in implementations:
            if each.is_wrapper:
                setattr(self, each.hook, self._guarded_wrapper(each, wrapper_checks.get(each.hook)))
            else:
                setattr(self, each.hook, self._guarded(each, checks.get(each.hook)))

    def last_rites(self) -> object | None:
        """What stays registered of a detached instance: an object with its ``specplug_finish_session``, if any."""
        function = getattr(self, _FINISH_SESSION, None)
        return None if function is None else _LastRites(function)

    def detach(self) -> None:
        """Stop calling the instance, except for ``specplug_finish_session``, where it releases what it took."""
        if not self.is_detached:
            self.is_detached = True
            self._on_detach(self)

    def _guarded(self, implementation: Implementation, check: Check | None) -> Callable[..., Any]:
        function, hook = implementation.function, implementation.hook
        is_timed = self._time_limit_s is not None and hook in _TIMED

        @functools.wraps(function)
        def guarded(*args: Any) -> Any:
            if self.is_detached and hook != _FINISH_SESSION:
                return None
            started = perf_counter() if is_timed else 0.0
            try:
                answer = function(*args)
            except Exception as error:
                if hook in _BEFORE_REQUESTS and isinstance(error, ConfigError | ModelError):
                    raise
                self._raised(hook, error)
                return None
            if is_timed:
                self._took(hook, perf_counter() - started)
            if answer is None or check is None:
                return answer
            return self._checked(hook, check, answer)

        return guarded

    def _guarded_wrapper(self, implementation: Implementation, check: Check | None) -> Callable[..., Any]:
        function, hook = implementation.function, implementation.hook
        is_timed = self._time_limit_s is not None and hook in _TIMED

        @functools.wraps(function)
        def guarded(*args: Any) -> Generator[None, Any, Any]:
            if self.is_detached and hook != _FINISH_SESSION:
                return (yield)
            started = perf_counter()
            generator = self._entered(hook, function, args)
            spent_s = perf_counter() - started
            if generator is None:
                return (yield)
            try:
                inner = yield
            except BaseException:
                self._close(hook, generator)
                raise
            started = perf_counter()
            is_done, outer = self._left(hook, generator, inner)
            if is_timed:
                self._took(hook, spent_s + perf_counter() - started)
            if check is None:
                return inner
            return self._outer(hook, check, outer, inner) if is_done else self._again(hook, check, inner)

        return guarded

    def _entered(self, hook: str, function: Callable[..., Any], args: Sequence[Any]) -> Generator[Any, Any, Any] | None:
        """The wrapper's generator, run up to its yield; None after a fault."""
        try:
            generator: Generator[Any, Any, Any] = function(*args)
            next(generator)
        except StopIteration:
            self._record(hook, "no_yield", "the wrapper returned before it yielded", "yield exactly once on every path")
            return None
        except Exception as error:  # noqa: BLE001 - any fault of a plugin stays its own
            self._raised(hook, error)
            return None
        return generator

    def _left(self, hook: str, generator: Generator[Any, Any, Any], inner: Any) -> tuple[bool, Any]:
        """(whether the wrapper finished, what it returned) for the ``inner`` result that it is sent."""
        try:
            # a list is a copy: the inner answers must survive what a wrapper does to it
            generator.send([*inner] if isinstance(inner, list) else inner)
        except StopIteration as stop:
            return True, stop.value
        except Exception as error:  # noqa: BLE001 - any fault of a plugin stays its own
            self._raised(hook, error)
            return False, None
        self._close(hook, generator)
        self._record(hook, "second_yield", "the wrapper yielded twice", "yield exactly once on every path")
        return False, None

    def _close(self, hook: str, generator: Generator[Any, Any, Any]) -> None:
        """Close a wrapper that will not be resumed. Never raises a fault: an interrupt may be passing through."""
        try:
            generator.close()
        except Exception as error:  # noqa: BLE001 - any fault of a plugin stays its own
            self.detach()
            self._faults.count(self.name, hook, "raised", _raised_text(error), _BROKEN_STATE, cause=error)

    def _outer(self, hook: str, check: Check, outer: Any, inner: Any) -> Any:
        """What a wrapper made of ``inner``, or ``inner`` when that cannot be used."""
        if outer is inner:
            return self._again(hook, check, inner)
        if outer is None:
            advice = "the inner answer is kept; end the wrapper with: return result"
            self._record(hook, "no_return", "the wrapper returned None although the inner call answered", advice)
            return self._again(hook, check, inner)
        return self._checked(hook, check, outer, lambda: self._again(hook, check, inner))

    def _again(self, hook: str, check: Check, inner: Any) -> Any:
        """``inner``, which the wrapper held and may have changed in place; None where that spoilt it."""
        return None if inner is None else self._checked(hook, check, inner)

    def _checked(self, hook: str, check: Check, answer: Any, otherwise: Callable[[], Any] = lambda: None) -> Any:
        try:
            return check(answer, self.name)
        except PluginFaultError:
            raise
        except Malformed as fault:
            what, cause = fault.what, None
            seen, advice = fault.seen, fault.advice
        except Exception as error:  # noqa: BLE001 - an answer odd enough to break the check is a malformed one
            what, cause = "malformed", error
            seen = f"returned {type(answer).__name__}, which raised {error!r} when read"
            advice = "return what the hook's reference describes"
        if hook == _VERIFY:
            self.detach()
        self._record(hook, what, seen, advice, cause=cause)
        return otherwise()

    def _took(self, hook: str, seconds: float) -> None:
        limit_s = self._time_limit_s or 0.0
        if seconds <= limit_s:
            self._num_overruns[hook] = 0
            return
        self._num_overruns[hook] = self._num_overruns.get(hook, 0) + 1
        seen = f"took {seconds:.3f} s, the limit is {limit_s:g} s"
        if self._num_overruns[hook] < MAX_OVERRUNS_IN_A_ROW:
            self._faults.count(self.name, hook, "slow", seen, "three in a row detach the instance")
            return
        self.detach()
        self._record(
            hook, "too_slow", seen, f"detached after {MAX_OVERRUNS_IN_A_ROW} in a row; raise the limit or do less"
        )

    def _raised(self, hook: str, error: Exception) -> None:
        self.detach()
        self._record(hook, "raised", _raised_text(error), _BROKEN_STATE, cause=error)

    def _record(self, hook: str, what: str, seen: str, advice: str, *, cause: BaseException | None = None) -> None:
        self._faults.record(self.name, hook, what, seen, advice, cause=cause)


class _LastRites:
    def __init__(self, finish_session: Callable[..., Any]) -> None:
        self.specplug_finish_session = finish_session


def _raised_text(error: Exception) -> str:
    return f"raised {type(error).__name__}: {error}"
