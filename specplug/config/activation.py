"""Which plugins a configuration activates, and the options each gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specplug.config.keys import closest, show
from specplug.config.known_methods import KNOWN_METHODS, key_plugin_package
from specplug.config.reading import PluginEntry
from specplug.config.resolution import PREFIX, Resolution
from specplug.config.schedule import SCHEDULE_KEY
from specplug.config.schema import SpeculativeConfig
from specplug.config.validation import field_name, missing, validate
from specplug.config.verification import PERMISSION, RULE_KEY, is_verifier_plugin, missing_package, switched_off
from specplug.errors import PluginError
from specplug.methods import MethodSpec, PluginConfig

__all__ = ["DEFAULT_OBSERVER", "SCHEDULE_PLUGIN", "activate", "build_plugins"]

DEFAULT_OBSERVER = "acceptance"
"""The observer that is on whenever it is installed."""

SCHEDULE_PLUGIN = "dynamic"
"""The plugin that draft lengths by batch size need."""

_PROPOSER = "proposer plugin"

_KEY_PLUGINS = {
    "use_heterogeneous_vocab": "tli",
    "enable_adaptive_verification": "adaptive",
    SCHEDULE_KEY: SCHEDULE_PLUGIN,
}


def activate(work: Resolution, entries: Sequence[PluginEntry]) -> None:
    """Load the specs of everything the configuration asks for, in order: the method's plugin, those that keys
    activate, a verifier, ``plugins=``, the default observer. Nothing else is imported."""
    if work.serving is not None:
        spec = _load(work, work.serving, "method", _missing_method(work, work.serving))
        kind, article = ("proposer", "a") if work.drafts else ("observer", "an")
        if spec is not None and spec.kind != kind:
            work.fault(
                "method", f'="{spec.name}" is a plugin of kind {spec.kind}, not {article} {kind}; {_place(spec)}.'
            )
            del work.active[spec.name]
    for key, name in _KEY_PLUGINS.items():
        if work.get(key) and (name != "tli" or work.has_own_vocabulary):
            _load(work, name, key, _missing_key_plugin(key, name))
    if is_verifier_plugin(work):
        spec = _load(work, work.get(RULE_KEY), RULE_KEY, "")
        if spec is not None and spec.kind != "verifier":
            work.fault(RULE_KEY, f'="{spec.name}" is a plugin of kind {spec.kind}, not a verifier.')
    for entry in entries:
        _activate_entry(work, entry)
    _activate_observer(work)


def _place(spec: MethodSpec) -> str:
    """Where a plugin is named that is no method."""
    if spec.kind == "verifier":
        permission = "" if spec.capabilities.lossless else f" and {PERMISSION}"
        return f'beside a method write "{RULE_KEY}": "{spec.name}"{permission}'
    key = next((key for key, name in _KEY_PLUGINS.items() if name == spec.name), None)
    if key == "use_heterogeneous_vocab":
        return f'write "method": "draft_model", "{key}": true'
    return "name it in plugins=" if key is None else f"beside a method write {key}"


def _load(work: Resolution, name: str, role: str, missing: str) -> MethodSpec | None:
    if name not in frozenset(work.methods):  # iterating names imports nothing; a lookup would
        work.faults.append(switched_off(work, name) or missing)
        return None
    try:
        spec = work.methods[name]
    except PluginError as error:
        work.cause = work.cause or error
        work.faults.append(str(error))
        return None
    work.active[name] = spec
    work.origins[f"plugins.{name}"] = role
    return spec


def _missing_method(work: Resolution, name: str) -> str:
    known = KNOWN_METHODS.get(name)
    if known is None:
        return _unknown_plugin(work, _PROPOSER, name)
    if known.package is not None:
        return missing_package(f'method "{work.method}"', name, known.package)
    return (
        f'specplug has no method "{work.method}" yet, and no plugin that is installed serves it. vLLM supports it: run '
        "there, or write another method (`specplug plugins` shows those that are installed)."
    )


def _missing_key_plugin(key: str, name: str) -> str:
    package = key_plugin_package(name)
    if package is not None:
        return missing_package(f"{PREFIX}.{key}", name, package)
    return (
        f'{PREFIX}.{key} needs a plugin named "{name}"; specplug has none yet, and none is installed. Leave {key} out, '
        "or run it in vLLM."
    )


def _unknown_plugin(work: Resolution, what: str, name: str) -> str:
    names = _proposers(work) if what == _PROPOSER else list(work.methods)
    meant = closest(name, (*names, *KNOWN_METHODS))
    hint = f" Did you mean {meant}?" if meant else ""
    return f'No {what} "{name}". Installed: {", ".join(names) or "none"}.{hint}'


def _proposers(work: Resolution) -> list[str]:
    """Names of the proposers there are. Imports all plugins, which only the message about an unknown one may cost."""
    names = []
    for name in work.methods:
        try:
            spec = work.methods[name]
        except PluginError:
            continue
        if spec.kind == "proposer":
            names.append(name)
    return names


def _activate_entry(work: Resolution, entry: PluginEntry) -> None:
    if entry.name in work.active:
        role = work.origins[f"plugins.{entry.name}"]
        work.faults.append(f"{entry.where}: the plugin is already active through {role}; remove one of the two.")
        return
    spec = _load(work, entry.name, "plugins=", _unknown_plugin(work, "plugin", entry.name))
    if spec is not None and spec.kind == "proposer" and not work.given and not work.faults:
        work.faults.append(
            f'{entry.where}: "{entry.name}" is a proposer, and there is no draft length for it; write '
            f'speculative_config={{"method": "{entry.name}", "num_speculative_tokens": 3}}.'
        )


def _activate_observer(work: Resolution) -> None:
    if DEFAULT_OBSERVER in work.active or DEFAULT_OBSERVER not in frozenset(work.methods):
        return
    try:
        work.active[DEFAULT_OBSERVER] = work.methods[DEFAULT_OBSERVER]
    except PluginError as error:  # nobody asked for it by name: decoding goes on without counts
        work.notes.append(f"acceptance metrics are off: {error}")
        return
    work.origins[f"plugins.{DEFAULT_OBSERVER}"] = "default"


def build_plugins(
    work: Resolution, entries: Sequence[PluginEntry], settings: Mapping[str, Any]
) -> tuple[PluginConfig, ...]:
    """Validate each active plugin's options; faults go to ``work``."""
    by_name = {entry.name: entry for entry in entries}
    configs = []
    for name, spec in work.active.items():
        options, faults = _options(work, spec, by_name.get(name))
        work.faults += [fault for fault in faults if fault not in work.faults]
        if options is not None:
            configs.append(
                PluginConfig(
                    name=name,
                    num_speculative_tokens=work.num_speculative_tokens or 0,
                    options=options,
                    settings=settings,
                    additional_config=work.engine.additional_config,
                )
            )
    return tuple(configs)


def _options(work: Resolution, spec: MethodSpec, entry: PluginEntry | None) -> tuple[Any, list[str]]:
    """An instance of the plugin's options, and the faults in them."""
    own = entry.options if entry else {}
    values, faults = _option_values(work, spec, entry)

    def where(key: str) -> str:
        is_in_entry = entry is not None and (key in own or key not in values)
        return (
            f"{entry.where if entry and is_in_entry else PREFIX}.{key}" if key else f'options of plugin "{spec.name}"'
        )

    options, more = validate(spec.options, values, where)
    if any(work.is_unsound(key) for key in spec.options.model_fields):
        # A rule over several options would judge the default that stands in for the unsound value.
        more = [fault for fault in more if not fault.startswith(where(""))]
    if work.lacks_model:  # already a fault
        more = [fault for fault in more if fault != missing(where("model"))]
    return options, [*faults, *more]


def _option_values(work: Resolution, spec: MethodSpec, entry: PluginEntry | None) -> tuple[dict[str, Any], list[str]]:
    """What the plugin gets: the schema's keys that it reads, its own keys, and its ``plugins=`` entry."""
    fields = spec.options.model_fields
    values = {key: work.get(key) for key in SpeculativeConfig.model_fields if key in fields}
    values = {key: value for key, value in values.items() if value is not None and not work.is_unsound(key)}
    values |= {key: value for key, value in work.plugin_values.items() if key in fields}
    if entry is None:
        return values, []
    faults = []
    for key, value in entry.options.items():
        if field_name(spec.options, key) is None:
            faults.append(_unknown_option(entry.where, key, list(fields)))
        elif key in work.given:
            faults.append(f"{PREFIX}.{key} is given again in plugins= for {spec.name}; keep one.")
        else:
            values[key] = value
    return values, faults


def _unknown_option(where: str, key: str, fields: list[str]) -> str:
    meant = closest(key, fields)
    hint = f"Did you mean {meant}?" if meant else f"It has {', '.join(fields) or 'no options'}."
    return f"{where}: unknown option {show(key)}. {hint}"
