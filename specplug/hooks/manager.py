"""The plugins of this process: found by metadata, imported one by one when asked for, never first-wins."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TypeVar, overload

from specplug.errors import PluginConflictError, PluginError, PluginLoadError, PluginNotFoundError
from specplug.hooks.discovery import Candidate, Found, discover
from specplug.hooks.loading import check_api, import_plugin, methods_of
from specplug.hooks.report import OptionReport, PluginReport, PluginStatus, options_of, session_hooks_of
from specplug.methods import MethodSpec

__all__ = ["OptionReport", "PluginReport", "ProcessManager", "process_manager"]

_Default = TypeVar("_Default")


@dataclass(frozen=True, slots=True)
class _Direct:
    """A method that was registered as an object."""

    spec: MethodSpec
    plugin: object
    distribution: str | None
    version: str | None


class ProcessManager:
    """Which methods there are, and their ``MethodSpec``.

    Names come from the entry-point group "specplug" without importing anything; ``spec`` imports the one plugin
    that is asked for. Two distributions that claim one name make that name unusable (``PluginConflictError``)
    and leave the others alone.
    """

    def __init__(
        self,
        *,
        allow: Sequence[str] | None = None,
        block: Sequence[str] = (),
        entry_points: Iterable[EntryPoint] | None = None,
        trace: bool = False,
    ) -> None:
        """``allow``: the only names to use (None: all); ``block``: names not to use, which wins over ``allow``.

        ``entry_points``: instead of the installed ones. ``trace``: print hook calls (see ``hooks.trace``).
        """
        self.trace = trace
        self._allow = None if allow is None else frozenset(allow)
        self._block = frozenset(block)
        self._found = discover(entry_points)
        self._direct: dict[str, _Direct] = {}
        self._imported: dict[str, Mapping[str, MethodSpec]] = {}  # entry-point value -> its methods
        self._asked_for: set[str] = set()

    # --- names

    def names(self) -> tuple[str, ...]:
        """All names that are not blocked, sorted; nothing is imported."""
        return tuple(name for name in self._all_names() if self._blocked_by(name) is None)

    def describe(self, name: str) -> str:
        """``distribution version`` of a name; "" when unknown."""
        if name in self._direct:
            direct = self._direct[name]
            return " ".join(part for part in (direct.distribution, direct.version) if part)
        found = self._found.get(name)
        return " and ".join(each.origin for each in found.candidates) if found else ""

    # --- methods

    @property
    def methods(self) -> Mapping[str, MethodSpec]:
        """The available names, without importing; ``[name]`` is ``spec(name)``."""
        return _Methods(self)

    def spec(self, name: str) -> MethodSpec:
        """The method of that name; imports its plugin, and only that one, the first time.

        Raises ``PluginNotFoundError`` (with close names), ``PluginConflictError`` or ``PluginLoadError``.
        """
        blocked = self._blocked_by(name)
        if blocked is not None and name in self._all_names():
            raise PluginNotFoundError(f'plugin "{name}" is installed but switched off: {blocked}', is_switched_off=True)
        spec = self._load(name)
        self._asked_for.add(name)
        return spec

    def register(
        self,
        plugin: object,
        *,
        name: str | None = None,
        distribution: str | None = None,
        version: str | None = None,
    ) -> tuple[str, ...]:
        """Register an object or module with ``specplug_register`` directly, as notebooks and tests do.

        ``name``: take only that method of it. Returns the names that it now serves. The same object twice
        counts once. Raises ``PluginConflictError`` when a name is taken, ``PluginLoadError`` as for entry points.
        """
        label = _label(name or str(getattr(plugin, "__name__", type(plugin).__name__)), distribution, version)
        known = tuple(each for each, direct in self._direct.items() if direct.plugin is plugin)
        if known and (name is None or name in known):
            return known if name is None else (name,)
        stated = getattr(plugin, "SPECPLUG_API", None)
        if stated is not None:
            check_api(stated, label)
        methods = methods_of(plugin, label, trace=self.trace)
        if name is not None:
            methods = {name: _named(methods, name, label)}
        for each in methods:
            self._refuse_taken(each, label)
        for each, spec in methods.items():
            self._direct[each] = _Direct(spec, plugin, distribution, version)
        return tuple(methods)

    # --- report

    def report(self) -> list[PluginReport]:
        """Every name, sorted: who serves it, and whether it can be used.

        Imports each plugin that is not blocked, one by one; one that fails is reported, and keeps nobody back.
        """
        reports = [self._report(name) for name in self._all_names()]
        missing = sorted((self._allow or frozenset()) - {each.name for each in reports})
        reports.extend(self._missing_report(name) for name in missing)
        return reports

    def _report(self, name: str) -> PluginReport:
        spec: MethodSpec | None = None
        status: PluginStatus = "loaded" if name in self._asked_for else "available"
        reason = self._blocked_by(name) or ""
        if reason:
            status = "blocked"
        else:
            try:
                spec = self._load(name)
                reason = self._shadow_note(name)
            except PluginError as error:
                status, reason = "failed", str(error)
        distribution, version = self._origin(name)
        return PluginReport(
            name=name,
            kind=spec.kind if spec else None,
            distribution=distribution,
            version=version,
            hooks=session_hooks_of(spec) if spec else (),
            options=options_of(spec) if spec else (),
            status=status,
            reason=reason,
            summary=spec.summary if spec else "",
        )

    def _missing_report(self, name: str) -> PluginReport:
        reason = f"in the allow list, but not installed.{self._hint(name)}"
        return PluginReport(name, None, None, None, hooks=(), options=(), status="failed", reason=reason)

    def _origin(self, name: str) -> tuple[str | None, str | None]:
        if name in self._direct:
            return self._direct[name].distribution, self._direct[name].version
        candidates = self._found[name].candidates
        distributions, versions = (dict.fromkeys(each) for each in _columns(candidates))
        return ", ".join(distributions), ", ".join(versions)

    def _shadow_note(self, name: str) -> str:
        shadowed = self._found[name].shadowed if name in self._found else ()
        return "; ".join(f"shadows {each.origin} in {each.location}" for each in shadowed)

    # --- internals

    def _all_names(self) -> list[str]:
        return sorted({*self._found, *self._direct})

    def _blocked_by(self, name: str) -> str | None:
        if name in self._block:
            return "it is in the block list (SPECPLUG_DISABLE); remove it there"
        if self._allow is not None and name not in self._allow:
            return "it is not in the allow list (SPECPLUG_PLUGINS); add it there"
        return None

    def _load(self, name: str) -> MethodSpec:
        if name in self._direct:
            return self._direct[name].spec
        found = self._found.get(name)
        if found is None:
            installed = ", ".join(self.names()) or "none"
            raise PluginNotFoundError(f'no plugin "{name}". Installed: {installed}.{self._hint(name)}')
        if len(found.candidates) > 1:
            raise PluginConflictError(_conflict_text(name, found))
        candidate = found.candidates[0]
        label = _label(name, candidate.distribution, candidate.version)
        value = candidate.entry_point.value
        if value not in self._imported:
            plugin = import_plugin(candidate.entry_point, label)
            self._imported[value] = methods_of(plugin, label, trace=self.trace)
        return _named(self._imported[value], name, label)

    def _hint(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.names(), n=3)
        return f" Did you mean {' or '.join(close)}?" if close else ""

    def _refuse_taken(self, name: str, label: str) -> None:
        if name in self._direct or name in self._found:
            raise PluginConflictError(
                f'{label} cannot be registered as "{name}": that name is served by '
                f"{self.describe(name) or 'an object registered before'}; give it another name"
            )


class _Methods(Mapping[str, MethodSpec]):
    def __init__(self, manager: ProcessManager) -> None:
        self._manager = manager

    def __getitem__(self, name: str) -> MethodSpec:
        return self._manager.spec(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._manager.names())

    def __len__(self) -> int:
        return len(self._manager.names())

    def __contains__(self, name: object) -> bool:
        return name in self._manager.names()

    @overload
    def get(self, key: str, /) -> MethodSpec | None: ...
    @overload
    def get(self, key: str, /, default: MethodSpec | _Default) -> MethodSpec | _Default: ...
    def get(self, key: str, /, default: MethodSpec | _Default | None = None) -> MethodSpec | _Default | None:
        """``default`` for a name that is not there; a plugin that is there but broken still raises."""
        if key not in self:
            return default
        return self[key]


@functools.cache
def process_manager() -> ProcessManager:
    """The manager of this process. Reads ``SPECPLUG_PLUGINS``, ``SPECPLUG_DISABLE`` and ``SPECPLUG_TRACE`` once."""
    allow = os.environ.get("SPECPLUG_PLUGINS")
    return ProcessManager(
        allow=None if allow is None else _split(allow),
        block=_split(os.environ.get("SPECPLUG_DISABLE", "")),
        trace=os.environ.get("SPECPLUG_TRACE", "") not in ("", "0"),
    )


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _label(name: str, distribution: str | None, version: str | None) -> str:
    origin = " ".join(part for part in (distribution, version) if part)
    return f'plugin "{name}"{f" ({origin})" if origin else ""}'


def _named(methods: Mapping[str, MethodSpec], name: str, label: str) -> MethodSpec:
    if name not in methods:
        described = ", ".join(methods) or "no method at all"
        raise PluginLoadError(
            f'{label}: specplug_register describes {described}, but not "{name}"; the entry point (or the name '
            "given) and MethodSpec.name must agree"
        )
    return methods[name]


def _columns(candidates: Sequence[Candidate]) -> tuple[list[str], list[str]]:
    return [each.distribution for each in candidates], [each.version for each in candidates]


def _conflict_text(name: str, found: Found) -> str:
    claims = " and ".join(f"{each.origin} ({each.entry_point.value})" for each in found.candidates)
    distributions = list(dict.fromkeys(each.distribution for each in found.candidates))
    if len(distributions) == 1:
        location = found.candidates[0].location
        return (
            f'plugin "{name}" is declared by {claims}: two copies of one distribution in {location}, one of them '
            f"stale; reinstall it: pip install --force-reinstall {distributions[0]}"
        )
    return (
        f'plugin "{name}" is claimed by {claims}; which one is meant cannot be told, so neither is used. Uninstall '
        f"one: {' or '.join(f'pip uninstall {each}' for each in distributions)}"
    )
