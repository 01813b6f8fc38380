"""What a plugin object must look like before pluggy sees it.

pluggy drops, ignores or misreads several mistakes without a word: unmarked overrides, misspelt hooks, defaults,
keyword-only parameters, classes in place of instances. All of them are errors here, found at registration.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import pluggy

from specplug.errors import PluginError
from specplug.hooks import specs
from specplug.hooks.markers import PROJECT

__all__ = ["HOOK_ARGUMENTS", "Implementation", "find_implementations", "new_plugin_manager", "register_checked"]

PREFIX = "specplug_"

HOOK_ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: tuple(inspect.signature(function).parameters)
        for name, function in vars(specs).items()
        if name.startswith(PREFIX)
    }
)
"""Every hook of the contract, in call order, with its argument names."""

_PASSED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Implementation:
    """One marked function of a plugin object. ``function`` is bound."""

    hook: str
    function: Callable[..., Any]
    is_wrapper: bool


def new_plugin_manager() -> pluggy.PluginManager:
    """A pluggy manager that knows the hook contract and holds no plugin."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(specs)
    return manager


def register_checked(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    """Register an object that ``find_implementations`` passed; raise ``PluginError`` if pluggy still objects."""
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginError(f'plugin "{name}" cannot be registered: {error}') from error


def find_implementations(plugin: object, label: str) -> tuple[Implementation, ...]:
    """The hook implementations of ``plugin``.

    Raises ``PluginError`` naming everything that is wrong with it at once; ``label`` says which plugin it is.
    """
    if plugin is None:
        raise PluginError(f"{label}: the plugin object is None; its factory must return an object with hooks")
    if inspect.isclass(plugin):
        raise PluginError(f"{label}: {plugin.__qualname__} is a class; give an instance: {plugin.__name__}(...)")
    scanner = pluggy.PluginManager(PROJECT)
    found: list[Implementation] = []
    faults: list[str] = []
    for attribute in dir(plugin):
        is_property = isinstance(inspect.getattr_static(plugin, attribute, None), property | functools.cached_property)
        # pluggy before 1.7 would read the property
        options = None if is_property else scanner.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            faults.extend(_unmarked_faults(plugin, attribute))
            continue
        hook = options.get("specname") or attribute
        function = getattr(plugin, attribute)
        if hook not in HOOK_ARGUMENTS and options.get("optionalhook"):
            continue  # written for a newer contract, which the plugin says it can do without
        faults.extend(_implementation_faults(hook, function, options))
        found.append(Implementation(hook, function, bool(options.get("wrapper"))))
    faults.extend(_doubled_faults(found))
    if faults:
        raise PluginError(f"{label}: " + "; ".join(faults))
    return tuple(found)


def _unmarked_faults(plugin: object, attribute: str) -> Iterator[str]:
    if not attribute.startswith(PREFIX):
        return
    value = inspect.getattr_static(plugin, attribute, None)
    is_import = isinstance(value, ModuleType) or inspect.isclass(value)
    if attribute in HOOK_ARGUMENTS and not isinstance(value, ModuleType):
        yield f"{attribute} is not marked and would never be called; put @hookimpl above it (also on an override)"
    elif not is_import and (callable(value) or isinstance(value, property | staticmethod | classmethod)):
        yield f'{attribute} is not a hook, and names that begin with "{PREFIX}" are reserved for hooks; rename it'


def _implementation_faults(hook: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Iterator[str]:
    if hook not in HOOK_ARGUMENTS:
        close = difflib.get_close_matches(hook, HOOK_ARGUMENTS, n=1, cutoff=0.0)[0]
        yield f"{hook} is not a hook; did you mean {close}? (hooks: {', '.join(HOOK_ARGUMENTS)})"
        return
    if options.get("hookwrapper"):
        yield f"{hook}: hookwrapper=True is the old kind of wrapper; write @hookimpl(wrapper=True)"
    yield from _kind_faults(hook, function, bool(options.get("wrapper")))
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        fault = _parameter_fault(hook, parameter)
        if fault:
            yield f"{hook}{signature}: {fault}"


def _kind_faults(hook: str, function: Callable[..., Any], is_wrapper: bool) -> Iterator[str]:
    is_generator = inspect.isgeneratorfunction(inspect.unwrap(function))
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        yield f"{hook} is async; hooks are plain functions"
    elif is_wrapper and not is_generator:
        yield f"{hook} is marked wrapper=True but does not yield; write: result = yield, then return result"
    elif is_generator and not is_wrapper:
        yield f"{hook} yields but is not marked wrapper=True; return the answer, or mark it as a wrapper"


def _parameter_fault(hook: str, parameter: inspect.Parameter) -> str | None:
    allowed = ", ".join(HOOK_ARGUMENTS[hook]) or "none"
    if parameter.kind not in _PASSED:
        return f'parameter "{parameter}" never receives anything; name the arguments you use (allowed: {allowed})'
    if parameter.default is not inspect.Parameter.empty:
        return f'parameter "{parameter}" has a default, which hooks must not have; remove it (allowed: {allowed})'
    if parameter.name not in HOOK_ARGUMENTS[hook]:
        return f'unknown argument "{parameter.name}" (allowed: {allowed})'
    return None


def _doubled_faults(found: list[Implementation]) -> Iterator[str]:
    for hook in HOOK_ARGUMENTS:
        kinds = [implementation.is_wrapper for implementation in found if implementation.hook == hook]
        if len(kinds) < 2:
            continue
        if len(set(kinds)) == 2:
            yield (
                f"one object both implements and wraps {hook}, so a fault in one would take the other with it; "
                "make them two methods, each with its own object"
            )
        else:
            yield f"{hook} is implemented {len(kinds)} times by one object; keep one"
