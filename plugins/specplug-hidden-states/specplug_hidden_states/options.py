"""The keys of ``extract_hidden_states``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specplug import ConfigError

__all__ = ["HiddenStatesOptions", "WhenFull", "chosen_layers"]

WhenFull = Literal["wait", "drop"]

_LAYERS = "extract_hidden_states_layers"


class HiddenStatesOptions(BaseModel):
    """Where the files go, what is in them, and what they may cost."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    extract_hidden_states_path: str = Field(description="Folder for the files; made if it is not there.")
    extract_hidden_states_layers: tuple[int, ...] | None = Field(
        default=None,
        strict=False,
        description="Layer i is the residual stream after i decoder layers (0: the embeddings), before the final "
        "norm; with n layers 2, n/2, n-3 and n if absent, as speculators trains EAGLE-3 heads.",
    )
    extract_hidden_states_output: bool = Field(
        default=True, description="Keep output tokens too; a request's include_output_tokens goes before."
    )
    extract_hidden_states_queue_bytes: int = Field(
        default=1 << 28, ge=1, description="Most bytes that wait in memory for the disk."
    )
    extract_hidden_states_when_full: WhenFull = Field(
        default="wait",
        description="Where that is reached: wait, so that decoding slows down to the disk, or drop the requests "
        "of the step, counted and logged.",
    )
    extract_hidden_states_max_bytes: int | None = Field(
        default=None, ge=1, description="Most bytes of hidden-state files in the folder; beyond, extraction stops."
    )

    @model_validator(mode="after")
    def _folder_can_be(self) -> HiddenStatesOptions:
        path = Path(self.extract_hidden_states_path).expanduser()
        if path.exists() and not path.is_dir():
            raise ValueError(f"extract_hidden_states_path={str(path)!r} is a file; name a folder")
        return self

    @model_validator(mode="after")
    def _layers_are_distinct(self) -> HiddenStatesOptions:
        layers = self.extract_hidden_states_layers
        if layers is None:
            return self
        if not layers or len(set(layers)) != len(layers) or min(layers) < 0:
            raise ValueError(f"{_LAYERS}={list(layers)} must name layers from 0 on, each once")
        return self


def chosen_layers(options: HiddenStatesOptions, num_layers: int | None) -> tuple[int, ...]:
    """The layers to tap, in the order of the files' second dimension.

    Raises ``ConfigError`` for a layer that the target does not have, or where the default does not fit it.
    """
    layers = options.extract_hidden_states_layers
    if layers is None:
        if num_layers is None or num_layers < 6:
            raise ConfigError(
                f"the default layers need a target with at least 6; this one has {num_layers or 'an unknown number'}. "
                f"Write {_LAYERS}."
            )
        return (2, num_layers // 2, num_layers - 3, num_layers)
    if num_layers is not None and max(layers) > num_layers:
        raise ConfigError(
            f"{_LAYERS}={list(layers)}: the target has {num_layers} decoder layers, so name layers 0 to {num_layers}"
        )
    return layers
