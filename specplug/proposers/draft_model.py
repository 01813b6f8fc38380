"""The built-in method ``draft_model``: a small causal LM drafts, token by token, for a big one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator

from specplug.config.checkpoint import folder_fault
from specplug.config.kernels import KernelsName
from specplug.hooks.markers import hookimpl
from specplug.methods import Capabilities, MethodSpec, PluginConfig, PluginContext

if TYPE_CHECKING:
    from specplug.proposers.autoregressive import AutoregressiveProposer

__all__ = ["MODEL_LAWS", "DraftModelOptions"]

SPECPLUG_API = (1, 0)

MODEL_LAWS: frozenset[Literal["one_hot", "dense", "indirect"]] = frozenset({"one_hot", "dense", "indirect"})
"""Laws that drafts of a model may carry; greedy ones (``draft_sample_method``) are ``one_hot`` only."""


class DraftModelOptions(BaseModel):
    """The keys of ``draft_model`` and of other methods that have a causal LM draft."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    model: str | None = Field(default=None, description="Folder (or cached hub id) of the draft model.")
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        default="greedy", description="Draft by arg-max, or sample and keep the draft's law for verification."
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="Longest text the draft sees; longer ones run without drafting."
    )
    revision: str | None = Field(default=None, description="Revision of the draft checkpoint.")
    use_heterogeneous_vocab: bool = Field(default=False, description="The draft has another vocabulary (TLI).")
    draft_model_dtype: str = Field(
        default="auto", description="Data type of the draft's weights; auto: that of its own checkpoint."
    )
    draft_model_device: str | None = Field(
        default=None, description="Device of the draft, such as cpu or cuda:1; absent: the target's."
    )
    draft_model_kernels: KernelsName = Field(
        default="auto", description="What runs the draft's forward, as the engine argument kernels does for the target."
    )

    @field_validator("model")
    @classmethod
    def _folder_with_weights(cls, model: str | None) -> str | None:
        """What a look at the folder tells, before the target's weights load."""
        if model is None:
            return None
        if (fault := folder_fault(model, "a Hugging Face causal LM")) is not None:
            raise ValueError(fault)
        folder = Path(model).expanduser()
        if folder.is_dir() and not any(folder.glob("*.safetensors")):
            raise ValueError(f"{model} holds no weights: no *.safetensors file (pickled weights are not read)")
        return model


def _build(config: PluginConfig, context: PluginContext) -> AutoregressiveProposer:
    from specplug.proposers.autoregressive import AutoregressiveProposer
    from specplug.proposers.draft_loading import load_draft

    options = cast(DraftModelOptions, config.options)
    return AutoregressiveProposer(
        load_draft(options, context),
        context,
        name=config.name,
        is_probabilistic=options.draft_sample_method == "probabilistic",
        needs_other_vocabulary=options.use_heterogeneous_vocab,
    )


@hookimpl
def specplug_register() -> Sequence[MethodSpec]:
    return [
        MethodSpec(
            name="draft_model",
            kind="proposer",
            factory=_build,
            options=DraftModelOptions,
            capabilities=Capabilities(needs_draft_model=True, laws=MODEL_LAWS, deterministic=True, causality="C"),
            summary="A small causal LM drafts token by token, greedily or by sampling.",
        )
    ]
