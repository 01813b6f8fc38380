"""From a resolved configuration and a loaded target to a session that can step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specplug.config import ResolvedConfig
from specplug.hooks import SessionHooks
from specplug.host.instances import InstanceBuilder
from specplug.host.scheduler import Scheduler
from specplug.host.session import HostSession
from specplug.methods import MethodSpec
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
    session = _session(target, resolved)
    builder = InstanceBuilder(target, session, resolved, methods)
    instances = builder.build()
    verifier = _verifier(target, resolved, builder.laws)
    hooks = SessionHooks(
        instances,
        vocab_size=target.vocab_size,
        strict=strict,
        trace=trace,
        verifier=verifier,
        describe=describe,
        device=session.device,
    )
    builder.hooks = hooks
    target.tap(sorted(builder.hidden_state_layers))
    hooks.start_session(session)
    acceptance: Any = hooks.instance(ACCEPTANCE)
    return HostSession(
        target,
        hooks,
        _scheduler(target, max_num_batched_tokens),
        num_speculative_tokens=resolved.num_speculative_tokens,
        proposer_name=resolved.plugins[0].name if resolved.method else "",
        verify_method=_verify_method(resolved, methods, verifier),
        verifies_trees=verifier.verifies_trees,
        request_metrics=acceptance.request_metrics if acceptance else lambda request_id: None,
    )


def _session(target: Target, resolved: ResolvedConfig) -> Session:
    return Session(
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


def _scheduler(target: Target, max_num_batched_tokens: int) -> Scheduler:
    return Scheduler(
        max_num_seqs=target.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_chunk_tokens=target.max_query_tokens,
    )


def _verify_method(
    resolved: ResolvedConfig, methods: Mapping[str, MethodSpec], verifier: BuiltinVerifier
) -> Callable[[], str]:
    """How metrics name the rule: a verifier plugin by its own name."""
    plugin = next((each.name for each in resolved.plugins if methods[each.name].kind == "verifier"), None)
    return lambda: plugin or verifier.method_effective


def _verifier(target: Target, resolved: ResolvedConfig, laws: frozenset[str]) -> BuiltinVerifier:
    speculative, rule = resolved.speculative, resolved.verify_method
    is_plugin = any(config.name == rule for config in resolved.plugins)
    return BuiltinVerifier(
        vocab_size=target.vocab_size,
        rule="auto" if is_plugin else rule,  # what a verifier plugin leaves to us
        laws=laws,
        synthetic_rates=speculative.synthetic_acceptance_rates if speculative else None,
    )
