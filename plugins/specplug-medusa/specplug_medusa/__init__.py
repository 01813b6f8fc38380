"""specplug-medusa: Medusa heads as a specplug plugin, method ``medusa``.

Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from specplug import Capabilities, MethodSpec, PluginConfig, PluginContext, hookimpl
from specplug_medusa.options import MedusaOptions

__all__ = ["SPECPLUG_API", "MedusaOptions", "specplug_register"]

SPECPLUG_API = (1, 0)

try:
    __version__ = version("specplug-medusa")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def _build(config: PluginConfig, context: PluginContext) -> object:
    from specplug_medusa.build import build_proposer

    return build_proposer(config, context)


@hookimpl
def specplug_register() -> Sequence[MethodSpec]:
    return [
        MethodSpec(
            name="medusa",
            kind="proposer",
            factory=_build,
            options=MedusaOptions,
            capabilities=Capabilities(laws=frozenset({"one_hot", "dense", "indirect"}), tree=True, causality="H"),
            summary="Independent heads draft the next tokens, one each, from the target's last hidden state.",
        )
    ]
