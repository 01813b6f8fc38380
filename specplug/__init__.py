"""Speculative decoding as plugins.

``LLM`` and ``SamplingParams`` mirror vLLM's; ``hookimpl`` and the types are for plugin authors. Importing this
package imports neither torch nor transformers: ``LLM`` loads on first use.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from specplug.draft_space import DraftContext, DraftSpace, IdentityDraftSpace
from specplug.errors import (
    ConfigError,
    ModelError,
    PluginConflictError,
    PluginError,
    PluginFaultError,
    PluginLoadError,
    PluginNotFoundError,
    RequestError,
    SpecplugError,
)
from specplug.hooks.markers import SPECPLUG_API, hookimpl
from specplug.methods import Capabilities, MethodSpec, NoOptions, PluginConfig, PluginContext
from specplug.sampling_params import SamplingParams, StructuredOutputsParams
from specplug.types import (
    Batch,
    Dense,
    Draft,
    Indirect,
    LawSpan,
    OneHot,
    Request,
    RequestStep,
    Session,
    SessionSummary,
    SourceCount,
    SourceSpan,
    StepOutcome,
    TokenIds,
    Unknown,
    Verification,
)

if TYPE_CHECKING:
    from specplug.host.llm import LLM
    from specplug.host.outputs import CompletionOutput, RequestOutput

__all__ = [
    "LLM",
    "SPECPLUG_API",
    "Batch",
    "Capabilities",
    "CompletionOutput",
    "ConfigError",
    "Dense",
    "Draft",
    "DraftContext",
    "DraftSpace",
    "IdentityDraftSpace",
    "Indirect",
    "LawSpan",
    "MethodSpec",
    "ModelError",
    "NoOptions",
    "OneHot",
    "PluginConfig",
    "PluginConflictError",
    "PluginContext",
    "PluginError",
    "PluginFaultError",
    "PluginLoadError",
    "PluginNotFoundError",
    "Request",
    "RequestError",
    "RequestOutput",
    "RequestStep",
    "SamplingParams",
    "Session",
    "SessionSummary",
    "SourceCount",
    "SourceSpan",
    "SpecplugError",
    "StepOutcome",
    "StructuredOutputsParams",
    "TokenIds",
    "Unknown",
    "Verification",
    "hookimpl",
]

try:
    __version__ = version("specplug")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

_LAZY = {
    "LLM": "specplug.host.llm",
    "CompletionOutput": "specplug.host.outputs",
    "RequestOutput": "specplug.host.outputs",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
