"""bfloat16 weights of linear layers in oneDNN's own order, on a CPU: the same bits in about half the time.

A plain linear layer reorders its weights in every call. Here that is done once, in place of the plain weights. Only
for models that specplug loaded itself, and only for layers whose results are equal bit for bit; float32 is left alone,
since there they are not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import linear

__all__ = ["PackedLinear", "can_pack", "pack_linears"]

_ROWS_HINT = 16
"""Rows a call is expected to bring; the order chosen for it serves other numbers as well."""
_ROWS_TRIED = (1, 7, 33)


class PackedLinear(torch.nn.Module):
    """A linear layer for inference. ``keep_weight``: keep the plain weight too, for those who read it."""

    def __init__(self, layer: torch.nn.Linear, *, keep_weight: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = layer.weight if keep_weight else None
        self.bias = layer.bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default  # looked up once: it is called hundreds of times
        self._packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS_HINT)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        output: torch.Tensor = self._multiply(states, self._packed, self.bias, "none", [], "")
        return output


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch can pack weights for this device and dtype."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@torch.inference_mode()
def pack_linears(model: torch.nn.Module) -> int:
    """Replace the linear layers of ``model``, which is changed; returns how many were.

    The output embedding keeps its plain weight too, since it may be the input embedding's and heads may read it.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    equal_shapes: dict[tuple[int, int, bool], bool] = {}
    num_packed = 0
    for parent, name in list(_places(model)):  # not the layers themselves, which are to be freed one by one
        layer = getattr(parent, name)
        packed = PackedLinear(layer, keep_weight=layer is head)
        shape = (layer.in_features, layer.out_features, layer.bias is not None)
        if shape not in equal_shapes:
            equal_shapes[shape] = _is_equal(layer, packed)
        if equal_shapes[shape]:
            setattr(parent, name, packed)
            num_packed += 1
    return num_packed


def _places(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """Where the linear layers are: parent and name."""
    for parent in model.modules():
        for name, layer in parent.named_children():
            if type(layer) is torch.nn.Linear and layer.weight.dtype == torch.bfloat16:
                yield parent, name


def _is_equal(layer: torch.nn.Linear, packed: PackedLinear) -> bool:
    generator = torch.Generator().manual_seed(0)
    for num_rows in _ROWS_TRIED:
        states = torch.randn(1, num_rows, layer.in_features, generator=generator).to(layer.weight.dtype)
        if not torch.equal(linear(states, layer.weight, layer.bias), packed(states)):
            return False
    return True
