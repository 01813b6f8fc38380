"""``specplug plugins``: what is installed, who serves it, and whether it can be used; and what kernels are."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from specplug.hooks import PluginReport

__all__ = ["plugins"]


def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List every plugin with its kind, distribution, hooks, options and status; below, the installed kernels."""
    from rich.markup import escape

    from specplug.cli.console import output
    from specplug.hooks import process_manager

    reports = process_manager().report()
    if as_json:
        typer.echo(json.dumps([_as_dict(report) for report in reports], indent=2))
        return
    console = output()
    console.print(_table(reports))
    if kernels := _kernels():
        console.print(f" kernels: {escape(kernels)}", soft_wrap=True)


def _as_dict(report: PluginReport) -> dict[str, Any]:
    found = dataclasses.asdict(report)
    for option in found["options"]:
        option["default"] = _plain(option["default"])
    return found


def _plain(value: Any) -> Any:
    """Defaults of third-party options may be anything."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return repr(value)


def _kernels() -> str:
    """By their metadata: whether this machine runs them shows when a model is loaded (``LLM.kernels``)."""
    from specplug.config.kernels import GROUP
    from specplug.hooks.discovery import discover

    found = discover(group=GROUP)
    return ", ".join(f"{name} ({claim.origin})" for name, each in found.items() for claim in each.candidates)


def _table(reports: list[PluginReport]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("plugin", no_wrap=True)
    for column in ("kind", "served by", "status", "what it is"):
        table.add_column(column)
    table.add_column("keys", no_wrap=True)
    for report in reports:
        served_by = " ".join(part for part in (report.distribution, report.version) if part)
        status = f"[red]{report.status}[/]" if report.status == "failed" else report.status
        about = "\n".join(part for part in (report.summary, report.reason) if part)
        keys = "\n".join(option.name for option in report.options)
        table.add_row(report.name, report.kind or "", served_by, status, escape(about), keys)
    return table
