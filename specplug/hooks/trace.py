"""Printing every hook call of a plugin manager: ``SPECPLUG_TRACE=1``, or ``SessionHooks(trace=True)``.

It sits outside pluggy's call loop, hence outside every wrapper. Arguments and results are summarised by shape and
count; no tensor is read, so tracing does not wait for a device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import pluggy

from specplug.types import Batch, Draft, Request, StepOutcome, Verification

__all__ = ["enable_trace", "summary"]

_MAX_ITEMS = 8
_MAX_CHARS = 100


def enable_trace(manager: pluggy.PluginManager, write: Callable[[str], object] | None = None) -> Callable[[], None]:
    """Print each call of ``manager``'s hooks to stderr, or to ``write``; return what undoes it."""
    started: list[float] = []

    def before(hook: str, implementations: Sequence[Any], arguments: Mapping[str, object]) -> None:
        started.append(perf_counter())

    def after(outcome: Any, hook: str, implementations: Sequence[Any], arguments: Mapping[str, object]) -> None:
        seconds = perf_counter() - started.pop()
        line = _line(outcome, hook, implementations, arguments, seconds, "  " * len(started))
        (write or sys.stderr.write)(line)

    return manager.add_hookcall_monitoring(before, after)


def _line(
    outcome: Any,
    hook: str,
    implementations: Sequence[Any],
    arguments: Mapping[str, object],
    seconds: float,
    indent: str,
) -> str:
    shown = ", ".join(f"{name}={summary(value)}" for name, value in arguments.items())
    asked = ", ".join(
        f"{each.plugin_name}{' (wrapper)' if each.wrapper else ''}" for each in reversed(list(implementations))
    )
    failed = outcome.exception
    result = summary(outcome.get_result()) if failed is None else f"raised {type(failed).__name__}: {failed}"
    return f"specplug: {indent}{hook}({shown}) -> {result}  [{asked or 'nobody'}] {seconds * 1e3:.3f} ms\n"


def summary(value: object) -> str:
    """A short text for an argument or a result, without reading tensor values."""
    if isinstance(value, Batch):
        return f"Batch({len(value)}: {_listed([request.request_id for request in value.requests])})"
    if isinstance(value, Request):
        return f"Request({value.request_id}, {len(value.prompt_token_ids)} prompt tokens)"
    if isinstance(value, Draft):
        return _draft_summary(value)
    if isinstance(value, Verification):
        return f"Verification(output_token_ids {summary(value.output_token_ids)})"
    if isinstance(value, StepOutcome):
        emitted = sum(row.num_emitted_tokens for row in value.rows)
        return f"StepOutcome(step {value.step}, {len(value.rows)} rows, {emitted} tokens)"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        device = getattr(value, "device", "cpu")
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {device}"
    if isinstance(value, list | tuple):
        return f"[{_listed([summary(item) for item in value])}]"
    return _cut(repr(value))


def _draft_summary(draft: Draft) -> str:
    laws = sorted({type(span.law).__name__ for span in draft.laws})
    sources = sorted({span.source for span in draft.sources})
    return f"Draft({_listed([str(count) for count in draft.num_draft_tokens])}; {' '.join(laws + sources) or 'empty'})"


def _listed(items: Sequence[str]) -> str:
    more = f", +{len(items) - _MAX_ITEMS} more" if len(items) > _MAX_ITEMS else ""
    return ", ".join(items[:_MAX_ITEMS]) + more


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
