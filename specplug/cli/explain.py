"""``specplug explain``: the resolved configuration, where each value came from, and who serves it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from specplug.cli import options
from specplug.cli.console import output, text_table
from specplug.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from specplug.config import Explanation, PluginRow, SettingRow

__all__ = ["explain"]


def explain(
    model: options.Model = None,
    speculative_config: options.SpeculativeConfigText = None,
    config: options.ConfigFile = None,
    plugin: options.Plugins = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    kernels: options.Kernels = None,
    max_model_len: options.MaxModelLen = None,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Permit verifiers that change the target's distribution.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a configuration resolves to, without loading weights."""
    settings = options.gather(
        config,
        model=model,
        speculative_config=speculative_config,
        plugins=plugin,
        engine={"dtype": dtype, "device": device, "kernels": kernels, "max_model_len": max_model_len},
    )
    found = _resolve(settings, allow_lossy=allow_lossy)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), default=str, indent=2))
        return
    console = output()
    for part in _render(found):
        console.print(part)


def _resolve(settings: options.Settings, *, allow_lossy: bool) -> Explanation:
    from specplug import config
    from specplug.hooks import process_manager

    manager = process_manager()
    model = settings.model or str(options.demo_model_folder())
    faults: list[str] = []
    notes: tuple[str, ...] = ()
    try:
        options.check_model(settings.model)
    except ConfigError as error:
        faults += error.faults
    try:
        engine, notes = config.resolve_engine_args(model, settings.engine)
    except ConfigError as error:
        faults += [fault for fault in error.faults if fault not in faults]
        engine = config.EngineArgs(model=model)
    try:
        resolved = config.resolve_speculative_config(
            settings.speculative_config,
            manager.methods,
            plugins=settings.plugins,
            engine=engine,
            allow_lossy=allow_lossy,
        )
    except ConfigError as error:
        raise ConfigError([*faults, *error.faults]) from error
    if faults:
        raise ConfigError(faults)
    distributions = {each.name: manager.describe(each.name) for each in resolved.plugins}
    filled_in = () if settings.model else ("model",)
    return config.explain(resolved, engine, notes, manager.methods, distributions=distributions, filled_in=filled_in)


def _render(found: Explanation) -> Iterable[RenderableType]:
    if found.method is None:
        yield "speculation: off (no speculative_config)"
    else:
        tokens = f"{found.num_speculative_tokens} speculative tokens"
        yield f"method: {found.method}, {tokens}, verified by {found.verify_method}"
    if found.settings:
        yield _settings_table("speculative_config", found.settings)
    yield _settings_table("engine arguments", found.engine)
    yield _plugin_table(found.plugins)
    if found.draft_length_by_batch_size is not None:
        lengths = ", ".join(f"{size}: {k}" for size, k in enumerate(found.draft_length_by_batch_size, 1))
        yield f"draft length by batch size: {lengths}"
    for note in found.notes:
        yield escape(f"note: {note}")


def _settings_table(title: str, rows: Iterable[SettingRow]) -> Table:
    table = text_table(title, "key", "value", "origin", "meaning")
    for row in rows:
        meaning = row.meaning if row.term in ("acts", "plugin") else f"({row.term}) {row.meaning}"
        table.add_row(row.key, escape(_shown(row.value)), escape(row.origin), escape(meaning))
    return table


def _plugin_table(rows: Iterable[PluginRow]) -> Table:
    table = text_table("plugins, in the order they are asked", "plugin", "kind", "because of", "served by", "options")
    for row in rows:
        settings = ", ".join(f"{option.key}={_shown(option.value)}" for option in row.options)
        table.add_row(row.name, row.kind, escape(row.role), row.distribution or "", escape(settings))
    return table


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
