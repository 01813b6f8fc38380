"""Tracing: every call, outermost, summarised."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

from specplug.hooks import SessionHooks, hookimpl
from specplug.hooks.trace import enable_trace, summary
from specplug.types import Batch, Draft, StepOutcome, Verification

MakeBatch = Callable[[int], Batch]
MakeHooks = Callable[..., SessionHooks]


class Proposer:
    @hookimpl
    def specplug_propose(self, batch: Batch) -> Draft:
        return Draft.from_lists([[1, 2], [3]])


class Cap:
    @hookimpl(wrapper=True, tryfirst=True)
    def specplug_propose(self) -> Generator[None, Any, Any]:
        draft = yield
        return draft.truncate([1, 1])


def test_calls_are_printed_outside_every_wrapper(
    make_hooks: MakeHooks, make_batch: MakeBatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = make_hooks(Proposer(), Cap(), trace=True, strict=True)
    hooks.propose(make_batch(2), [2, 2])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specplug: specplug_propose(batch=Batch(2: r0, r1), limits=[2, 2]) -> Draft(1, 1; OneHot a)")
    assert "[b (wrapper), a]" in line
    assert line.endswith(" ms")


def test_calls_that_nobody_answers_and_void_calls_are_printed(
    make_hooks: MakeHooks, make_batch: MakeBatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = make_hooks(Proposer(), trace=True)
    hooks.plan(make_batch(1), [1])
    hooks.accept_metrics(StepOutcome(step=3, rows=()))
    plan, metrics = capsys.readouterr().err.splitlines()
    assert "specplug_plan(batch=Batch(1: r0)) -> []  [nobody]" in plan
    assert "specplug_accept_metrics(outcome=StepOutcome(step 3, 0 rows, 0 tokens))" in metrics


def test_without_trace_nothing_is_printed(
    make_hooks: MakeHooks, make_batch: MakeBatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_hooks(Proposer()).propose(make_batch(2), [2, 2])
    assert capsys.readouterr().err == ""


def test_what_is_raised_is_printed_and_undo_stops(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    class Broken:
        @hookimpl
        def specplug_propose(self) -> None:
            raise KeyboardInterrupt

    lines: list[str] = []
    hooks = make_hooks(Broken())
    undo = enable_trace(hooks.plugin_manager, lines.append)
    with pytest.raises(KeyboardInterrupt):
        hooks.propose(make_batch(1), [1])
    undo()
    hooks.plan(make_batch(1), [1])
    assert len(lines) == 1
    assert "-> raised KeyboardInterrupt" in lines[0]


def test_a_call_inside_a_call_is_indented(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    class Asks:
        @hookimpl
        def specplug_start_request(self, request: Any) -> None:
            hooks.draft_space(None, None)

    lines: list[str] = []
    hooks = make_hooks(Asks(), strict=True)
    enable_trace(hooks.plugin_manager, lines.append)
    hooks.start_request(make_batch(1).requests[0])
    assert lines[0].startswith("specplug:   specplug_draft_space(")
    assert lines[1].startswith("specplug: specplug_start_request(request=Request(r0, 5 prompt tokens))")


def test_summaries_are_short_and_read_no_tensor() -> None:
    assert summary(torch.zeros(3, 7, device="meta")) == "float32[3, 7] meta"
    verification = Verification(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1))
    assert summary(verification) == "Verification(output_token_ids int32[1, 2] cpu)"
    assert summary(list(range(20))) == "[0, 1, 2, 3, 4, 5, 6, 7, +12 more]"
    assert summary(Draft.empty(1)) == "Draft(0; empty)"
    assert len(summary("x" * 500)) == 100


def test_the_environment_switches_tracing_on() -> None:
    script = (
        "from specplug.hooks import hookimpl, process_manager\n"
        "class Plugin:\n    @hookimpl\n    def specplug_register(self): return []\n"
        "process_manager().register(Plugin())"
    )
    env = {**os.environ, "SPECPLUG_TRACE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("specplug: specplug_register() -> [[]]")
