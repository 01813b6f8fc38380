"""From a resolved configuration and a loaded target to a session that can step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specplug.config import ResolvedConfig
from specplug.draft_space import IdentityDraftSpace
from specplug.errors import ConfigError, PluginError, PluginLoadError
from specplug.hooks import SessionHooks
from specplug.host.scheduler import Scheduler
from specplug.host.session import HostSession
from specplug.methods import MethodSpec, PluginConfig, PluginContext
from specplug.models.target import Target
from specplug.types import Session
from specplug.verify import BuiltinVerifier

__all__ = ["build_session"]

ACCEPTANCE = "acceptance"


def build_session(
    target: Target,
    resolved: ResolvedConfig,
    methods: Mapping[str, MethodSpec],
    *,
    max_num_batched_tokens: int,
    strict: bool = False,
    trace: bool = False,
    describe: Callable[[str], str] | None = None,
) -> HostSession:
    """Build every configured instance, tap the layers they read, and announce the session to them.

    ``describe``: distribution and version of a plugin's name, for fault messages.
    Raises ``PluginLoadError`` naming the plugin whose factory failed.
    """
    builder = _Builder(target, resolved, methods)
    return builder.build(max_num_batched_tokens, strict=strict, trace=trace, describe=describe)


class _Builder:
    def __init__(self, target: Target, resolved: ResolvedConfig, methods: Mapping[str, MethodSpec]) -> None:
        self._target = target
        self._resolved = resolved
        self._methods = methods
        self._hooks: SessionHooks | None = None
        self._laws: frozenset[str] = frozenset()
        self._layers: set[int] = set()
        self._session = Session(
            vocab_size=target.vocab_size,
            max_num_seqs=target.max_num_seqs,
            max_model_len=target.max_model_len,
            num_speculative_tokens=resolved.num_speculative_tokens,
            device=str(target.device),
            dtype=str(target.dtype).removeprefix("torch."),
            eos_token_ids=target.eos_token_ids,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
        )
        self._context = PluginContext(self._session, target, self._create, self._draft_space)

    def build(
        self, max_num_batched_tokens: int, *, strict: bool, trace: bool, describe: Callable[[str], str] | None
    ) -> HostSession:
        instances = [(config.name, self._instance(config)) for config in self._resolved.plugins]
        verifier = self._verifier()
        hooks = SessionHooks(
            instances,
            vocab_size=self._target.vocab_size,
            strict=strict,
            trace=trace,
            verifier=verifier,
            describe=describe,
            device=self._session.device,
        )
        self._hooks = hooks
        self._target.tap(sorted(self._layers))
        hooks.start_session(self._session)
        acceptance: Any = hooks.instance(ACCEPTANCE)
        return HostSession(
            self._target,
            hooks,
            self._scheduler(max_num_batched_tokens),
            num_speculative_tokens=self._resolved.num_speculative_tokens,
            proposer_name=self._resolved.plugins[0].name if self._resolved.method else "",
            verify_method=lambda: verifier.method_effective,
            request_metrics=acceptance.request_metrics if acceptance else lambda request_id: None,
        )

    def _scheduler(self, max_num_batched_tokens: int) -> Scheduler:
        target = self._target
        return Scheduler(
            max_num_seqs=target.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_chunk_tokens=target.max_query_tokens,
        )

    def _verifier(self) -> BuiltinVerifier:
        speculative, rule = self._resolved.speculative, self._resolved.verify_method
        is_plugin = any(config.name == rule for config in self._resolved.plugins)
        return BuiltinVerifier(
            vocab_size=self._target.vocab_size,
            rule="auto" if is_plugin else rule,  # what a verifier plugin leaves to us
            laws=self._laws,
            synthetic_rates=speculative.synthetic_acceptance_rates if speculative else None,
        )

    def _instance(self, config: PluginConfig) -> object:
        spec = self._methods[config.name]
        try:
            instance = spec.factory(config, self._context)
        except (ConfigError, PluginError):
            raise
        except Exception as error:
            raise PluginLoadError(
                f"plugin {config.name!r} could not be built: {type(error).__name__}: {error}"
            ) from error
        if spec.kind == "proposer":
            self._laws |= spec.capabilities.laws
        self._layers.update(getattr(instance, "hidden_state_layers", spec.capabilities.hidden_state_layers))
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
        if self._hooks is None:
            raise PluginError("ask for a draft space from specplug_start_session on, not in the factory")
        space = self._hooks.draft_space(self._target, draft)
        return IdentityDraftSpace(self._target.vocab_size) if space is None else space
