"""Hidden states of chosen layers, collected by public forward hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from specplug.errors import ModelError

__all__ = ["HiddenStateTaps", "decoder_layers"]


def decoder_layers(model: Any, num_layers: int) -> torch.nn.ModuleList:
    """The model's decoder layers: ``get_decoder().layers``, else its only list of ``num_layers`` modules."""
    layers = getattr(model.get_decoder(), "layers", None)
    if isinstance(layers, torch.nn.ModuleList):
        return layers
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == num_layers]
    if len(lists) != 1:
        raise ModelError(f'model type "{model.config.model_type}": its decoder layers cannot be found to tap them')
    return lists[0]


class HiddenStateTaps:
    """Hooks on the layers asked for, which collect only inside :meth:`collect`.

    Layer i is the residual stream after i decoder layers (0: the embeddings), before any final norm.
    """

    def __init__(self, model: Any, num_layers: int) -> None:
        self._model = model
        self._num_layers = num_layers
        self._handles: list[RemovableHandle] = []
        self._collected: dict[int, torch.Tensor] | None = None

    def set(self, layers: Sequence[int]) -> None:
        """Tap these layers and no others. Raises ValueError for a layer that the model does not have."""
        for layer in layers:
            if not 0 <= layer <= self._num_layers:
                raise ValueError(f"layer {layer} cannot be tapped: the model has layers 0 to {self._num_layers}")
        for handle in self._handles:
            handle.remove()
        self._handles = [self._hook(layer) for layer in sorted(set(layers))]

    def _hook(self, layer: int) -> RemovableHandle:
        modules = decoder_layers(self._model, self._num_layers)
        if layer == 0:
            return modules[0].register_forward_pre_hook(self._before_first, with_kwargs=True)

        def after(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._store(layer, output[0] if isinstance(output, tuple) else output)

        return modules[layer - 1].register_forward_hook(after)

    def _before_first(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._store(0, args[0] if args else kwargs["hidden_states"])

    def _store(self, layer: int, states: torch.Tensor) -> None:
        if self._collected is not None:
            self._collected[layer] = states[0]

    @contextmanager
    def collect(self) -> Iterator[Mapping[int, torch.Tensor]]:
        """Within it, a forward fills the mapping: layer -> ``[T, hidden]``."""
        collected: dict[int, torch.Tensor] = {}
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None
