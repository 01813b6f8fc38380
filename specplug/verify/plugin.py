"""The verifier that answers when no plugin does."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from specplug.errors import ConfigError
from specplug.hooks.markers import hookimpl
from specplug.types import Batch, Draft, Verification
from specplug.verify.checks import check_inputs
from specplug.verify.dispatch import Verifier, say_once, verifier_for
from specplug.verify.inputs import Rule, build_inputs
from specplug.verify.synthetic import conditional_rates

__all__ = ["BuiltinVerifier"]

logger = logging.getLogger(__name__)

_SAMPLED_LAWS = frozenset({"dense", "indirect"})
_RANDOM_RULES: tuple[Rule, ...] = ("match", "standard", "block", "synthetic", "coupled")


class BuiltinVerifier:
    """Greedy rows greedily, random rows by one rule for the whole session.

    ``rule``: ``auto`` (``match``, or ``standard`` when ``laws`` holds dense or indirect), ``match``, ``standard``,
    ``block``, ``coupled``, or the lossy test mode ``synthetic``. ``laws``: what the session's proposers may
    report. ``synthetic_rates``: how often each draft position is to be accepted, unconditional.
    Raises ``ConfigError`` for a rule that is unknown or lacks its rates. One object serves one thread.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        rule: str = "auto",
        laws: frozenset[str] = frozenset({"one_hot"}),
        synthetic_rates: Sequence[float] | None = None,
    ) -> None:
        if rule not in ("auto", *_RANDOM_RULES):
            raise ConfigError(f"rule {rule!r} is not built in; write one of auto, {', '.join(_RANDOM_RULES)}")
        if rule == "synthetic" and synthetic_rates is None:
            raise ConfigError(
                "rejection_sample_method 'synthetic' needs rates: add synthetic_acceptance_rates or "
                "synthetic_acceptance_length"
            )
        self.vocab_size = vocab_size
        self._rule = _effective_rule(rule, laws)
        self._rates = conditional_rates(synthetic_rates or ())
        self._verifier: Verifier | None = None

    @property
    def method_effective(self) -> str:
        """The rule that random rows are really verified by; those with a tree by ``match`` instead of ``standard``."""
        return self._rule

    @property
    def verifies_trees(self) -> bool:
        """False for ``synthetic``, whose rates are those of a chain's positions."""
        return self._rule != "synthetic"

    @hookimpl(trylast=True)
    def specplug_verify(self, batch: Batch, draft: Draft, target_logits: torch.Tensor) -> Verification:
        """Decide the step. Raises ``TensorError`` where shapes, dtypes or devices do not fit."""
        if draft.parents is not None and self._rule in ("standard", "block"):
            say_once("verification: draft trees are verified by match, because standard and block take chains")
        inputs = build_inputs(batch, draft, target_logits, self._rule, self._rates)
        check_inputs(inputs, self.vocab_size)
        if self._verifier is None:
            self._verifier = verifier_for(target_logits.device)
        return self._verifier.verify(inputs)


def _effective_rule(rule: str, laws: frozenset[str]) -> Rule:
    has_sampled_laws = bool(_SAMPLED_LAWS & laws)
    if rule == "auto":
        return "standard" if has_sampled_laws else "match"
    if rule == "block" and not has_sampled_laws:
        logger.info(
            "rejection_sample_method 'block' acts as 'standard': drafts without sampled laws (%s) are accepted "
            "equally often by both",
            ", ".join(sorted(laws)) or "none",
        )
        return "standard"
    return next(known for known in _RANDOM_RULES if known == rule)
