"""Would suffix drafts be better as trees? Counted tokens per step, at equal verified tokens.

    python benchmarks/suffix_trees.py [--data FOLDER] [--only edit versions ...] [--requests N] [--longest N]

The plugin's draft of n tokens is compared with trees of n nodes: its first tokens, and beside the first of them up to
``width`` others that followed earlier, shorter or older, occurrences of the text's end, each with what followed it
(``depth`` tokens). A step keeps the best path and adds one token, so everything is counted and nothing is timed.
``--longest``: longer drafts, which are the surer ones, stay chains.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import takewhile
from operator import eq
from pathlib import Path

import numpy as np
from inputs.suffix import WORKLOADS, Workload, load
from specplug_suffix.bench import Drafter

K = 32
CONTEXTS = (8, 6, 4, 3, 2, 1)
"""Lengths of the text's end that alternatives are looked up by, longest first."""
NUM_KEPT = 8
"""Occurrences remembered of each."""
SHAPES = ((0, 0), (1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2))
"""(width, depth); the first is the chain."""


class Occurrences:
    """Where endings of up to 8 tokens occurred, in everything read so far; most recent first."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.start = 0
        self._places: dict[tuple[int, ...], list[int]] = {}

    def begin(self) -> None:
        """What comes next is another text."""
        self.start = len(self.text)

    def append(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            for size in CONTEXTS:
                if len(self.text) - self.start >= size:
                    places = self._places.setdefault(tuple(self.text[-size:]), [])
                    places.insert(0, len(self.text))
                    del places[NUM_KEPT:]
            self.text.append(token_id)

    def continuations(self, depth: int, known: int) -> Iterator[list[int]]:
        """What followed the text's end elsewhere, each beginning with another token, none with ``known``."""
        seen = {known}
        for size in CONTEXTS:
            if len(self.text) - self.start < size:
                continue
            for place in self._places.get(tuple(self.text[-size:]), ()):
                if self.text[place] not in seen:
                    seen.add(self.text[place])
                    yield self.text[place : place + depth]


def num_right(draft: Sequence[int], right: Sequence[int]) -> int:
    """Leading tokens of ``draft`` that are those of ``right``."""
    return sum(1 for _ in takewhile(bool, map(eq, draft, right)))


class Replay:
    """One workload, with trees of one shape."""

    def __init__(self, requests: list[Workload], width: int, depth: int, longest: int) -> None:
        self.width, self.depth, self.longest = width, depth, longest
        self.num_steps = self.num_accepted = self.num_nodes = self.num_beside = 0
        self.elsewhere = Occurrences()
        drafter = Drafter(k=K)
        for number, request in enumerate(requests):
            self._run(drafter, f"r{number}", request)

    def _run(self, drafter: Drafter, request_id: str, request: Workload) -> None:
        output = request.output
        drafter.start(request_id, np.asarray(request.prompt, dtype=np.int32))
        self.elsewhere.begin()
        self.elsewhere.append(request.prompt)
        length = 0
        while length < len(output):
            paths = self._paths(drafter.propose(request_id, None, K))
            right = output[length : length + K]
            num_accepted = max((num_right(path, right) for path in paths), default=0)
            new = output[length : length + num_accepted + 1]
            drafter.append(request_id, new)
            self.elsewhere.append(new)
            length += len(new)
            self.num_steps += 1
            self.num_accepted += num_accepted
            self.num_beside += bool(num_accepted) and num_right(paths[0], right) == 0
            self.num_nodes += sum(map(len, paths))
        drafter.stop(request_id)

    def _paths(self, draft: list[int]) -> list[list[int]]:
        """The draft and its alternatives, together as many tokens as the draft had."""
        if not 2 <= len(draft) <= self.longest or not self.width:
            return [draft]
        others: list[list[int]] = []
        room = len(draft) - 1
        for other in self.elsewhere.continuations(self.depth, draft[0]):
            if len(others) == self.width or not room:
                break
            others.append(other[:room])
            room -= len(others[-1])
        return [draft[: room + 1], *others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(".cache/suffix"), help="where the workloads are, or go")
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--requests", type=int, default=None, help="the first so many of each workload")
    parser.add_argument("--longest", type=int, default=K, help="most tokens of a draft that becomes a tree")
    arguments = parser.parse_args()
    print(
        "| workload | beside the first | steps | verified/step | tokens/step | against the chain | steps they helped |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in arguments.only:
        requests = load(arguments.data, name)[: arguments.requests]
        chain = 0.0
        for width, depth in SHAPES if requests else []:
            seen = Replay(requests, width, depth, arguments.longest)
            tokens = (seen.num_accepted + seen.num_steps) / seen.num_steps
            chain = chain or tokens
            shape = f"{width} x {depth}" if width else "nothing (chain)"
            print(
                f"| {name} | {shape} | {seen.num_steps} | {seen.num_nodes / seen.num_steps:.2f} | {tokens:.3f} | "
                f"{100 * (tokens / chain - 1):+.1f} % | {100 * seen.num_beside / seen.num_steps:.1f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()
