"""Shared by the benchmarks: what the machine was doing, paired ratios, result files."""

from __future__ import annotations

import csv
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["RESULTS", "Ratio", "busy_cores", "circumstances", "paired_ratio", "wait_until_idle", "write_csv"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("specplug", "torch", "transformers", "numpy", "pluggy")


# --- the machine ----------------------------------------------------------------------------------------------


def busy_cores(seconds: float = 2.0) -> float:
    """CPU time that other processes use while this one sleeps, in cores; nan where /proc/stat is not there."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return math.nan

    def busy_ticks() -> int:
        fields = [int(field) for field in stat.read_text().splitlines()[0].split()[1:8]]
        return sum(fields) - fields[3] - fields[4]

    start, before = time.monotonic(), busy_ticks()
    time.sleep(seconds)
    return (busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - start)


def wait_until_idle(limit: float = 0.2, most_s: float = 60.0) -> float:
    """Wait until other processes use less than ``limit`` cores, at most ``most_s``; returns what they use then."""
    deadline = time.monotonic() + most_s
    while (busy := busy_cores()) > limit and time.monotonic() < deadline:
        pass
    return busy


def device_name() -> str:
    """The processor and its cores as the operating system names them."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in _lines(cpuinfo) if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def git_sha() -> str:
    """The commit that is measured, with + where tracked files differ from it."""
    sha = _git("rev-parse", "--short=12", "HEAD")
    return sha + "+" if sha and _git("status", "--porcelain", "--untracked-files=no") else sha or "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def circumstances(load: float, **versions: str) -> dict[str, str]:
    """Columns that every result row carries. ``load``: busy cores before the run; ``versions``: of peers."""
    found = {name: _version(name) for name in PACKAGES} | versions
    return {
        "device": device_name(),
        "versions": " ".join(f"{name}={number}" for name, number in found.items()),
        "git": git_sha(),
        "busy_cores_before": f"{load:.2f}",
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


# --- numbers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much larger the first of each pair is: median, and the 95 % interval of the (geometric) mean."""

    median: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}] over {self.num_pairs} pairs"


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """Ratios of neighbouring runs, so that a slow phase of the machine falls on both. Needs two pairs or more."""
    logs = [math.log(a / b) for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(logs)
    half = _t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = math.exp(mean - half), math.exp(mean + half)
    return Ratio(math.exp(statistics.median(logs)), low, high, len(logs))


def _t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t: exact for few degrees of freedom, an expansion beyond."""
    exact = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
    if degrees <= len(exact):
        return exact[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


# --- files ----------------------------------------------------------------------------------------------------


def write_csv(name: str, rows: Sequence[Mapping[str, object]], *, key: Sequence[str] = ()) -> Path:
    """Write ``benchmarks/results/<name>.csv``; the columns are those of all rows, in order of appearance.

    ``key``: columns that tell rows apart. Rows that are there already stay, unless a new one replaces them: what is
    measured in pieces ends in one file.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    if key and path.is_file():
        new = {_key_of(row, key) for row in rows}
        with path.open(newline="", encoding="utf-8") as found:
            rows = [*(row for row in csv.DictReader(found) if _key_of(row, key) not in new), *rows]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def _key_of(row: Mapping[str, object], key: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(row.get(column, "")) for column in key)
