"""specplug-mlp: MLP speculators as a specplug plugin, method ``mlp_speculator``.

Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from specplug import Capabilities, MethodSpec, PluginConfig, PluginContext, hookimpl
from specplug_mlp.options import MlpSpeculatorOptions

__all__ = ["SPECPLUG_API", "MlpSpeculatorOptions", "specplug_register"]

SPECPLUG_API = (1, 0)

try:
    __version__ = version("specplug-mlp")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def _build(config: PluginConfig, context: PluginContext) -> object:
    from specplug_mlp.build import build_proposer

    return build_proposer(config, context)


@hookimpl
def specplug_register() -> Sequence[MethodSpec]:
    return [
        MethodSpec(
            name="mlp_speculator",
            kind="proposer",
            factory=_build,
            options=MlpSpeculatorOptions,
            capabilities=Capabilities(laws=frozenset({"one_hot", "dense", "indirect"}), causality="H"),
            summary="A small recurrent MLP drafts from the target's last hidden state and the tokens before.",
        )
    ]
