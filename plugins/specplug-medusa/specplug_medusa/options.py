"""The keys of ``medusa``; a local checkpoint is checked here, before any weights load."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specplug import ModelError
from specplug_medusa.checkpoint import Checkpoint

__all__ = ["MedusaOptions"]


class MedusaOptions(BaseModel):
    """vLLM's keys mean what they mean there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="Folder (or cached hub id) of the heads: config.json and safetensors.")
    revision: str | None = Field(default=None, description="Revision of the heads' checkpoint.")
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        default="greedy", description="Draft by arg-max, or sample and keep the draft's law for verification."
    )

    @model_validator(mode="after")
    def _check(self) -> MedusaOptions:
        folder = Path(self.model).expanduser()
        if folder.is_dir():
            try:
                Checkpoint.read(folder)
            except ModelError as error:
                raise ValueError(str(error)) from error
        return self
