"""What an n-gram proposal costs, and what back-off saves.

    python benchmarks/ngram.py [--lengths 1000 10000 50000] [--steps 300]

First table: microseconds of CPU time per proposal (index the newest token, look up, build the draft; median
and largest over the steps) and per prompt token, milliseconds of the longest piece of a prompt indexed in one step,
and bytes per token; for texts from kind to worst case. Second table: drafted
and emitted tokens per step in replays of the standard library's sources, with and without back-off, and the speed
over plain decoding if each drafted token costs 1 %, 10 % or 15 % of a step.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import platform
import random
import re
import statistics
import textwrap
import time
import tracemalloc
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import takewhile
from operator import eq
from typing import Any

import numpy as np

from specplug.proposers.ngram import MAX_TOKENS_PER_STEP, NgramOptions, NgramProposer
from specplug.sampling_params import SamplingParams
from specplug.types import Batch, Request, TokenIds

MODULES = ("argparse", "asyncio.events", "decimal", "doctest", "heapq", "inspect", "logging", "pickle", "queue",
           "shlex", "tarfile", "textwrap", "threading", "tokenize", "typing", "unittest.mock", "zipfile")  # fmt: skip


class Words:
    """Numbers words, spaces and signs of a text in order of appearance: a tokenizer without a model."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        parts = re.findall(r"\w+|\s+|[^\w\s]", text)
        return [self._ids.setdefault(part, len(self._ids)) for part in parts]


def source(module: str) -> str:
    return inspect.getsource(import_module(module))


def source_tokens(num_tokens: int) -> list[int]:
    words, tokens = Words(), list[int]()
    while len(tokens) < num_tokens:
        for module in MODULES:
            tokens += words.encode(source(module))
    return tokens[:num_tokens]


TEXTS: dict[str, Callable[[int], list[int]]] = {
    "source code": source_tokens,
    "random, 300 ids": lambda n: random.Random(0).choices(range(300), k=n),
    "random, 2 ids": lambda n: random.Random(0).choices(range(2), k=n),
    "all different": lambda n: list(range(n)),
    "period 4": lambda n: ([1, 2, 3, 4] * n)[:n],
    "one token": lambda n: [7] * n,
    "periodic, then broken": lambda n: [7] * (n - 2) + [8, 7],
    "runs": lambda n: [token // (n // 20 or 1) for token in range(n)],
}


def batch_of(buffer: np.ndarray[Any, np.dtype[np.int32]], num_tokens: int, request: Request) -> Batch:
    return Batch((request,), (TokenIds(buffer[:num_tokens]),), (num_tokens - 1,), (1000,), (0,))


def indexed(ids: list[int]) -> tuple[NgramProposer, Request, list[float]]:
    """A proposer that has indexed a prompt of ``ids``, and the seconds of each piece of it."""
    buffer = np.array(ids, dtype=np.int32)
    request = Request("r", TokenIds(buffer[:-1]), SamplingParams(), seed=0)
    proposer = NgramProposer(NgramOptions(), num_speculative_tokens=5, max_model_len=10**9)
    proposer.specplug_start_request(request)
    pieces = []
    for length in [*range(MAX_TOKENS_PER_STEP, len(ids), MAX_TOKENS_PER_STEP), len(ids)]:
        batch = batch_of(buffer, length, request)
        start = time.thread_time()
        proposer.specplug_advance(batch)
        pieces.append(time.thread_time() - start)
    return proposer, request, pieces


def print_costs(text: str, num_tokens: int, num_steps: int) -> None:
    ids = TEXTS[text](num_tokens)
    proposer, request, pieces = indexed(ids)
    buffer = np.array(ids + ids[:num_steps], dtype=np.int32)
    steps = []
    for length in range(num_tokens + 1, num_tokens + num_steps + 1):
        batch = batch_of(buffer, length, request)
        start = time.thread_time()
        proposer.propose(batch, [5])
        steps.append((time.thread_time() - start) * 1e6)
    steps = steps[5:]  # the first calls import and warm up
    print(
        f"{text:22} {num_tokens:7} {statistics.median(steps):9.1f} {max(steps):9.1f} "
        f"{sum(pieces) / num_tokens * 1e6:10.2f} {max(pieces) * 1e3:9.1f} {bytes_per_token(ids):9.0f}"
    )


def bytes_per_token(ids: list[int]) -> float:
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    kept = indexed(ids)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return (after - before) / len(ids)


def edited(text: str) -> str:
    """A scripted edit: some lines go, some names change."""
    chance = random.Random(0)
    lines = []
    for line in text.splitlines(keepends=True):
        drawn = chance.random()
        if drawn >= 0.04:
            lines.append(line.replace("self", "this").replace("text", "body") if drawn < 0.1 else line)
    return "".join(lines)


def replay_inputs() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Kind of text, and pairs of prompt and output."""
    whole = source("textwrap")
    yield "edit a file", [(whole, edited(whole))]
    yield "continue code", [(source(module)[:500], source(module)[500:8000]) for module in MODULES]
    prose = [textwrap.dedent("\n".join(re.findall(r'"""(.*?)"""', source(module), re.DOTALL))) for module in MODULES]
    yield "continue prose", [(text[:500], text[500:8000]) for text in prose]


def replay(pairs: list[tuple[str, str]], options: NgramOptions, k: int) -> tuple[int, int, int]:
    """Steps, drafted and emitted tokens when every output is known beforehand."""
    num_steps = num_drafted = num_emitted = 0
    words = Words()
    for prompt_text, output_text in pairs:
        prompt, output = words.encode(prompt_text), words.encode(output_text)
        buffer = np.array(prompt + output, dtype=np.int32)
        proposer = NgramProposer(options, num_speculative_tokens=k, max_model_len=10**9)
        request = Request("r", TokenIds(buffer[: len(prompt)]), SamplingParams(), seed=0)
        length = len(prompt) + 1
        while length < len(buffer):
            draft = proposer.propose(batch_of(buffer, length, request), [k]).draft_token_ids.tolist()
            expected = buffer[length : length + len(draft)].tolist()
            num_accepted = sum(1 for _ in takewhile(bool, map(eq, draft, expected)))
            num_steps += 1
            num_drafted += len(draft)
            num_emitted += num_accepted + 1
            length += num_accepted + 1
    return num_steps, num_drafted, num_emitted


def print_replays() -> None:
    print("\nreplay          match   K back-off drafted/step emitted/step  at 1 %  at 10 %  at 15 %")
    for kind, pairs in replay_inputs():
        for shortest, longest, k in ((5, 5, 5), (2, 5, 5), (1, 3, 5), (2, 5, 20)):
            for back_off in (False, True):
                keys = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest, "ngram_backoff": back_off}
                steps, drafted, emitted = replay(pairs, NgramOptions.model_validate(keys), k)
                speeds = "  ".join(f"{emitted / (steps + cost * drafted):7.2f}" for cost in (0.01, 0.1, 0.15))
                print(
                    f"{kind:15} {shortest}..{longest} {k:4} {'on' if back_off else 'off':>8} "
                    f"{drafted / steps:12.2f} {emitted / steps:12.2f} {speeds}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 10_000, 50_000])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    print(
        f"python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]}"
    )
    print(f"{'text':22} context us median    us max  us/prompt  ms piece bytes/tok")
    for text in TEXTS:
        for num_tokens in arguments.lengths:
            print_costs(text, num_tokens, arguments.steps)
    print_replays()


if __name__ == "__main__":
    main()
