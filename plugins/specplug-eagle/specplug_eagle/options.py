"""The keys of ``eagle`` and ``eagle3``; a local checkpoint is checked here, before any weights load."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specplug.errors import ModelError
from specplug_eagle.checkpoint import Checkpoint, Method

__all__ = ["Eagle3Options", "EagleOptions"]


class EagleOptions(BaseModel):
    """vLLM's keys mean what they mean there."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    method: ClassVar[Method] = "eagle"

    model: str = Field(description="Folder (or cached hub id) of the head's checkpoint: config.json and safetensors.")
    revision: str | None = Field(default=None, description="Revision of the head's checkpoint.")
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        default="greedy", description="Draft by arg-max, or sample and keep the draft's law for verification."
    )
    parallel_drafting: bool = Field(default=False, description="All tokens from one forward (P-EAGLE).")
    max_model_len: int | None = Field(
        default=None, ge=1, description="Longest context the head sees; longer requests run without drafting."
    )

    eagle_tree_width: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Draft dynamic trees (EAGLE-2): children scored of a node, nodes expanded at a depth. 0: chains.",
    )
    eagle_tree_depth: int = Field(
        default=5, ge=1, le=16, description="Longest path of a tree; num_speculative_tokens then counts its nodes."
    )

    @model_validator(mode="after")
    def _check(self) -> EagleOptions:
        if self.parallel_drafting and self.method == "eagle":
            raise ValueError('parallel_drafting needs an EAGLE-3 style head (P-EAGLE): method "eagle3"')
        if self.eagle_tree_width and (self.parallel_drafting or self.draft_sample_method == "probabilistic"):
            asked = "parallel_drafting" if self.parallel_drafting else 'draft_sample_method="probabilistic"'
            raise ValueError(f"eagle_tree_width drafts trees, which {asked} cannot; set it to 0, or leave {asked} out")
        folder = Path(self.model).expanduser()
        if folder.is_dir():
            try:
                self.read(folder)
            except ModelError as error:
                raise ValueError(str(error)) from error
        return self

    def read(self, folder: Path) -> Checkpoint:
        """What the checkpoint in ``folder`` holds. Raises ModelError where it is no usable head of the method."""
        return Checkpoint.read(folder, self.method, is_parallel=self.parallel_drafting)


class Eagle3Options(EagleOptions):
    """The keys of ``eagle3``."""

    method: ClassVar[Method] = "eagle3"
