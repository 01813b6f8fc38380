"""The plugin instances of one session, from a resolved configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specplug.config import ResolvedConfig
from specplug.draft_space import IdentityDraftSpace
from specplug.errors import ConfigError, ModelError, PluginError, PluginLoadError
from specplug.hooks import SessionHooks
from specplug.methods import MethodSpec, PluginConfig, PluginContext
from specplug.types import Session

__all__ = ["InstanceBuilder"]


class InstanceBuilder:
    """Builds every configured instance with its factory.

    ``target``: what the factories get as ``context.target``. ``laws`` and ``hidden_state_layers`` are those of the
    instances built so far; an instance's attribute of that name goes before its method's capability.
    ``context.draft_space`` answers once ``hooks`` is set.
    """

    def __init__(
        self, target: Any, session: Session, resolved: ResolvedConfig, methods: Mapping[str, MethodSpec]
    ) -> None:
        self.hooks: SessionHooks | None = None
        self.laws: frozenset[str] = frozenset()
        self.hidden_state_layers: set[int] = set()
        self._target = target
        self._resolved = resolved
        self._methods = methods
        self._context = PluginContext(session, target, self._create, self._draft_space)

    def build(self) -> list[tuple[str, object]]:
        """(name, instance) of every plugin, in the configuration's order.

        Raises ``PluginLoadError`` naming the plugin whose factory failed.
        """
        return [(config.name, self._instance(config)) for config in self._resolved.plugins]

    def _instance(self, config: PluginConfig) -> object:
        spec = self._methods[config.name]
        try:
            instance = spec.factory(config, self._context)
        except (ConfigError, ModelError, PluginError):
            raise
        except Exception as error:
            raise PluginLoadError(
                f"plugin {config.name!r} could not be built: {type(error).__name__}: {error}"
            ) from error
        if spec.kind == "proposer":
            self.laws |= getattr(instance, "laws", spec.capabilities.laws)
        self.hidden_state_layers.update(getattr(instance, "hidden_state_layers", spec.capabilities.hidden_state_layers))
        return instance

    def _create(self, method: str, options: Mapping[str, Any]) -> object:
        """A child for a composite: the method's own options, this session's settings."""
        spec = self._methods[method]
        parent = self._resolved.plugins[0]
        return self._instance(
            PluginConfig(
                name=method,
                num_speculative_tokens=self._resolved.num_speculative_tokens,
                options=spec.options(**options),
                settings=parent.settings,
                additional_config=parent.additional_config,
            )
        )

    def _draft_space(self, draft: Any) -> Any:
        if self.hooks is None:
            raise PluginError("ask for a draft space from specplug_start_session on, not in the factory")
        space = self.hooks.draft_space(self._target, draft)
        return IdentityDraftSpace.between(self._target, draft) if space is None else space
