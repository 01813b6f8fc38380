"""specplug-pard: parallel drafting with a PARD draft model as a specplug plugin, method ``pard``.

Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, cast

from specplug import Capabilities, MethodSpec, PluginConfig, PluginContext, hookimpl
from specplug.proposers.draft_model import MODEL_LAWS
from specplug_pard.options import PardOptions

if TYPE_CHECKING:
    from specplug_pard.proposer import PardProposer

__all__ = ["SPECPLUG_API", "PardOptions", "specplug_register"]

SPECPLUG_API = (1, 0)

try:
    __version__ = version("specplug-pard")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def _build(config: PluginConfig, context: PluginContext) -> PardProposer:
    from specplug_pard.proposer import build

    return build(cast(PardOptions, config.options), context, name=config.name)


@hookimpl
def specplug_register() -> Sequence[MethodSpec]:
    return [
        MethodSpec(
            name="pard",
            kind="proposer",
            factory=_build,
            options=PardOptions,
            capabilities=Capabilities(needs_draft_model=True, laws=MODEL_LAWS, deterministic=True, causality="C"),
            summary="A draft model trained on mask tokens writes its whole draft in one forward (PARD, PARD-2).",
        )
    ]
