"""Everything specplug raises on purpose.

::

    SpecplugError
    ├── ConfigError (ValueError)         a setting that cannot be; all faults of one config together
    ├── RequestError (ValueError)        one request that cannot be served; the others go on
    ├── ModelError (ValueError)          a target or draft that cannot be loaded or driven
    ├── TensorError (ValueError)         a tensor of the wrong shape, dtype or device
    └── PluginError (RuntimeError)       a plugin that breaks the contract
        ├── PluginNotFoundError (LookupError)   no plugin of that name
        ├── PluginConflictError (ValueError)    two distributions claim one name
        ├── PluginLoadError (ImportError)       its import or factory failed; the cause is kept
        └── PluginFaultError                    it misbehaved in a session (raised only with ``strict=True``)

Messages say what was written, why it cannot be, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ConfigError",
    "ModelError",
    "PluginConflictError",
    "PluginError",
    "PluginFaultError",
    "PluginLoadError",
    "PluginNotFoundError",
    "RequestError",
    "SpecplugError",
    "TensorError",
]


class SpecplugError(Exception):
    """Base of all errors that specplug raises on purpose."""


class ConfigError(SpecplugError, ValueError):
    """A configuration that cannot be, found before any weights load.

    ``faults`` holds one message per fault; the text of the error lists them all.
    """

    def __init__(self, faults: str | Sequence[str]) -> None:
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        super().__init__(self._text())

    def _text(self) -> str:
        if len(self.faults) == 1:
            return self.faults[0]
        listed = "\n".join(f"  {number}. {fault}" for number, fault in enumerate(self.faults, 1))
        return f"{len(self.faults)} faults in the configuration:\n{listed}"


class RequestError(SpecplugError, ValueError):
    """A request that cannot be served; other requests are unharmed."""


class ModelError(SpecplugError, ValueError):
    """A model, tokenizer or checkpoint that cannot be loaded, or whose state the host cannot roll back."""


class TensorError(SpecplugError, ValueError):
    """A tensor handed to verification has the wrong shape, dtype or device; the text names it."""


class PluginError(SpecplugError, RuntimeError):
    """A plugin broke the contract of ``specplug.hooks``."""


class PluginNotFoundError(PluginError, LookupError):
    """No installed plugin has the name that was asked for, or the one that has it ``is_switched_off``."""

    def __init__(self, message: str = "", *, is_switched_off: bool = False) -> None:
        super().__init__(message)
        self.is_switched_off = is_switched_off

    def __str__(self) -> str:  # LookupError subclasses must not quote the message as KeyError does
        return str(self.args[0]) if self.args else ""


class PluginConflictError(PluginError, ValueError):
    """Two distributions register the same plugin name."""


class PluginLoadError(PluginError, ImportError):
    """A plugin's import, API check or factory failed; ``__cause__`` holds the original exception."""


class PluginFaultError(PluginError):
    """A plugin misbehaved inside a session that runs with ``strict=True``."""
