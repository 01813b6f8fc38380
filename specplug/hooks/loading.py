"""Importing one plugin and asking it for its methods; every failure says whose it is and keeps its cause."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, get_args

from pydantic import BaseModel

from specplug.errors import PluginError, PluginLoadError
from specplug.hooks.contract import find_implementations, new_plugin_manager, register_checked
from specplug.hooks.markers import SPECPLUG_API
from specplug.hooks.trace import enable_trace
from specplug.methods import MethodKind, MethodSpec

__all__ = ["import_plugin", "methods_of"]


def import_plugin(entry_point: EntryPoint, label: str) -> object:
    """The object that ``entry_point`` names, its API version checked. Raises ``PluginLoadError``."""
    try:
        plugin: object = entry_point.load()
    except (Exception, SystemExit) as error:
        text = f"{label} failed to import ({entry_point.value}): {type(error).__name__}: {error}"
        raise PluginLoadError(text) from error
    stated = getattr(plugin, "SPECPLUG_API", None)
    if stated is None:
        stated = getattr(sys.modules.get(entry_point.module), "SPECPLUG_API", None)
    check_api(stated, label)
    return plugin


def check_api(stated: Any, label: str) -> None:
    """Raise ``PluginLoadError`` unless a plugin written for hook contract ``stated`` can run on ours."""
    ours = ".".join(map(str, SPECPLUG_API))
    if stated is None:
        raise PluginLoadError(
            f"{label} does not state the hook contract it was written for; put SPECPLUG_API = {SPECPLUG_API} "
            "into the module that its entry point names"
        )
    if not (isinstance(stated, tuple) and len(stated) == 2 and all(type(part) is int for part in stated)):
        raise PluginLoadError(f"{label}: SPECPLUG_API is {stated!r}; write (major, minor), such as {SPECPLUG_API}")
    theirs = ".".join(map(str, stated))
    if stated > SPECPLUG_API:
        raise PluginLoadError(f"{label} needs hook contract {theirs}, this specplug has {ours}; upgrade specplug")
    if stated[0] != SPECPLUG_API[0]:
        text = f"{label} was written for hook contract {theirs}, this specplug has {ours}; upgrade the plugin"
        raise PluginLoadError(text)


def methods_of(plugin: object, label: str, *, trace: bool = False) -> Mapping[str, MethodSpec]:
    """Name -> ``MethodSpec`` of what ``plugin``'s ``specplug_register`` returns. Raises ``PluginLoadError``."""
    try:
        specs = _registered(plugin, label, trace)
    except PluginLoadError:
        raise
    except PluginError as error:
        raise PluginLoadError(str(error)) from error
    except Exception as error:
        text = f"{label}: specplug_register raised {type(error).__name__}: {error}"
        raise PluginLoadError(text) from error
    methods: dict[str, MethodSpec] = {}
    for spec in specs:
        fault = _spec_fault(spec, methods)
        if fault is not None:
            raise PluginLoadError(f"{label}: specplug_register: {fault}")
        methods[spec.name] = spec
    return methods


def _registered(plugin: object, label: str, trace: bool) -> Sequence[MethodSpec]:
    implementations = find_implementations(plugin, label)
    names = [each.hook for each in implementations]
    if "specplug_register" not in names:
        raise PluginLoadError(f"{label} has no specplug_register; its entry point names a module (or object) with one")
    misplaced = [name for name in names if name != "specplug_register"]
    if misplaced:
        raise PluginLoadError(
            f"{label} implements {', '.join(misplaced)} beside specplug_register, where they are never called; put "
            "session hooks on the object that the method's factory returns"
        )
    manager = new_plugin_manager()  # one per plugin: a plugin that fails leaves nothing behind
    if trace:
        enable_trace(manager)
    register_checked(manager, plugin, label)
    answers = manager.hook.specplug_register()
    if not answers or not isinstance(answers[0], list | tuple):
        got = type(answers[0]).__name__ if answers else "None"
        raise PluginLoadError(f"{label}: specplug_register returned {got}; return a list of MethodSpec objects")
    specs: Sequence[MethodSpec] = answers[0]
    return specs


def _spec_fault(spec: Any, seen: Mapping[str, MethodSpec]) -> str | None:
    if not isinstance(spec, MethodSpec):
        return f"returned {type(spec).__name__} among its methods; each is a MethodSpec"
    if spec.name in seen:
        return f'describes method "{spec.name}" twice'
    if spec.kind not in get_args(MethodKind):
        return f'method "{spec.name}" has kind {spec.kind!r}; kinds: {", ".join(get_args(MethodKind))}'
    factory: object = spec.factory
    if not callable(factory):
        return f'the factory of method "{spec.name}" is not callable'
    options: object = spec.options
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        return f'the options of method "{spec.name}" are not a pydantic model class'
    return None
