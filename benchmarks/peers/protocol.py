"""How a benchmark drives an engine in its own process, and often in its own environment.

A runner (``*_peer.py``) loads its engine, prints one line of JSON about itself, and then answers each line of JSON
on stdin, ``{"prompts": [...], "n_tokens": N}``, with one on stdout: ``tokens`` and ``seconds`` of decoding (from the
moment every prompt has its first token), ``row_steps`` (target forwards times rows after that; null if unknown), and
the ``outputs`` as token ids. Greedy, end of sequence ignored, prompts decoded together. Everything that an engine
prints goes to stderr. No specplug is needed where a peer runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Run = Callable[[Sequence[str], int], dict[str, Any]]


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that all runners take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="folder of the model (llama.cpp: the GGUF file)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--k", type=int, default=5, help="draft tokens per step")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser


def serve(load: Callable[[], tuple[dict[str, Any], Run]]) -> None:
    """Load the engine, introduce it, and answer requests until stdin closes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    about, run = load()
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        with contextlib.redirect_stdout(sys.stderr):
            answer = run(request["prompts"], request["n_tokens"])
        print(json.dumps(answer), file=answers, flush=True)


class Marks:
    """When tokens came: (time, tokens so far). Decoding counts from the first mark."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, int]] = []
        self._total = 0

    def add(self, num_tokens: int) -> None:
        self._total += num_tokens
        self._marks.append((time.perf_counter(), self._total))

    def restart(self) -> None:
        """Forget all but the newest: what came before belongs to the prompts."""
        del self._marks[:-1]

    @property
    def num_steps(self) -> int:
        return len(self._marks) - 1

    def answer(self, outputs: list[list[int]], row_steps: int | None) -> dict[str, Any]:
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return {"tokens": last - first, "seconds": end - start, "row_steps": row_steps, "outputs": outputs}


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """A result and the seconds it took."""
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def by_difference(short_s: float, long_s: float, outputs: list[list[int]], row_steps: int | None) -> dict[str, Any]:
    """For engines that only return whole texts: T(n tokens) - T(1 token) of the same prompts."""
    tokens = sum(len(ids) - 1 for ids in outputs)
    return {"tokens": tokens, "seconds": long_s - short_s, "row_steps": row_steps, "outputs": outputs}
