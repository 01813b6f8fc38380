"""specplug-typical: typical acceptance as a specplug verifier, ``typical``. Lossy.

Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, cast

from specplug import Capabilities, MethodSpec, PluginConfig, PluginContext, hookimpl
from specplug_typical.options import TypicalOptions

if TYPE_CHECKING:
    from specplug_typical.verifier import TypicalVerifier

__all__ = ["SPECPLUG_API", "TypicalOptions", "specplug_register"]

SPECPLUG_API = (1, 0)

try:
    __version__ = version("specplug-typical")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def _build(config: PluginConfig, context: PluginContext) -> TypicalVerifier:
    from specplug_typical.verifier import TypicalVerifier

    options = cast(TypicalOptions, config.options)
    return TypicalVerifier(
        vocab_size=context.session.vocab_size,
        threshold=options.typical_threshold,
        alpha=options.typical_alpha,
    )


@hookimpl
def specplug_register() -> Sequence[MethodSpec]:
    return [
        MethodSpec(
            name="typical",
            kind="verifier",
            factory=_build,
            options=TypicalOptions,
            capabilities=Capabilities(laws=frozenset(), lossless=False),
            summary="Lossy: keeps draft tokens that the target finds plausible, rather than those it would have drawn.",
        )
    ]
