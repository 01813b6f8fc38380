"""Markers, the hook contract, and the two managers that run plugins (see ``docs/hooks.md``)."""

from __future__ import annotations

from specplug.hooks.manager import OptionReport, PluginReport, ProcessManager, process_manager
from specplug.hooks.markers import SPECPLUG_API, hookimpl, hookspec
from specplug.hooks.session import SessionHooks

__all__ = [
    "SPECPLUG_API",
    "OptionReport",
    "PluginReport",
    "ProcessManager",
    "SessionHooks",
    "hookimpl",
    "hookspec",
    "process_manager",
]
