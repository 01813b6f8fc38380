"""What ``specplug plugins`` shows of each plugin."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from specplug.hooks.contract import HOOK_ARGUMENTS
from specplug.methods import MethodSpec

__all__ = ["OptionReport", "PluginReport", "PluginStatus", "options_of", "session_hooks_of"]

PluginStatus: TypeAlias = Literal["loaded", "available", "blocked", "failed"]


@dataclass(frozen=True, slots=True)
class OptionReport:
    """One key that a method owns."""

    name: str
    type: str
    default: Any
    """None also for a key that must be given; see ``is_required``."""
    is_required: bool
    description: str


@dataclass(frozen=True, slots=True)
class PluginReport:
    """One name. ``kind``, ``hooks`` and ``options`` are unknown (None, empty) unless it could be imported."""

    name: str
    kind: str | None
    distribution: str | None
    version: str | None
    hooks: tuple[str, ...]
    """Session hooks of the class that the factory is, or is annotated to return; empty when neither is known."""
    options: tuple[OptionReport, ...]
    status: PluginStatus
    """loaded: asked for in this process; available: imports and can be asked for; blocked; failed."""
    reason: str = ""
    """Why it is blocked or failed, or which other copy it shadows."""
    summary: str = ""


def options_of(spec: MethodSpec) -> tuple[OptionReport, ...]:
    """The method's own keys, in the order of its model."""
    return tuple(
        OptionReport(
            name=field.alias or name,
            type=inspect.formatannotation(field.annotation),
            default=None if field.is_required() else field.get_default(call_default_factory=False),
            is_required=field.is_required(),
            description=field.description or "",
        )
        for name, field in spec.options.model_fields.items()
    )


def session_hooks_of(spec: MethodSpec) -> tuple[str, ...]:
    """Hooks that the class of the method's instances has, in call order."""
    made = spec.factory if inspect.isclass(spec.factory) else _return_annotation(spec.factory)
    return tuple(hook for hook in HOOK_ARGUMENTS if hasattr(made, hook)) if inspect.isclass(made) else ()


def _return_annotation(factory: Any) -> Any:
    function = factory if inspect.isroutine(factory) else getattr(factory, "__call__", None)  # noqa: B004
    namespace: Mapping[str, Any] = getattr(inspect.unwrap(function), "__globals__", {}) if function else {}
    annotation = getattr(function, "__annotations__", {}).get("return")
    # A name only: resolving an arbitrary annotation would run the plugin's code and may import torch.
    return namespace.get(annotation) if isinstance(annotation, str) else annotation
