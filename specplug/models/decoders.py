"""Decoders that other packages bring: a model's forward in kernels of their own.

A package offers one by an entry point of the group ``specplug.decoders``. It names a function that takes a
:class:`specplug.models.llama.LlamaModel` and returns a :class:`Decoder`, or None for a model it cannot run. The loaded
model is tried against transformers' own forward before anything is generated with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol

from specplug.errors import ConfigError, ModelError
from specplug.models.llama import LlamaModel

if TYPE_CHECKING:
    import torch

    from specplug.models.cache import RaggedCache
    from specplug.models.step_plan import StepPlan

__all__ = ["Decoder", "DecoderFactory", "find_decoder"]

GROUP = "specplug.decoders"
AUTO, TORCH = "auto", "torch"

logger = logging.getLogger("specplug")


class Decoder(Protocol):
    """A model's forward over packed tokens. It keeps keys and values in the cache's own buffers and layout."""

    name: str

    def forward(
        self,
        input_ids: torch.Tensor,
        step: StepPlan,
        cache: RaggedCache,
        logits_indices: torch.Tensor,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """``input_ids`` ``[T]``: logits of ``logits_indices``, and states ``[T, hidden]`` of each layer in ``taps``.

        Layer i is the residual stream after i layers (0: the embeddings), before the final norm.
        """


DecoderFactory = Callable[[LlamaModel], Decoder | None]


def find_decoder(name: str, model: Any, num_positions: int) -> Decoder | None:
    """The installed decoder called ``name``, or with "auto" the first that runs ``model``; None for torch's forward.

    ``num_positions``: positions that steps may hold. A decoder takes the layers out of the model. Raises ConfigError
    for a name that is not installed or cannot run the model; with "auto" a package that
    cannot be imported is logged and passed over. Raises ModelError where a decoder fails, its model half taken.
    """
    if name == TORCH:
        return None
    installed = {each.name: each for each in sorted(entry_points(group=GROUP))}
    if name == AUTO:
        made = (_make(each, model, num_positions, logs=True) for each in installed.values())
        return next((decoder for decoder in made if decoder is not None), None)
    if name not in installed:
        choices = ", ".join(f'"{each}"' for each in (AUTO, TORCH, *installed))
        raise ConfigError(f'decoder="{name}" is not installed; write one of: {choices}')
    decoder = _make(installed[name], model, num_positions, logs=False)
    if decoder is None:
        raise ConfigError(
            f'decoder="{name}" cannot run this model ({type(model).__name__}, {model.dtype}, {model.device}) on this '
            'machine; write decoder="auto" to use it only where it can'
        )
    return decoder


def _make(entry_point: EntryPoint, model: Any, num_positions: int, *, logs: bool) -> Decoder | None:
    try:
        factory: DecoderFactory = entry_point.load()
    except Exception as error:
        fault = f'decoder "{entry_point.name}" ({_origin(entry_point)}) cannot be imported: {error}'
        if not logs:
            raise ModelError(fault) from error
        logger.warning("%s; going on without it", fault)
        return None
    parts = LlamaModel.of(model, num_positions)
    try:
        return None if parts is None else factory(parts)
    except Exception as error:
        raise ModelError(
            f'decoder "{entry_point.name}" ({_origin(entry_point)}) failed to take the model: {type(error).__name__}: '
            f'{error}; write decoder="{TORCH}" to do without it'
        ) from error


def _origin(entry_point: EntryPoint) -> str:
    return "unknown" if entry_point.dist is None else f"{entry_point.dist.name} {entry_point.dist.version}"
