"""The methods that the schema knows by name, what each needs, and which package serves it.

The plugins themselves are found by the hooks layer; this table lets a configuration be understood, and an
absent package be named, without importing any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "KNOWN_METHODS",
    "MODEL_METHODS",
    "KnownMethod",
    "canonical_method",
    "key_plugin_package",
    "serving_plugin",
]

ModelNeed: TypeAlias = Literal["none", "draft", "head", "class_path"]

CORE = "specplug"


@dataclass(frozen=True, slots=True)
class KnownMethod:
    """``model``: what ``speculative_config.model`` names: nothing, a draft model with a vocabulary of its own,
    a head on the target's hidden states, or a class. ``model_defaults_to_target``: the head may be part of the
    target's own checkpoint. ``parallel``: one draft forward gives all tokens, whatever ``parallel_drafting`` says.
    ``drafts``: False for a method that only watches decoding. ``package``: None where no package of specplug's serves
    the method; an installed plugin of that name, whoever wrote it, does."""

    package: str | None
    model: ModelNeed = "none"
    model_defaults_to_target: bool = False
    parallel: bool = False
    drafts: bool = True


KNOWN_METHODS: dict[str, KnownMethod] = {
    "ngram": KnownMethod(CORE),
    "custom_class": KnownMethod(CORE, "class_path"),
    "draft_model": KnownMethod(CORE, "draft"),
    "pard": KnownMethod("specplug-pard", "draft", parallel=True),
    "suffix": KnownMethod("specplug-suffix"),
    "eagle": KnownMethod("specplug-eagle", "head"),
    "eagle3": KnownMethod("specplug-eagle", "head"),
    "mtp": KnownMethod(None, "head", model_defaults_to_target=True),
    "mlp_speculator": KnownMethod("specplug-mlp", "head"),
    "medusa": KnownMethod("specplug-medusa", "head"),
    "dflash": KnownMethod(None, "head", parallel=True),
    "dspark": KnownMethod(None, "head", model_defaults_to_target=True, parallel=True),
    "extract_hidden_states": KnownMethod("specplug-hidden-states", drafts=False),
}

MODEL_METHODS = frozenset(name for name, known in KNOWN_METHODS.items() if known.model in ("draft", "head"))

_ALIASES = {"ngram_gpu": "ngram", "[ngram]": "ngram"}
_KEY_PLUGINS_OF_CORE = frozenset({"tli"})


def canonical_method(name: str) -> str:
    """The method that ``name`` is an alias of (``ngram_gpu``, ``[ngram]``, vLLM's ``*_mtp`` names), or ``name``."""
    return "mtp" if name.endswith("_mtp") else _ALIASES.get(name, name)


def serving_plugin(method: str, *, parallel_drafting: bool) -> str:
    """The plugin that serves a method: a draft model that drafts in parallel is PARD."""
    return "pard" if method == "draft_model" and parallel_drafting else method


def key_plugin_package(name: str) -> str | None:
    """The package of a plugin that a key of the schema activates; None where specplug has none."""
    return CORE if name in _KEY_PLUGINS_OF_CORE else None
