"""specplug-eagle: EAGLE, EAGLE-3 and P-EAGLE heads as specplug methods ``eagle`` and ``eagle3``.

Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from specplug import Capabilities, MethodSpec, PluginConfig, PluginContext, hookimpl
from specplug_eagle.options import Eagle3Options, EagleOptions

__all__ = ["SPECPLUG_API", "Eagle3Options", "EagleOptions", "specplug_register"]

SPECPLUG_API = (1, 0)

try:
    __version__ = version("specplug-eagle")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

_CAPABILITIES = Capabilities(laws=frozenset({"one_hot", "dense", "indirect"}), tree=True, causality="C")


def _build(config: PluginConfig, context: PluginContext) -> object:
    from specplug_eagle.build import build_proposer

    return build_proposer(config, context)


@hookimpl
def specplug_register() -> Sequence[MethodSpec]:
    return [
        MethodSpec(
            name="eagle",
            kind="proposer",
            factory=_build,
            options=EagleOptions,
            capabilities=_CAPABILITIES,
            summary="Predicts the target's next hidden states with one small decoder layer, and tokens from them.",
        ),
        MethodSpec(
            name="eagle3",
            kind="proposer",
            factory=_build,
            options=Eagle3Options,
            capabilities=_CAPABILITIES,
            summary="Drafts from hidden states of three target layers: EAGLE-3, 3.1 and, all tokens at once, P-EAGLE.",
        ),
    ]
