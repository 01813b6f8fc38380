"""Weights in the order in which the kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from specplug_native.library import Linear

__all__ = ["PANEL", "PackedLinear", "interleaved"]

PANEL = 32
"""Outputs that stand side by side."""


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``[n, ...]`` twice to ``[2 n, ...]``: half a panel of the gate, then the half that it gates. n is a multiple of
    half a panel."""
    half = PANEL // 2
    halves = [part.reshape(-1, half, *part.shape[1:]) for part in (gate, up)]
    return torch.stack(halves, dim=1).flatten(0, 2)


class PackedLinear:
    """A linear layer's weights as panels ``[out / 32, in / 2, 32, 2]``, filled up with zeros."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """``weight`` ``[out, in]`` in bfloat16, ``in`` even; ``bias`` ``[out]`` or None. Both are copied."""
        num_out, num_in = weight.shape
        missing = -num_out % PANEL
        panels = pad(weight, (0, 0, 0, missing)).view(-1, PANEL, num_in // 2, 2)
        self._packed = panels.transpose(1, 2).contiguous()
        self._bias = None if bias is None else pad(bias, (0, missing)).contiguous()
        self.struct = Linear(
            self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr(), num_in, num_out
        )

    @classmethod
    def of(cls, layers: Sequence[torch.nn.Linear]) -> PackedLinear:
        """Layers of one input as one, their outputs after each other; biases throughout or none."""
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        return cls(torch.cat([layer.weight.detach() for layer in layers]), torch.cat(biases) if biases else None)
