"""Time of a training run, counted in CPU time: a busy machine then makes no worse a draft, only a later one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import circumstances

__all__ = ["CORES", "Budget", "write_report"]

CORES = 2
"""What a minute of budget is a minute of."""


class Budget:
    """``minutes`` of ``CORES`` cores that this process may use from now on."""

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self._cpu_start = time.process_time()
        self._wall_start = time.monotonic()

    @property
    def used_minutes(self) -> float:
        """CPU time of all threads so far, in minutes of ``CORES`` cores."""
        return (time.process_time() - self._cpu_start) / 60 / CORES

    @property
    def fraction(self) -> float:
        """The part that is used up; 1 or more: stop."""
        return self.used_minutes / self.minutes if self.minutes > 0 else 1.0

    def times(self) -> dict[str, float]:
        """For reports."""
        return {
            "cpu_seconds": round(self.used_minutes * 60 * CORES, 1),
            "minutes_of_2_cores": round(self.used_minutes, 2),
            "wall_seconds": round(time.monotonic() - self._wall_start, 1),
        }


def write_report(folder: Path, found: Mapping[str, Any]) -> None:
    """Write ``training.json`` beside the weights, and print it."""
    about = circumstances(float("nan"))
    report = {**found, "device": about["device"], "versions": about["versions"], "git": about["git"]}
    text = json.dumps(report, indent=2)
    (folder / "training.json").write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
