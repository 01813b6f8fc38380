"""The keys of ``typical``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["TypicalOptions"]


class TypicalOptions(BaseModel):
    """Medusa's two numbers, and its defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    typical_threshold: float = Field(
        default=0.09,
        ge=0.0,
        le=1.0,
        description="A draft token whose target probability is above this is kept, whatever the entropy.",
    )
    typical_alpha: float = Field(
        default=0.3,
        ge=0.0,
        description="Where the target is unsure, the bar is this times exp(-entropy), if that is lower.",
    )
