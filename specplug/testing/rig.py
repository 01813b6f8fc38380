"""What conformance checks run a proposer against, and how one fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from specplug.hooks import process_manager
from specplug.methods import Capabilities, PluginConfig, PluginContext
from specplug.models.target import Target
from specplug.testing.toys import MarkovTarget

__all__ = ["CheckFailed", "InstalledMethod", "MakeProposer", "Rig"]

MakeProposer: TypeAlias = Callable[[PluginContext], object]
"""Builds a fresh proposer: an object with hook implementations. Called once per session."""


class CheckFailed(AssertionError):
    """A conformance check found a fault. The text says what was seen; the check's docstring says where to look."""


def default_target() -> Target:
    """A Markov toy that reads prompts in chunks of 8 tokens."""
    return MarkovTarget(max_query_tokens=8)


DEFAULT_PROMPTS: tuple[tuple[int, ...], ...] = (
    (5, 6) * 6,
    (1, 2, 3, 4, 1, 2, 3, 4, 1, 2),
    (7,),
    (3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 8, 2, 3, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2),
)
"""Repetitive, cyclic, of one token, and longer than a prompt chunk."""


@dataclass(frozen=True)
class Rig:
    """Where the checks run a proposer. The default suits every method that works on token ids alone.

    ``make_target``: a fresh target (``specplug.models.target.Target``) per run. ``prompts``: distinct, at least three,
    with ids of that target; some of them should make the proposer propose. ``num_tokens``: decoding steps
    of the checks that call hooks, output tokens of those that run the host.
    ``shares_state``: drafts may depend on other requests, past or present, by design (a suffix cache's do); the checks
    that compare a request's drafts in different company then compare texts only. ``capabilities``: what the method
    declares, such as the layers it taps. ``max_shared_items``: the bound of shared state, in entries of containers.
    """

    make_target: Callable[[], Target] = default_target
    prompts: tuple[tuple[int, ...], ...] = DEFAULT_PROMPTS
    num_speculative_tokens: int = 4
    num_tokens: int = 32
    shares_state: bool = False
    max_shared_items: int = 100_000
    capabilities: Capabilities = field(default_factory=Capabilities)


@dataclass(frozen=True)
class InstalledMethod:
    """A ``MakeProposer`` for an installed method: found by entry point, built as the host builds it.

    ``options``: the method's own keys of ``speculative_config``.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, context: PluginContext) -> object:
        """A fresh instance. Raises ``PluginError`` when no such method is installed or its factory fails."""
        spec = process_manager().spec(self.method)
        config = PluginConfig(
            name=self.method,
            num_speculative_tokens=context.session.num_speculative_tokens,
            options=spec.options(**self.options),
            settings=dict(self.options),
        )
        return spec.factory(config, context)

    @property
    def capabilities(self) -> Capabilities:
        """What the method declares."""
        return process_manager().spec(self.method).capabilities
