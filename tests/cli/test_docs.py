from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from specplug.cli import app
from specplug.metrics import AcceptanceMetrics
from specplug.types import RequestStep, SourceCount, StepOutcome

DOCS = Path(__file__).parents[2] / "docs"


def options_of(command: str) -> set[str]:
    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {name for each in parameters for name in each.opts if name.startswith("--")}


@pytest.mark.parametrize("command", ["generate", "plugins", "explain", "demo", "doctor"])
def test_every_option_is_documented(command: str) -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert f"## specplug {command}" in text
    missing = {name for name in options_of(command) if f"`{name}`" not in text}
    assert not missing


def test_every_documented_option_exists() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    known = {"--version", "--help"}.union(*map(options_of, ["generate", "plugins", "explain", "demo", "doctor"]))
    assert set(re.findall(r"`(--[a-z_-]+)", text)) <= known


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    metrics = AcceptanceMetrics(2)
    rows = (
        RequestStep("a", 2, 1, 1, 2, (SourceCount("x", 2, 1, 1),)),
        RequestStep("b", 0, 0, 0, 1, skip_reason="limit"),
    )
    metrics.specplug_accept_metrics(StepOutcome(1, rows, faults={"x": 1}))
    documented = set(re.findall(r"^\| `((?:vllm|specplug):\w+)`", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    assert documented == {metric.name for metric in metrics.metrics()}
