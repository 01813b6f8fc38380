"""What suffix drafting costs and achieves, beside the native peer where it is installed.

    python benchmarks/suffix.py [--data FOLDER] [--only replay cost memory prompt batch admit] [--drafter suffix arctic]

Outputs are known beforehand: a step drafts, keeps the longest right prefix and adds one token, so that steps and
accepted tokens are exact. Times are CPU time of this thread in microseconds (a shared machine disturbs them still),
without the slowest 1 %. ``arctic`` is arctic-inference with vLLM's settings, ``arctic64`` with depth 64 and factor 2;
both only where installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import platform
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from inputs.suffix import WORKLOADS, Workload, load, load_bulk
from specplug_suffix import SuffixOptions, SuffixProposer
from specplug_suffix.bench import Drafter as SuffixDrafter

from specplug import Batch, Request, SamplingParams, TokenIds

K = 32
ACCEPTED = {"edit": 16.2, "versions": 10.1, "agent": 2.85, "extract": 3.5, "rollouts": 5.3, "prose": 0.53}
"""Accepted tokens a step that our defaults must reach."""
STEPS = {"edit": 3145, "versions": 5906, "agent": 3389, "extract": 7783, "rollouts": 13318, "prose": 9827}
"""Of a plain automaton with the same draft lengths, where these numbers were first taken (Python 3.11)."""

IntArray = np.ndarray[Any, np.dtype[np.int32]]


class Drafter(Protocol):
    """What is measured. ``tail``: the last 64 tokens or fewer."""

    def start(self, request_id: str, prompt: IntArray) -> None: ...
    def append(self, request_id: str, token_ids: list[int]) -> None: ...
    def propose(self, request_id: str, tail: IntArray, k: int) -> Sequence[int]: ...
    def stop(self, request_id: str) -> None: ...


class Arctic:
    """The peer: a native suffix tree of bounded depth."""

    def __init__(self, *, depth: int = 24, factor: float = 1.0, max_cached_requests: int = 10_000) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=max_cached_requests)
        self._depth = depth
        self._factor = factor

    def start(self, request_id: str, prompt: IntArray) -> None:
        self._cache.start_request(request_id, prompt)

    def append(self, request_id: str, token_ids: list[int]) -> None:
        self._cache.add_active_response(request_id, token_ids)

    def propose(self, request_id: str, tail: IntArray, k: int) -> Sequence[int]:
        draft = self._cache.speculate(
            request_id, tail[-self._depth :], max_spec_tokens=k, max_spec_factor=self._factor, min_token_prob=0.1
        )
        token_ids: list[int] = draft.token_ids
        return token_ids

    def stop(self, request_id: str) -> None:
        self._cache.stop_request(request_id)


def make(name: str, **settings: int) -> Drafter:
    if name == "arctic":
        return Arctic(**settings)
    if name == "arctic64":
        return Arctic(depth=64, factor=2.0, **settings)
    return SuffixDrafter(k=K, **settings)


clock = time.thread_time_ns


def clock_cost() -> float:
    reads = [clock() for _ in range(2000)]
    return (reads[-1] - reads[0]) / (len(reads) - 1)


def mean_us(times: list[int], cost: float) -> float:
    kept = sorted(times)[: max(1, int(0.99 * len(times)))]
    return (statistics.fmean(kept) - cost) / 1e3


def table(*columns: str) -> None:
    print("\n| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))


def row(*values: object) -> None:
    print(
        "| " + " | ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values) + " |",
        flush=True,
    )


# --- replays ------------------------------------------------------------------------------------------------


class Replay:
    """One workload through one drafter."""

    def __init__(self, drafter: Drafter, requests: list[Workload]) -> None:
        self.num_steps = self.num_accepted = self.num_drafted = self.num_tokens = self.num_prompt_tokens = 0
        self.propose: list[int] = []
        self.append: list[int] = []
        self.start = 0
        for number, request in enumerate(requests):
            self._run(drafter, f"r{number}", request)

    def _run(self, drafter: Drafter, request_id: str, request: Workload) -> None:
        text = np.asarray(request.prompt + request.output, dtype=np.int32)
        length = len(request.prompt)
        begun = clock()
        drafter.start(request_id, text[:length])
        self.start += clock() - begun
        self.num_prompt_tokens += length
        while length < len(text):
            before = clock()
            draft = drafter.propose(request_id, text[max(0, length - 64) : length], K)
            self.propose.append(clock() - before)
            right = text[length : length + len(draft)].tolist()
            num_accepted = next((i for i, token in enumerate(right) if token != draft[i]), len(right))
            new = text[length : length + num_accepted + 1].tolist()
            before = clock()
            drafter.append(request_id, new)
            self.append.append(clock() - before)
            length += len(new)
            self.num_steps += 1
            self.num_accepted += num_accepted
            self.num_drafted += len(draft)
            self.num_tokens += len(new)
        drafter.stop(request_id)


def print_replays(folder: Path, drafters: list[str]) -> None:
    cost = clock_cost()
    table("workload", "drafter", "steps", "plain automaton", "accepted/step", "at least", "drafted/step", "propose us",
          "append us/token", "prompt us/token")  # fmt: skip
    for name in WORKLOADS:
        requests = load(folder, name)
        for drafter in drafters if requests else []:
            seen = Replay(make(drafter), requests)
            row(
                name,
                drafter,
                seen.num_steps,
                STEPS[name],
                seen.num_accepted / seen.num_steps,
                ACCEPTED[name],
                seen.num_drafted / seen.num_steps,
                mean_us(seen.propose, cost),
                mean_us(seen.append, cost) * len(seen.append) / seen.num_tokens,
                seen.start / 1e3 / seen.num_prompt_tokens,
            )


# --- costs --------------------------------------------------------------------------------------------------


def fill(drafter: Drafter, bulk: IntArray, num_requests: int, length: int = 500) -> None:
    for number in range(num_requests):
        drafter.start(f"c{number}", bulk[:0])
        drafter.append(f"c{number}", bulk[number * length : (number + 1) * length].tolist())
        drafter.stop(f"c{number}")


def print_costs(folder: Path, drafters: list[str], num_cached: int = 1000, context: int = 8000) -> None:
    """One token a step. ``copy``: the prompt's end again with 3 % of edits; ``fresh``: text that was not seen."""
    bulk = load_bulk(folder)
    cost = clock_cost()
    table("drafter", "cached x 500", "context", "text", "propose us (at most 3)", "append us/token (at most 4)")
    for name in drafters:
        drafter = make(name)
        fill(drafter, bulk, num_cached)
        gc.collect()
        prompt = bulk[5_100_000 : 5_100_000 + context]
        for kind, text in (("copy", edited(prompt[-900:])), ("fresh", bulk[5_500_000:5_500_900])):
            full = np.concatenate([prompt, text])
            drafter.start(kind, prompt)
            propose, append = [], []
            for length in range(context, len(full)):
                tail, new = full[length - 64 : length], full[length : length + 1].tolist()
                before = clock()
                drafter.propose(kind, tail, K)
                between = clock()
                drafter.append(kind, new)
                propose.append(between - before)
                append.append(clock() - between)
            drafter.stop(kind)
            row(name, num_cached, context, kind, mean_us(propose, cost), mean_us(append, cost))


def edited(text: IntArray, share: float = 0.03) -> IntArray:
    chance = np.random.default_rng(0)
    kept: IntArray = text[chance.random(len(text)) > share / 2].copy()
    changed = chance.random(len(kept)) < share / 2
    kept[changed] = chance.integers(300, 30000, int(changed.sum()))
    return kept


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def print_memory(folder: Path, drafters: list[str], num_cached: int = 1000) -> None:
    bulk = load_bulk(folder)
    table("drafter", "cached x 500", "bytes/cached token (at most 160)")
    for name in drafters:
        drafter = make(name)
        fill(drafter, bulk, 2)
        gc.collect()
        before = resident()
        fill(drafter, bulk[1000:], num_cached)
        gc.collect()
        row(name, num_cached, (resident() - before) / (num_cached * 500))
        del drafter
        gc.collect()


def batch_of(requests: Sequence[Request], texts: Sequence[IntArray]) -> Batch:
    return Batch(
        tuple(requests),
        tuple(map(TokenIds, texts)),
        tuple(len(text) - 1 for text in texts),
        (1000,) * len(texts),
        (0,) * len(texts),
    )


def print_prompt(folder: Path, num_tokens: int = 128_000) -> None:
    text = load_bulk(folder)[5_000_000 : 5_000_000 + num_tokens + 1]
    proposer = SuffixProposer(SuffixOptions(), num_speculative_tokens=K, vocab_size=32_000)
    request = Request("r", TokenIds(text[:-1]), SamplingParams(), seed=0)
    proposer.specplug_start_request(request)
    batch = batch_of([request], [text])
    steps = []
    while not steps or (not proposer.propose(batch, [K]).num_slots and len(steps) < 100):
        before = clock()
        proposer.specplug_advance(batch)
        steps.append((clock() - before) / 1e6)
    before = clock()
    proposer.specplug_finish_request(request)
    freed = (clock() - before) / 1e6
    table("prompt tokens", "steps", "ms together", "longest step ms (at most 15)", "ms to free it")
    row(num_tokens, len(steps), sum(steps), max(steps), freed)


def requests_of(folder: Path, num_requests: int) -> list[Workload]:
    mixed = [each for name in ("edit", "versions", "extract", "agent") for each in load(folder, name)]
    random.Random(3).shuffle(mixed)
    return mixed[:num_requests]


def steps_in_batch(drafter: Drafter, requests: list[Workload]) -> Iterator[tuple[float, float]]:
    """Milliseconds of a step of all requests, scaled to the full batch, and tokens a request."""
    texts = [np.asarray(prompt + output, dtype=np.int32) for prompt, output in requests]
    lengths = [len(prompt) for prompt, _ in requests]
    for number, text in enumerate(texts):
        drafter.start(f"b{number}", text[: lengths[number]])
    active = list(range(len(texts)))
    while len(active) > len(texts) // 2:
        spent = num_new = 0
        for number in active:
            text, length = texts[number], lengths[number]
            before = clock()
            draft = drafter.propose(f"b{number}", text[length - 64 : length], K)
            spent += clock() - before
            right = text[length : length + len(draft)].tolist()
            num_accepted = next((i for i, token in enumerate(right) if token != draft[i]), len(right))
            new = text[length : length + num_accepted + 1].tolist()
            before = clock()
            drafter.append(f"b{number}", new)
            spent += clock() - before
            lengths[number] += len(new)
            num_new += len(new)
        yield spent / 1e6 / len(active) * len(texts), num_new / len(active)
        active = [number for number in active if lengths[number] < len(texts[number])]


def print_batch(folder: Path, drafters: list[str], size: int = 64) -> None:
    bulk = load_bulk(folder)
    table("drafter", "batch", "ms/step mean (at most 5)", "p99 (at most 10)", "tokens/step/request")
    for name in drafters:
        drafter = make(name)
        fill(drafter, bulk, 1000)
        steps = list(steps_in_batch(drafter, requests_of(folder, size)))
        times = sorted(spent for spent, _ in steps)
        tokens = statistics.fmean(each for _, each in steps)
        row(name, size, statistics.fmean(times), times[int(0.99 * len(times))], tokens)


def print_admission(folder: Path, drafters: list[str], num_cached: int = 1000) -> None:
    bulk = load_bulk(folder)
    table("drafter", "cached, full", "ms to admit one more (at most 0.1)", "longest", "resident MB more after 300")
    for name in drafters:
        drafter = make(name, max_cached_requests=num_cached)
        fill(drafter, bulk, num_cached)
        before_all, times = resident(), []
        for number in range(300):
            before = clock()
            drafter.start(f"a{number}", bulk[:0])
            times.append((clock() - before) / 1e6)
            drafter.append(f"a{number}", bulk[5_200_000 + number * 500 :][:500].tolist())
            drafter.stop(f"a{number}")
        row(name, num_cached, f"{statistics.fmean(times):.4f}", f"{max(times):.3f}", (resident() - before_all) / 1e6)


def main() -> None:
    parts = ("replay", "cost", "memory", "prompt", "batch", "admit")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(".cache/suffix"), help="where the workloads are, or go")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--drafter", nargs="+", choices=("suffix", "arctic", "arctic64"))
    arguments = parser.parse_args()
    has_peer = importlib.util.find_spec("arctic_inference") is not None
    drafters = arguments.drafter or ["suffix", *(("arctic", "arctic64") if has_peer else ())]
    folder: Path = arguments.data
    print(
        f"python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"{'with' if has_peer else 'without'} arctic-inference"
    )
    runs = {
        "replay": lambda: print_replays(folder, drafters),
        "cost": lambda: print_costs(folder, drafters),
        "memory": lambda: print_memory(folder, drafters),
        "prompt": lambda: print_prompt(folder),
        "batch": lambda: print_batch(folder, drafters),
        "admit": lambda: print_admission(folder, drafters),
    }
    for part in arguments.only:
        runs[part]()


if __name__ == "__main__":
    main()
