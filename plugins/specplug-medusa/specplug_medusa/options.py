"""The keys of ``medusa``; a local checkpoint is checked here, before any weights load."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from specplug import ConfigError, ModelError
from specplug_medusa.checkpoint import Checkpoint
from specplug_medusa.tree import HeadTree, likeliest_tree

__all__ = ["MedusaOptions"]


class MedusaOptions(BaseModel):
    """vLLM's keys mean what they mean there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="Folder (or cached hub id) of the heads: config.json and safetensors.")
    revision: str | None = Field(default=None, description="Revision of the heads' checkpoint.")
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        default="greedy", description="Draft by arg-max, or sample and keep the draft's law for verification."
    )
    medusa_tree: StrictInt | tuple[tuple[int, ...], ...] | None = Field(
        default=None,
        description="Draft a tree: the number of its nodes, or its paths of ranks, such as [[0], [1], [0, 0]]; absent: "
        "a chain of each head's likeliest token.",
    )

    @field_validator("medusa_tree")
    @classmethod
    def _is_tree(cls, value: int | tuple[tuple[int, ...], ...] | None) -> int | tuple[tuple[int, ...], ...] | None:
        if (isinstance(value, int) and value < 1) or value == ():
            raise ValueError(f"medusa_tree={value!r} must be a number of nodes, 1 or more, or a list of paths")
        if isinstance(value, tuple):
            HeadTree(value)
        return value

    @model_validator(mode="after")
    def _trees_are_not_drawn(self) -> MedusaOptions:
        if self.medusa_tree is not None and self.draft_sample_method == "probabilistic":
            raise ValueError(
                'medusa_tree drafts likeliest tokens, and draft_sample_method="probabilistic" draws; leave one out'
            )
        return self

    def tree(self, num_heads: int) -> HeadTree | None:
        """The tree over so many heads. Raises ConfigError for one that is deeper."""
        if self.medusa_tree is None:
            return None
        if isinstance(self.medusa_tree, int):
            return likeliest_tree(self.medusa_tree, num_heads)
        deepest = max(self.medusa_tree, key=len)
        if len(deepest) > num_heads:
            raise ConfigError(
                f"medusa_tree: the path {list(deepest)} has {len(deepest)} tokens, and there are {num_heads} heads"
            )
        return HeadTree(self.medusa_tree)

    @model_validator(mode="after")
    def _check(self) -> MedusaOptions:
        folder = Path(self.model).expanduser()
        if folder.is_dir():
            try:
                self.tree(Checkpoint.read(folder).config.num_heads)
            except ModelError as error:
                raise ValueError(str(error)) from error
        return self
