"""Weights in the order in which the kernels read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import byref

import torch
from torch.nn.functional import pad

from specplug.models.llama import LlamaLayer
from specplug_native.library import Layer, Library, Linear
from specplug_native.memory import LargePages, room

__all__ = [
    "PANEL",
    "LayerWeights",
    "NativeLinear",
    "NativeNorm",
    "PackedLinear",
    "interleaved",
    "packed_bytes",
    "readable",
]

PANEL = 32
"""Outputs that stand side by side."""


def readable(states: torch.Tensor, width: int) -> torch.Tensor:
    """``[..., width]`` as the kernels read it. Raises ValueError for what they would read as something else."""
    if states.dtype != torch.bfloat16 or states.shape[-1] != width:
        raise ValueError(f"the native kernels read bfloat16 [..., {width}], not {states.dtype} {list(states.shape)}")
    return states.contiguous()


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``[n, ...]`` twice to ``[2 n, ...]``: half a panel of the gate, then the half that it gates. n is a multiple of
    half a panel."""
    half = PANEL // 2
    halves = [part.reshape(-1, half, *part.shape[1:]) for part in (gate, up)]
    return torch.stack(halves, dim=1).flatten(0, 2)


def packed_bytes(layers: Iterable[torch.nn.Linear]) -> int:
    """What the weights of layers take once they are packed, each on its own."""
    return sum(room((each.out_features + -each.out_features % PANEL) * each.in_features * 2) for each in layers)


class PackedLinear:
    """A linear layer's weights as panels ``[out / 32, in / 2, 32, 2]``, filled up with zeros."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, pages: LargePages) -> None:
        """``weight`` ``[out, in]`` in bfloat16, ``in`` even; ``bias`` ``[out]`` or None. Both are copied."""
        num_out, num_in = weight.shape
        missing = -num_out % PANEL
        panels = pad(weight, (0, 0, 0, missing)).view(-1, PANEL, num_in // 2, 2).transpose(1, 2)
        self._packed = pages.empty(panels.shape, panels.dtype).copy_(panels)
        self._bias = None if bias is None else pad(bias, (0, missing)).contiguous()
        self.struct = Linear(
            self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr(), num_in, num_out
        )

    @classmethod
    def of(cls, layers: Sequence[torch.nn.Linear], pages: LargePages) -> PackedLinear:
        """Layers of one input as one, their outputs after each other; biases throughout or none."""
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        weight = torch.cat([layer.weight.detach() for layer in layers])
        return cls(weight, torch.cat(biases) if biases else None, pages)


class NativeLinear:
    """``[..., in]`` to ``[..., out]``."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, library: Library, pages: LargePages) -> None:
        self._packed = PackedLinear(weight, bias, pages)
        self._num_out, self._num_in = weight.shape
        self._multiply = library.linear
        self.struct = self._packed.struct

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        states = readable(states, self._num_in)
        outputs = states.new_empty(*states.shape[:-1], self._num_out)
        num_rows = states.numel() // self._num_in
        self._multiply(byref(self.struct), states.data_ptr(), num_rows, torch.get_num_threads(), outputs.data_ptr())
        return outputs


class NativeNorm:
    """``x / rms(x) * weight`` over the last axis, rounded as transformers rounds it."""

    def __init__(self, weight: torch.Tensor, eps: float, library: Library) -> None:
        self.weight, self.eps, self._size = weight.contiguous(), eps, len(weight)
        self._normalise = library.norm

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        states = readable(states, self._size)
        outputs = torch.empty_like(states)
        num_rows = states.numel() // self._size
        self._normalise(states.data_ptr(), num_rows, self._size, self.eps, self.weight.data_ptr(), outputs.data_ptr())
        return outputs


class LayerWeights:
    """A layer's weights as the kernels read them, and the tensors that hold them."""

    def __init__(self, layer: LlamaLayer, pages: LargePages) -> None:
        self._query_key_value = PackedLinear.of([layer.query, layer.key, layer.value], pages)
        self._output = PackedLinear.of([layer.output], pages)
        biases = (layer.gate.bias, layer.up.bias)
        self._gate_up = PackedLinear(
            interleaved(layer.gate.weight.detach(), layer.up.weight.detach()),
            None if biases[0] is None else interleaved(*(bias.detach() for bias in biases)),
            pages,
        )
        self._down = PackedLinear.of([layer.down], pages)
        self._norms = (layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)

    def struct(self) -> Layer:
        """Points into this object, which has to outlive it."""
        linears = (self._query_key_value, self._output, self._gate_up, self._down)
        norms = (None if norm is None else norm.data_ptr() for norm in self._norms)
        return Layer(*(linear.struct for linear in linears), *norms)
