"""Toy targets, test proposers and the conformance kit: what plugin authors test with (``docs/testing.md``).

Importing this package imports neither torch nor transformers nor pytest; names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specplug.testing.conformance import CHECKS, CheckResult, ProposerConformance, run_checks
    from specplug.testing.driver import HookDriver
    from specplug.testing.models import tiny_llama, toy_tokenizer
    from specplug.testing.proposers import (
        AdversarialProposer,
        FixedProposer,
        OracleProposer,
        RandomProposer,
        SamplingProposer,
        as_method,
    )
    from specplug.testing.rig import CheckFailed, InstalledMethod, MakeProposer, Rig
    from specplug.testing.toys import EOS_TOKEN_ID, MarkovTarget, ScriptedTarget, TableTarget, ToyTarget
    from specplug.testing.tree_proposers import OracleTreeProposer, RandomTreeProposer

__all__ = [
    "CHECKS",
    "EOS_TOKEN_ID",
    "AdversarialProposer",
    "CheckFailed",
    "CheckResult",
    "FixedProposer",
    "HookDriver",
    "InstalledMethod",
    "MakeProposer",
    "MarkovTarget",
    "OracleProposer",
    "OracleTreeProposer",
    "ProposerConformance",
    "RandomProposer",
    "RandomTreeProposer",
    "Rig",
    "SamplingProposer",
    "ScriptedTarget",
    "TableTarget",
    "ToyTarget",
    "as_method",
    "run_checks",
    "tiny_llama",
    "toy_tokenizer",
]

_MODULES = {
    "conformance": ("CHECKS", "CheckResult", "ProposerConformance", "run_checks"),
    "driver": ("HookDriver",),
    "models": ("tiny_llama", "toy_tokenizer"),
    "proposers": (
        "AdversarialProposer",
        "FixedProposer",
        "OracleProposer",
        "RandomProposer",
        "SamplingProposer",
        "as_method",
    ),
    "rig": ("CheckFailed", "InstalledMethod", "MakeProposer", "Rig"),
    "tree_proposers": ("OracleTreeProposer", "RandomTreeProposer"),
    "toys": ("EOS_TOKEN_ID", "MarkovTarget", "ScriptedTarget", "TableTarget", "ToyTarget"),
}
_OWNER = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _OWNER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_OWNER[name]}"), name)
