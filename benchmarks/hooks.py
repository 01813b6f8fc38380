"""What the hooks of one step cost, in microseconds, with 0, 1, 3 and 5 plugins (CPU).

A step is plan, propose, verify, advance and accept_metrics through ``SessionHooks``. The plugins do next to nothing,
so the time is that of dispatch, guards and checks: the first plugin is a proposer with a ready draft, the second a
wrapper that trims nothing, the others observe. "bare" is the same hooks through pluggy without guards or checks.

    python benchmarks/hooks.py [--batch 8] [--tokens 3] [--repeats 100]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Callable, Generator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import pluggy
import torch

from specplug.hooks import SessionHooks, hookimpl
from specplug.hooks.contract import new_plugin_manager
from specplug.sampling_params import SamplingParams
from specplug.types import Batch, Draft, Request, StepOutcome, TokenIds, Verification

VOCAB_SIZE = 49152
ROUNDS = 40


class ReadyProposer:
    """Answers with a draft made beforehand."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        return self._draft

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        return None


class IdleWrapper:
    """Passes the draft on."""

    @hookimpl(wrapper=True)
    def specplug_propose(self, limits: Sequence[int]) -> Generator[None, Draft | None, Draft | None]:
        draft = yield
        return None if draft is None else draft.truncate(limits)


class Observer:
    """Looks at every step."""

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        return None

    @hookimpl
    def specplug_accept_metrics(self, outcome: StepOutcome) -> None:
        return None


class ReadyVerifier:
    """Answers with a verification made beforehand, as the host's built-in would last."""

    def __init__(self, verification: Verification) -> None:
        self._verification = verification

    @hookimpl(trylast=True)
    def specplug_verify(self, batch: Batch, draft: Draft, target_logits: torch.Tensor) -> Verification:
        return self._verification


class Bare:
    """The same calls without guards and checks."""

    def __init__(self, plugins: Sequence[object], verifier: object) -> None:
        self.manager: pluggy.PluginManager = new_plugin_manager()
        for plugin in (verifier, *reversed(plugins)):
            self.manager.register(plugin)

    def plan(self, batch: Batch, limits: list[int]) -> list[int]:
        self.manager.hook.specplug_plan(batch=batch)
        return limits

    def propose(self, batch: Batch, limits: list[int]) -> Any:
        return self.manager.hook.specplug_propose(batch=batch, limits=limits)

    def verify(self, batch: Batch, draft: Draft, target_logits: torch.Tensor) -> Any:
        return self.manager.hook.specplug_verify(batch=batch, draft=draft, target_logits=target_logits)

    def advance(self, batch: Batch) -> None:
        self.manager.hook.specplug_advance(batch=batch)

    def accept_metrics(self, outcome: StepOutcome) -> None:
        self.manager.hook.specplug_accept_metrics(outcome=outcome)


def make_batch(size: int) -> Batch:
    ids = TokenIds(np.arange(64, dtype=np.int32))
    requests = tuple(Request(str(row), ids, SamplingParams(temperature=0.0), seed=row) for row in range(size))
    return Batch(requests, (ids,) * size, (63,) * size, (100,) * size, (0,) * size)


def plugins_for(count: int, draft: Draft) -> list[object]:
    return [ReadyProposer(draft), IdleWrapper(), *(Observer() for _ in range(count - 2))][:count]


def make_step(hooks: Any, batch: Batch, draft: Draft, num_tokens: int) -> Callable[[], None]:
    """One step's hook calls, without arguments."""
    limits, logits, outcome = [num_tokens] * len(batch), torch.empty(0), StepOutcome(step=1, rows=())

    def step() -> None:
        planned = hooks.plan(batch, limits)
        hooks.propose(batch, planned)
        hooks.verify(batch, draft, logits)
        hooks.advance(batch)
        hooks.accept_metrics(outcome)

    return step


def time_both(ours: Callable[[], None], bare: Callable[[], None], repeats: int) -> list[float]:
    """Fastest and median microseconds of ours and of bare, over interleaved rounds: [ours, ours, bare, bare]."""
    rounds = [(round_us(ours, repeats), round_us(bare, repeats)) for _ in range(ROUNDS)]
    return [pick(times) for times in zip(*rounds, strict=True) for pick in (min, statistics.median)]


def round_us(step: Callable[[], None], repeats: int) -> float:
    started = perf_counter()
    for _ in range(repeats):
        step()
    return (perf_counter() - started) / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=3, help="draft tokens per row")
    parser.add_argument("--repeats", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batch = make_batch(arguments.batch)
    draft = Draft.from_lists([list(range(arguments.tokens))] * arguments.batch)
    verification = Verification(
        torch.zeros(arguments.batch, arguments.tokens + 1, dtype=torch.int32),
        torch.zeros(arguments.batch, dtype=torch.int32),
    )
    versions = f"python {platform.python_version()}, pluggy {pluggy.__version__}, torch {torch.__version__}"
    print(f"{versions}, cpu, load {os.getloadavg()[0]:.1f}")
    print(f"batch {arguments.batch}, {arguments.tokens} draft tokens a row; us a step, {ROUNDS} interleaved rounds")
    print(f"{'plugins':>8}{'specplug min':>14}{'median':>8}{'bare min':>10}{'median':>8}{'added (min)':>13}")
    for count in (0, 1, 3, 5):
        guarded = SessionHooks(
            [(f"plugin{number}", plugin) for number, plugin in enumerate(plugins_for(count, draft))],
            vocab_size=VOCAB_SIZE,
            strict=True,
            verifier=ReadyVerifier(verification),
        )
        bare = Bare(plugins_for(count, draft), ReadyVerifier(verification))
        steps = [make_step(each, batch, draft, arguments.tokens) for each in (guarded, bare)]
        ours_min, ours, bare_min, median = time_both(*steps, arguments.repeats)
        print(f"{count:>8}{ours_min:>14.1f}{ours:>8.1f}{bare_min:>10.1f}{median:>8.1f}{ours_min - bare_min:>13.1f}")


if __name__ == "__main__":
    main()
