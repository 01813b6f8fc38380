"""``specplug demo``: a real model, plain and with a plugin, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specplug.cli import options

__all__ = ["demo"]


def demo(
    method: Annotated[str, typer.Option("--method", metavar="NAME", help="Any installed method.")] = "ngram",
    model: options.Model = None,
    speculative_config: options.SpeculativeConfigText = None,
    plot: Annotated[Path, typer.Option("--plot", metavar="FILE", help="Where the PNG goes.")] = Path(
        "specplug-demo.png"
    ),
    minutes: Annotated[float, typer.Option("--minutes", help="Stop repeating runs after this long.")] = 6.0,
    quick: Annotated[bool, typer.Option("--quick", help="Two prompts per kind, few tokens: a smoke test.")] = False,
) -> None:
    """Decode five kinds of prompts plain and with a method; print tables, an identity report, and save a plot."""
    from specplug.cli.console import note, output, progress, silence_transformers
    from specplug.demo.run import DemoPlan, run_demo

    options.check_model(model)
    settings: dict[str, Any] = {"method": method, "speculative_config": speculative_config, "minutes": minutes}
    folder = model or options.default_model()
    plan = DemoPlan.quick(**settings) if quick else DemoPlan.full(**settings)
    console = output()
    silence_transformers()
    with progress() as bars:
        report = run_demo(folder, plan, bars)
    for part in report.renderables():
        console.print(part)
    note(report.save_plot(plot))
    if not report.is_identical:
        raise typer.Exit(1)
