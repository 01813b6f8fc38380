"""``resolve_speculative_config``: from what the user wrote to what runs, or to every fault at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from specplug.config.activation import SCHEDULE_PLUGIN, activate, build_plugins
from specplug.config.checks import check_together, check_usage, clamp_schedule, read_schedule
from specplug.config.draft_length import K_KEY, draft_length_text, resolve_draft_length
from specplug.config.engine import EngineArgs
from specplug.config.keys import key_of, term_fault, term_note
from specplug.config.method import resolve_method
from specplug.config.reading import PluginEntry, read_mapping, read_plugin_entry
from specplug.config.resolution import PREFIX, Resolution
from specplug.config.schedule import SCHEDULE_KEY
from specplug.config.schema import ENGINE_FILLED, SpeculativeConfig
from specplug.config.unknown import UnknownKeys
from specplug.config.validation import validate
from specplug.config.verification import check_laws, resolve_rule, resolve_synthetic
from specplug.errors import ConfigError
from specplug.methods import MethodSpec, PluginConfig

__all__ = ["ResolvedConfig", "resolve_speculative_config"]


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration that can run.

    ``speculative`` holds the resolved keys, None without speculation; ``num_speculative_tokens`` is then 0, as with a
    method that drafts nothing.
    ``plugins``: every activated plugin, in the order in which hooks ask them: the method's, those that keys
    activate, a verifier, ``plugins=``, the default observer.
    ``origins``: key -> "given", "default" or "inferred: <from what>"; ``plugins.<name>`` -> what activated it.
    ``notes``: keys without effect here, defaults worth knowing.
    ``verify_method``: "auto", a built-in rule, or a verifier plugin's name.
    """

    speculative: SpeculativeConfig | None
    method: str | None
    num_speculative_tokens: int
    plugins: tuple[PluginConfig, ...]
    origins: Mapping[str, str]
    notes: tuple[str, ...]
    verify_method: str


def resolve_speculative_config(
    value: Mapping[str, Any] | str | None,
    methods: Mapping[str, MethodSpec],
    *,
    plugins: Sequence[Mapping[str, Any] | str] = (),
    engine: EngineArgs,
    allow_lossy: bool = False,
) -> ResolvedConfig:
    """Resolve vLLM's ``speculative_config`` (mapping, JSON text or None) and ``plugins`` against ``methods``.

    ``methods`` maps names to specs; only names that the configuration asks for are looked up.
    Raises one ``ConfigError`` that lists every fault; its cause is the first plugin that failed to load, if any.
    """
    work = Resolution(methods=methods, engine=engine, allow_lossy=allow_lossy)
    given = _read(work, value)
    entries = _read_entries(work, plugins)
    if given is not None:
        work.given = given
        _read_keys(work)
        resolve_method(work)
        resolve_rule(work)
    activate(work, entries)
    if given is not None:
        _check_keys(work)
    check_laws(work)
    return _finish(work, entries, is_on=given is not None)


def _read(work: Resolution, value: object) -> dict[str, Any] | None:
    try:
        return read_mapping(value, PREFIX)
    except ConfigError as error:
        work.faults.extend(error.faults)
        return None


def _read_entries(work: Resolution, plugins: Sequence[Mapping[str, Any] | str]) -> list[PluginEntry]:
    entries = []
    for number, each in enumerate([plugins] if isinstance(plugins, str | Mapping) else plugins):
        try:
            entries.append(read_plugin_entry(each, number))
        except ConfigError as error:
            work.faults.extend(error.faults)
    return entries


def _read_keys(work: Resolution) -> None:
    """Validate the schema's keys one by one and apply their terms."""
    fields = SpeculativeConfig.model_fields
    known = {key: value for key, value in work.given.items() if key in fields and key != SCHEDULE_KEY}
    config, faults = validate(SpeculativeConfig, known, lambda key: f"{PREFIX}.{key}", explain=_better_text)
    work.faults += faults
    if config is not None:
        work.values = {key: getattr(config, key) for key in config.model_fields_set}
    work.origins.update(dict.fromkeys(work.values, "given"))
    if work.given.get(SCHEDULE_KEY) is not None:
        read_schedule(work, work.given[SCHEDULE_KEY])
        work.origins[SCHEDULE_KEY] = "given"
    for key, value in list(work.values.items()):
        rule = key_of(fields[key])
        fault, note = term_fault(f"{PREFIX}.{key}", value, rule), term_note(f"{PREFIX}.{key}", value, rule)
        if fault is not None:
            work.faults.append(_engine_filled(key) or fault)
        if note is not None:
            work.notes.append(note)


def _better_text(key: str, value: Any) -> str | None:
    return draft_length_text(value) if key == K_KEY else None


def _engine_filled(key: str) -> str | None:
    if key not in ENGINE_FILLED:
        return None
    return (
        f"{PREFIX}.{key} is an internal field, filled in by the host, and must not be set. Name the target with the "
        f"host's model option and the draft with {PREFIX}.model."
    )


def _check_keys(work: Resolution) -> None:
    _own_keys(work)
    check_usage(work)
    resolve_draft_length(work)
    resolve_synthetic(work)
    clamp_schedule(work)
    check_together(work)


def _own_keys(work: Resolution) -> None:
    """Keys outside the schema: an active plugin's, or a fault."""
    owned = [key for spec in work.active.values() for key in spec.options.model_fields]
    unknown = UnknownKeys(
        known=(*SpeculativeConfig.model_fields, *owned),
        plugin_names=tuple(name for name in work.methods if name not in work.active),
        engine_names=tuple(EngineArgs.model_fields),
        has_schedules=SCHEDULE_PLUGIN in frozenset(work.methods),
        draft_length=work.num_speculative_tokens or 3,
        max_num_seqs=work.engine.max_num_seqs,
    )
    is_missing = work.serving is not None and work.serving not in work.active
    for key, value in work.given.items():
        if key in SpeculativeConfig.model_fields or (is_missing and key.startswith(f"{work.serving}_")):
            continue
        if key in owned:
            work.plugin_values[key] = value
            work.origins[key] = "given"
        else:
            work.faults.append(unknown.explain(key, value))


def _finish(work: Resolution, entries: Sequence[PluginEntry], *, is_on: bool) -> ResolvedConfig:
    values = {**work.values, "method": work.method}
    speculative = SpeculativeConfig.model_construct(**values) if is_on else None
    resolved = speculative.model_dump() if speculative is not None else {}
    plugins = build_plugins(work, entries, MappingProxyType(resolved | work.plugin_values))
    if work.faults:
        raise ConfigError(work.faults) from work.cause
    keys = (*SpeculativeConfig.model_fields, *work.plugin_values) if is_on else ()
    origins = {**dict.fromkeys(keys, "default"), **work.origins}
    return ResolvedConfig(
        speculative=speculative,
        method=work.method,
        num_speculative_tokens=(work.num_speculative_tokens or 0) if work.drafts else 0,
        plugins=plugins,
        origins=MappingProxyType(origins),
        notes=tuple(work.notes),
        verify_method=work.verify_method,
    )
