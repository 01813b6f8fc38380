"""specplug-hidden-states: hidden states of chosen layers to disk, method ``extract_hidden_states``.

Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, cast

from specplug import Capabilities, MethodSpec, PluginConfig, PluginContext, hookimpl
from specplug_hidden_states.files import complete_files
from specplug_hidden_states.options import HiddenStatesOptions, chosen_layers

if TYPE_CHECKING:
    from specplug_hidden_states.extractor import HiddenStatesExtractor

__all__ = ["SPECPLUG_API", "HiddenStatesOptions", "complete_files", "specplug_register"]

SPECPLUG_API = (1, 0)

try:
    __version__ = version("specplug-hidden-states")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def _build(config: PluginConfig, context: PluginContext) -> HiddenStatesExtractor:
    from specplug_hidden_states.extractor import HiddenStatesExtractor

    options = cast(HiddenStatesOptions, config.options)
    return HiddenStatesExtractor(options, chosen_layers(options, context.session.num_layers))


@hookimpl
def specplug_register() -> Sequence[MethodSpec]:
    return [
        MethodSpec(
            name="extract_hidden_states",
            kind="observer",
            factory=_build,
            options=HiddenStatesOptions,
            capabilities=Capabilities(laws=frozenset()),
            summary="Writes the target's hidden states of prompt and output to safetensors, one file a request.",
        )
    ]
