"""How a plugin describes a method it offers, and what it is given when an instance is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from specplug.types import Session

__all__ = ["Capabilities", "MethodKind", "MethodSpec", "NoOptions", "PluginConfig", "PluginContext"]

MethodKind: TypeAlias = Literal["proposer", "policy", "wrapper", "draft_space", "verifier", "observer"]
LawName: TypeAlias = Literal["one_hot", "dense", "indirect", "unknown"]


class NoOptions(BaseModel):
    """For methods without keys of their own."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a method needs and what it promises; the host checks the promises where it can."""

    hidden_state_layers: tuple[int, ...] = ()
    """Decoder layers whose output ``specplug_advance`` must carry (see ``Batch.new_hidden_states``)."""
    needs_draft_model: bool = False
    laws: frozenset[LawName] = frozenset({"one_hot"})
    """Laws that its drafts may carry."""
    deterministic: bool = True
    """The same context gives the same draft."""
    tree: bool = False
    causality: Literal["H", "C", "K", "X"] = "H"
    """What its choice of draft lengths may look at: H history only; C also earlier draft tokens and laws;
    K also the token itself, but only to stop *after* it; X the token itself."""
    lossless: bool = True


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """One activated method's part of the resolved configuration."""

    name: str
    num_speculative_tokens: int
    options: BaseModel
    """An instance of the method's own ``MethodSpec.options``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All resolved keys of ``speculative_config``, read-only."""
    additional_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PluginContext:
    """What a factory may use to build its instance."""

    session: Session
    target: Any
    """The host's target: ``target.model`` is the loaded module (None for toy targets), ``target.tokenizer``
    the tokenizer or None."""
    create: Callable[[str, Mapping[str, Any]], object]
    """``create(method, options)`` builds an instance of another installed method, for composites."""
    draft_space: Callable[[Any], Any]
    """``draft_space(draft)`` asks ``specplug_draft_space`` for the map between a draft model's vocabulary and
    the target's; the identity when nobody answers. Ask from ``specplug_start_session`` on: in the factory the
    session's other instances do not exist yet."""


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method that a plugin offers. Its ``name`` equals its entry point's name.

    ``options``: a pydantic model of the ``speculative_config`` keys that the method owns or reads, with types,
    defaults and descriptions; keys that are not vLLM's begin with the method's name.
    ``factory(config, context)`` returns a fresh object with hook implementations; it is called once per
    session, after the target has loaded, and is the place for heavy imports.
    """

    name: str
    kind: MethodKind
    factory: Callable[[PluginConfig, PluginContext], object]
    options: type[BaseModel] = NoOptions
    capabilities: Capabilities = Capabilities()
    summary: str = ""
