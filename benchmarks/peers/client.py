"""Start the runners of ``benchmarks/peers`` and time them against each other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

__all__ = ["Peer", "Timed"]

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Timed:
    """Decoding of several requests added up; ``tokens_per_row_step`` is None where steps are not known."""

    tokens: int
    seconds: float
    row_steps: int | None
    outputs: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_row_step(self) -> float | None:
        return self.tokens / self.row_steps if self.row_steps else None


class Peer:
    """An engine in its own process; ``python`` is the interpreter of its environment."""

    def __init__(self, label: str, script: str, options: Sequence[str], *, python: str | None = None) -> None:
        self.label = label
        self._command = [python or sys.executable, str(HERE / script), *options]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._requests = cast(IO[str], self._process.stdin)
        self._answers = cast(IO[str], self._process.stdout)
        self.about: Mapping[str, Any] = self._read()

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"the peer {self.label} ended early; run its script by hand to see why")
        found: dict[str, Any] = json.loads(line)
        return found

    def restart(self) -> None:
        """A fresh process: where its memory lies can make one several percent faster than the next."""
        self._stop()
        self._start()

    def _ask(self, prompts: Sequence[str], n_tokens: int) -> dict[str, Any]:
        self._requests.write(json.dumps({"prompts": list(prompts), "n_tokens": n_tokens}) + "\n")
        self._requests.flush()
        return self._read()

    def run(self, prompts: Sequence[str], n_tokens: int, batch: int) -> Timed:
        """Decode the prompts, ``batch`` at a time."""
        groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
        answers = [self._ask(group, n_tokens) for group in groups]
        steps = [answer["row_steps"] for answer in answers]
        return Timed(
            tokens=sum(answer["tokens"] for answer in answers),
            seconds=sum(answer["seconds"] for answer in answers),
            row_steps=None if None in steps else sum(steps),
            outputs=[ids for answer in answers for ids in answer["outputs"]],
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._requests.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
