"""What the package offers: see ``specplug.models.kernels``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specplug.models.kernels import ChainParts
from specplug.models.llama import LlamaLayer, LlamaModel, can_join, linears_of
from specplug.models.rotary import RotaryTable
from specplug_native.chain import NativeChain, chain_of
from specplug_native.decoder import NativeDecoder
from specplug_native.layer import NativeLayer
from specplug_native.library import load_library
from specplug_native.memory import LargePages
from specplug_native.weights import PANEL, NativeLinear, NativeNorm

__all__ = ["NativeKernels"]

_MOST_HEAD_DIM = 256
_LANES = 16


class NativeKernels:
    """Implements :class:`specplug.models.kernels.Kernels` for bfloat16 on processors with AVX-512 for it."""

    name = "native"

    def decoder(self, model: LlamaModel) -> NativeDecoder | None:
        """Takes the layers of a model that the kernels can run."""
        library = load_library()
        if library is None or model.activation != "silu" or not _is_ours(model.head.weight):
            return None
        if not all(_can_run(layer, model.rotary, model.head_dim) for layer in model.layers()):
            return None
        return NativeDecoder(model, library, self)

    def layer(
        self, layer: LlamaLayer, rotary: RotaryTable, *, head_dim: int, scaling: float, norm_eps: float
    ) -> NativeLayer | None:
        """One layer with SiLU."""
        library = load_library()
        if library is None or not _can_run(layer, rotary, head_dim):
            return None
        return NativeLayer(layer, rotary, head_dim=head_dim, scaling=scaling, norm_eps=norm_eps, library=library)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Any number of outputs, an even one of inputs."""
        library = load_library()
        if library is None or not _is_ours(weight) or weight.shape[1] % 2 or not weight.numel():
            return None
        return NativeLinear(weight, bias, library, LargePages(weight.nbytes))

    def norm(self, weight: torch.Tensor, eps: float) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Over a multiple of 16 numbers."""
        library = load_library()
        if library is None or not _is_ours(weight) or len(weight) % _LANES:
            return None
        return NativeNorm(weight, eps, library)

    def chain(self, parts: ChainParts) -> NativeChain | None:
        """Of parts that these kernels run."""
        library = load_library()
        return None if library is None else chain_of(parts, library)

    def likeliest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """In one pass a row; of equal logits the first."""
        library = load_library()
        if library is None or not _is_ours(logits):
            return None
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        ids = logits.new_empty(num_rows, dtype=torch.int64)
        probs = logits.new_empty(num_rows, dtype=torch.float32)
        threads = torch.get_num_threads()
        library.likeliest(logits.data_ptr(), num_rows, vocab_size, threads, ids.data_ptr(), probs.data_ptr())
        return ids, probs


def _is_ours(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"


def _can_run(layer: LlamaLayer, rotary: RotaryTable, head_dim: int) -> bool:
    sizes = (layer.output.out_features, 2 * layer.gate.out_features, head_dim)
    return (
        head_dim <= _MOST_HEAD_DIM
        and rotary.cos.shape[-1] == head_dim  # less where only a part of a head is turned
        and all(size % PANEL == 0 for size in sizes)
        and all(_is_ours(linear.weight) for linear in linears_of(layer))
        and can_join(layer)
    )
