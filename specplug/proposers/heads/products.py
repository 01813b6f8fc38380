"""The fastest matrix products that a head on a target can have."""

from __future__ import annotations

from typing import Any

import torch

from specplug.models.kernels import Kernels, Map
from specplug.models.packing import can_pack, pack_linears

__all__ = ["make_linears_fast", "target_output"]


class _CompiledLinear(torch.nn.Module):
    def __init__(self, run: Map) -> None:
        super().__init__()
        self.forward = run


def make_linears_fast(head: torch.nn.Module, target: Any) -> None:
    """Replace the linear layers of ``head``, whose weights are final: by the target's kernels, or by torch's packed
    ones where it has those."""
    kernels: Kernels | None = getattr(target, "kernels", None)
    if kernels is None:
        if can_pack(target.device, target.dtype):
            pack_linears(head)
        return
    for parent in list(head.modules()):
        for name, layer in list(parent.named_children()):
            run = kernels.linear(layer.weight.detach(), layer.bias) if type(layer) is torch.nn.Linear else None
            if run is not None:
                setattr(parent, name, _CompiledLinear(run))


def target_output(target: Any) -> Map:
    """The target's output embedding, ``[n, hidden]`` to raw logits, as the target itself runs it if it tells."""
    project: Map = getattr(target, "project", target.model.get_output_embeddings().forward)
    return project
