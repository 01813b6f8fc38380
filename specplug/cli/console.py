"""Where output goes: results to stdout, everything about them (errors, progress, statistics) to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["error", "note", "output", "percent_bar", "progress", "silence_transformers", "text_table"]

_WIDTH_OF_FILES = 140


def output() -> Console:
    """A console on stdout; wide where that is no terminal, so that tables in files keep their lines."""
    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    return Console(file=sys.stdout, highlight=False, width=width)


def _messages() -> Console:
    # The stream is bound now: whoever redirects sys.stderr later (a library's noise) does not take the bars along.
    return Console(file=sys.stderr, highlight=False)


def text_table(title: str, *columns: str) -> Table:
    """A table without rows. What is too long for its column goes on in the next line, none of it is left out."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0, overflow="fold")
    return table


def error(text: str) -> None:
    """An error message, on stderr."""
    _messages().print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)


def note(text: str) -> None:
    """A line about the result, on stderr."""
    _messages().print(escape(text), soft_wrap=True)


def silence_transformers() -> None:
    """Switch off transformers' own bars, which would tear ours."""
    from transformers.utils import logging

    transformers_logging: Any = logging
    transformers_logging.disable_progress_bar()


@contextmanager
def progress() -> Iterator[Progress]:
    """Bars on stderr that vanish when done; nothing at all where stderr is no terminal."""
    console = _messages()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(show_speed=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield bars


@contextmanager
def percent_bar(description: str) -> Iterator[Callable[[str, float], None]]:
    """One bar, moved by calls of (what is being done, fraction done)."""
    with progress() as bars:
        task = bars.add_task(description, total=1.0)
        yield lambda what, fraction: bars.update(task, description=what, completed=fraction)
