"""One decoder layer as a call of the compiled library, for heads."""

from __future__ import annotations

from ctypes import byref
from typing import TYPE_CHECKING

import torch

from specplug.models.llama import LlamaLayer, linears_of
from specplug.models.rotary import RotaryTable
from specplug_native.library import Heads, Layer, Library, Shape
from specplug_native.memory import LargePages
from specplug_native.steps import NativeStep, ScratchSpace
from specplug_native.weights import LayerWeights, packed_bytes, readable

if TYPE_CHECKING:
    from specplug.models.cache import RaggedLayer
    from specplug.models.step_plan import StepPlan

__all__ = ["NativeLayer", "buffers_of"]


class NativeLayer:
    """Implements :class:`specplug.models.kernels.LayerStep`."""

    def __init__(
        self,
        layer: LlamaLayer,
        rotary: RotaryTable,
        *,
        head_dim: int,
        scaling: float,
        norm_eps: float,
        library: Library,
    ) -> None:
        num_heads, num_kv_heads = (part.out_features // head_dim for part in (layer.query, layer.key))
        hidden_size, intermediate_size = layer.output.out_features, layer.gate.out_features
        heads = Heads(num_heads, num_kv_heads, head_dim, scaling)
        self.shape = Shape(heads, norm_eps, hidden_size, intermediate_size)
        self._weights = LayerWeights(layer, LargePages(packed_bytes(linears_of(layer))))
        self._struct = self._weights.struct()
        self.products = (self._struct.query_key_value, self._struct.output, self._struct.gate_up, self._struct.down)
        """Its matrix products."""
        self.scratch = ScratchSpace(self.shape)
        self.rotary = rotary
        self._run = library.layer

    def __call__(
        self, residual: torch.Tensor, states: torch.Tensor, step: StepPlan, cache: RaggedLayer
    ) -> torch.Tensor:
        """``states`` ``[T, in_features]`` through attention and MLP, added to ``residual`` ``[T, hidden_size]``."""
        outputs = readable(residual, self.shape.hidden_size).clone()
        states = readable(states, self._struct.query_key_value.in_features)
        if not len(outputs) == len(states) == sum(step.num_query_tokens):
            raise ValueError(f"{len(outputs)} and {len(states)} states for {sum(step.num_query_tokens)} query tokens")
        layer, scratch = self.bound(cache), self.scratch.room(len(states))
        native = NativeStep(step, [cache.kind], self.rotary)
        room, scratch.states = scratch.states, outputs.data_ptr()
        is_done = self._run(byref(self.shape), byref(layer), byref(native.struct), states.data_ptr(), byref(scratch))
        scratch.states = room
        if not is_done:
            raise IndexError(f"rows of {step.lengths} entries grow beyond the rotary table's positions")
        return outputs

    def bound(self, cache: RaggedLayer) -> Layer:
        """The layer, reading and writing this cache."""
        keys, values = buffers_of(cache, self.shape)
        layer = self._struct
        layer.keys, layer.values, layer.capacity = keys.data_ptr(), values.data_ptr(), cache.capacity
        return layer


def buffers_of(cache: RaggedLayer, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Keys and values. Raises TypeError for entries that are kept in another dtype than the kernels read."""
    if not cache.is_initialized:
        sizes = (0, shape.heads.num_kv_heads, shape.heads.head_dim)
        nothing = torch.empty(sizes, dtype=torch.bfloat16, device="cpu")
        cache.lazy_initialization(nothing, nothing)
    buffers = cache.buffers()
    if buffers[0].dtype != torch.bfloat16:
        raise TypeError(f"the cache is in {buffers[0].dtype}; the native kernels read bfloat16")
    return buffers
