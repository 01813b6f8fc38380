"""``explain``: a resolved configuration as data, for the command line and for JSON."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel

from specplug.config.engine import EngineArgs
from specplug.config.keys import key_of
from specplug.config.resolve import ResolvedConfig
from specplug.config.schedule import SCHEDULE_KEY, expand_schedule
from specplug.config.schema import SpeculativeConfig
from specplug.methods import MethodSpec, PluginConfig

__all__ = ["Explanation", "PluginRow", "SettingRow", "explain"]


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting: its value, where that came from (given, default, inferred: ...), and what the key means."""

    key: str
    value: Any
    origin: str
    term: str
    meaning: str


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One active plugin. ``role``: what activated it; ``distribution``: name and version, where known."""

    name: str
    kind: str
    role: str
    summary: str
    distribution: str | None
    options: tuple[SettingRow, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What runs, and why. ``draft_length_by_batch_size``: the schedule written out, entry b - 1 for b requests."""

    method: str | None
    served_by: str | None
    num_speculative_tokens: int
    verify_method: str
    settings: tuple[SettingRow, ...]
    engine: tuple[SettingRow, ...]
    plugins: tuple[PluginRow, ...]
    draft_length_by_batch_size: tuple[int, ...] | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``json.dumps(..., default=str)`` takes."""
        return asdict(self)


def explain(
    resolved: ResolvedConfig,
    engine: EngineArgs,
    notes: Sequence[str],
    methods: Mapping[str, MethodSpec],
    *,
    distributions: Mapping[str, str] | None = None,
    filled_in: Collection[str] = (),
) -> Explanation:
    """Describe a resolved configuration. ``notes``: those of the engine arguments; ``distributions``: plugin name ->
    "distribution version", which the hooks layer knows; ``filled_in``: engine arguments that are the caller's defaults,
    not the user's."""
    served_by = next((name for name, role in _roles(resolved) if role == "method"), None)
    return Explanation(
        method=resolved.method,
        served_by=served_by,
        num_speculative_tokens=resolved.num_speculative_tokens,
        verify_method=_rule(resolved, methods, served_by),
        settings=tuple(_settings(resolved, served_by)),
        engine=tuple(_engine(engine, filled_in)),
        plugins=tuple(_plugin(each, resolved, methods[each.name], distributions or {}) for each in resolved.plugins),
        draft_length_by_batch_size=_schedule(resolved, engine),
        notes=(*notes, *resolved.notes),
    )


def _rule(resolved: ResolvedConfig, methods: Mapping[str, MethodSpec], served_by: str | None) -> str:
    """The rule that random rows will run by, also where it is left to the drafts' laws."""
    if resolved.verify_method != "auto" or served_by is None:
        return resolved.verify_method
    has_sampled_laws = bool(methods[served_by].capabilities.laws & {"dense", "indirect"})
    return "standard" if has_sampled_laws and not _drafts_greedily(resolved, served_by) else "match"


def _drafts_greedily(resolved: ResolvedConfig, served_by: str) -> bool:
    """Whether the method samples its drafts on request only, and was not asked to."""
    key = "draft_sample_method"
    used_by = key_of(SpeculativeConfig.model_fields[key]).used_by or frozenset()
    return served_by in used_by and getattr(resolved.speculative, key) == "greedy"


def _roles(resolved: ResolvedConfig) -> Iterable[tuple[str, str]]:
    return ((each.name, resolved.origins[f"plugins.{each.name}"]) for each in resolved.plugins)


def _settings(resolved: ResolvedConfig, served_by: str | None) -> Iterable[SettingRow]:
    """Keys that were set, and those at their defaults that the method reads."""
    if resolved.speculative is None:
        return
    for key, field in SpeculativeConfig.model_fields.items():
        rule, origin, value = key_of(field), resolved.origins[key], getattr(resolved.speculative, key)
        is_read = rule.term in ("acts", "plugin") and value is not None
        is_read &= rule.used_by is None or bool(rule.used_by & {resolved.method, served_by})
        if key == "rejection_sample_method" and resolved.verify_method == "auto":
            value, origin = "auto", "default"
        if origin != "default" or is_read:
            yield SettingRow(key, value, origin, rule.term, field.description or "")


def _engine(engine: EngineArgs, filled_in: Collection[str]) -> Iterable[SettingRow]:
    for name, field in EngineArgs.model_fields.items():
        value = getattr(engine, name)
        shown = _name_of(value) if name in ("model", "tokenizer") else value
        origin = "given" if name in engine.model_fields_set and name not in filled_in else "default"
        yield SettingRow(name, shown, origin, key_of(field).term, field.description or "")


def _name_of(model: object) -> object:
    if model is None or isinstance(model, str | os.PathLike):
        return None if model is None else os.fspath(model)
    return f"a loaded {type(model).__name__}"


def _plugin(
    config: PluginConfig, resolved: ResolvedConfig, spec: MethodSpec, distributions: Mapping[str, str]
) -> PluginRow:
    return PluginRow(
        name=config.name,
        kind=spec.kind,
        role=resolved.origins[f"plugins.{config.name}"],
        summary=spec.summary,
        distribution=distributions.get(config.name),
        options=tuple(_options(config.options)),
    )


def _options(options: BaseModel) -> Iterable[SettingRow]:
    """Options beside the schema's own keys, which ``settings`` has."""
    for key, field in type(options).model_fields.items():
        if key not in SpeculativeConfig.model_fields:
            origin = "given" if key in options.model_fields_set else "default"
            yield SettingRow(key, getattr(options, key), origin, "acts", field.description or "")


def _schedule(resolved: ResolvedConfig, engine: EngineArgs) -> tuple[int, ...] | None:
    schedule = getattr(resolved.speculative, SCHEDULE_KEY, None)
    if schedule is None:
        return None
    return expand_schedule(schedule, engine.max_num_seqs, resolved.num_speculative_tokens)
