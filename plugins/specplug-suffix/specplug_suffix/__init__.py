"""specplug-suffix: suffix decoding as a specplug plugin, method ``suffix``.

Importing this package imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import cast

from specplug import Capabilities, MethodSpec, PluginConfig, PluginContext, hookimpl
from specplug_suffix.acceptance import AcceptanceRow
from specplug_suffix.options import SuffixOptions
from specplug_suffix.proposer import SuffixProposer

__all__ = ["SPECPLUG_API", "AcceptanceRow", "SuffixOptions", "SuffixProposer", "specplug_register"]

SPECPLUG_API = (1, 0)

try:
    __version__ = version("specplug-suffix")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def _build(config: PluginConfig, context: PluginContext) -> SuffixProposer:
    options = cast(SuffixOptions, config.options)
    longest = config.num_speculative_tokens
    if "suffix_max_draft" in options.model_fields_set:
        longest = min(longest, options.suffix_max_draft)
    proposer = SuffixProposer(
        options,
        num_speculative_tokens=longest,
        vocab_size=context.session.vocab_size,
        device=context.session.device,
        name=config.name,
    )
    proposer.read_corpus(getattr(context.target, "tokenizer", None))
    return proposer


@hookimpl
def specplug_register() -> Sequence[MethodSpec]:
    return [
        MethodSpec(
            name="suffix",
            kind="proposer",
            factory=_build,
            options=SuffixOptions,
            capabilities=Capabilities(laws=frozenset({"one_hot"}), deterministic=False, causality="H"),
            summary="Copies what followed the longest match in prompt, output, earlier outputs of others or a corpus.",
        )
    ]
