"""The two pluggy markers and the version of the hook contract."""

from __future__ import annotations

import pluggy

__all__ = ["PROJECT", "SPECPLUG_API", "hookimpl", "hookspec"]

PROJECT = "specplug"

SPECPLUG_API = (1, 0)
"""(major, minor) of the hook contract. A plugin states the version it was written for in a module-level
``SPECPLUG_API``; it loads when the major numbers agree and its minor number is not above ours."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
