"""The working state of one resolution: what was written, what it resolved to, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specplug.config.checkpoint import Checkpoint
from specplug.config.engine import EngineArgs
from specplug.config.known_methods import KNOWN_METHODS, KnownMethod
from specplug.config.schema import SpeculativeConfig
from specplug.errors import PluginError
from specplug.methods import MethodSpec

__all__ = ["PREFIX", "Resolution"]

PREFIX = "speculative_config"


@dataclass(slots=True)
class Resolution:
    """Steps read and write it in turn; none raises for a fault of the user's, so that all faults are reported."""

    methods: Mapping[str, MethodSpec]
    engine: EngineArgs
    allow_lossy: bool = False
    given: dict[str, Any] = field(default_factory=dict)
    """As written."""
    values: dict[str, Any] = field(default_factory=dict)
    """Sound values of schema keys, given or inferred; what is absent has its default."""
    plugin_values: dict[str, Any] = field(default_factory=dict)
    """Given keys that active plugins own."""
    origins: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    method: str | None = None
    serving: str | None = None
    """The plugin that serves ``method``."""
    checkpoint: Checkpoint | None = None
    """The draft checkpoint, where ``model`` is a local folder."""
    active: dict[str, MethodSpec] = field(default_factory=dict)
    """Activated plugins, in order."""
    verify_method: str = "auto"
    cause: PluginError | None = None
    """The first plugin error among the faults."""

    def get(self, key: str) -> Any:
        """The value of a schema key, or its default."""
        return self.values[key] if key in self.values else SpeculativeConfig.model_fields[key].default

    def infer(self, key: str, value: Any, why: str) -> None:
        """Set a key that the user left out."""
        self.values[key] = value
        self.origins[key] = f"inferred: {why}"

    def is_unsound(self, *keys: str) -> bool:
        """Whether one of ``keys``, of the schema, was given with a value that is already a fault."""
        fields = SpeculativeConfig.model_fields
        return any(key in fields and key in self.given and key not in self.values for key in keys)

    def fault(self, key: str, text: str) -> None:
        """Record a fault about ``key``, whose value counts as unsound from then on; ``text`` follows the key path."""
        self.faults.append(f"{PREFIX}.{key}{text}")
        self.discard(key)

    def discard(self, key: str) -> None:
        """Let the value of ``key`` count as unsound from now on; the fault says so elsewhere."""
        self.values.pop(key, None)

    @property
    def num_speculative_tokens(self) -> int | None:
        """K, once known."""
        num: int | None = self.values.get("num_speculative_tokens")
        return num

    @property
    def known_method(self) -> KnownMethod | None:
        """The table's entry for the method; None for a third party's."""
        return KNOWN_METHODS.get(self.method or "")

    @property
    def lacks_model(self) -> bool:
        """Whether ``model``, which the method needs, is absent or unsound."""
        known = self.known_method
        return known is not None and known.model in ("draft", "head") and self.get("model") is None

    @property
    def drafts(self) -> bool:
        """Whether the method proposes tokens, rather than only watch decoding."""
        return self.known_method is None or self.known_method.drafts

    @property
    def method_spec(self) -> MethodSpec | None:
        """The spec of the serving plugin, once it is active."""
        return self.active.get(self.serving or "")

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether the method has a draft model of its own, with a vocabulary that may differ; true while unknown."""
        if self.known_method is not None:
            return self.known_method.model == "draft"
        return self.method_spec is None or self.method_spec.capabilities.needs_draft_model

    def read_by_plugins(self, key: str) -> bool:
        """Whether the options of an active plugin have ``key``."""
        return any(key in spec.options.model_fields for spec in self.active.values())
