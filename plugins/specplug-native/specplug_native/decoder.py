"""A model's forward as one call of the compiled library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import byref
from typing import TYPE_CHECKING

import numpy as np
import torch

from specplug.models.llama import LlamaLayer, LlamaModel, linears_of
from specplug_native.kinds import Kinds
from specplug_native.library import Heads, Layer, Library, Scratch, Shape, Step, load_library
from specplug_native.weights import PANEL, PackedLinear, interleaved

if TYPE_CHECKING:
    from specplug.models.cache import RaggedCache
    from specplug.models.step_plan import StepPlan

__all__ = ["NativeDecoder", "decoder_for"]

_MOST_HEAD_DIM = 256


def decoder_for(model: LlamaModel) -> NativeDecoder | None:
    """Takes the layers of a model that the kernels can run; None, and nothing changed, for another."""
    library = load_library()
    if library is None or not _can_run(model):
        return None
    return NativeDecoder(model, library)


def _can_run(model: LlamaModel) -> bool:
    sizes = (model.embeddings.shape[1], 2 * model.intermediate_size, model.head_dim)
    return (
        model.embeddings.device.type == "cpu"
        and model.activation == "silu"
        and model.head_dim <= _MOST_HEAD_DIM
        and all(size % PANEL == 0 for size in sizes)
        and all(map(_can_pack, model.layers()))
        and model.head.weight.dtype == torch.bfloat16
    )


def _can_pack(layer: LlamaLayer) -> bool:
    groups = ((layer.query, layer.key, layer.value), (layer.gate, layer.up))
    is_even = all(len({linear.bias is None for linear in group}) == 1 for group in groups)
    return is_even and all(linear.weight.dtype == torch.bfloat16 for linear in linears_of(layer))


class NativeDecoder:
    """The packed forward of a model, from token ids to logits.

    A token's result depends on the tokens it sees and on nothing else in the step: not on the number of rows, of draft
    tokens or of threads, to the last bit. (A tree's nodes are as near to a text of their own as roundings let them.)
    """

    name = "native"

    def __init__(self, model: LlamaModel, library: Library) -> None:
        self._forward = library.forward
        self._embeddings = model.embeddings
        self._hidden_size = model.embeddings.shape[1]
        self._vocab_size = model.head.out_features
        self._kv_shape = (0, model.num_kv_heads, model.head_dim)
        self._rotary = model.rotary
        self._final_norm = model.final_norm
        self._head = PackedLinear.of([model.head])
        heads = Heads(model.num_heads, model.num_kv_heads, model.head_dim, model.scaling)
        self._shape = Shape(heads, model.norm_eps, self._hidden_size, model.intermediate_size)
        self._weights = [_LayerWeights(layer) for layer in model.take_layers()]
        self._layers = (Layer * len(self._weights))(*[weights.struct() for weights in self._weights])
        self._bound: list[torch.Tensor | None] = [None] * len(self._weights)
        qkv_size = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        attended_size = model.num_heads * model.head_dim
        sizes = (self._hidden_size, self._hidden_size, qkv_size, attended_size, model.intermediate_size)
        self._scratch = _ScratchSpace(sizes)

    def forward(
        self,
        input_ids: torch.Tensor,
        step: StepPlan,
        cache: RaggedCache,
        logits_indices: torch.Tensor,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """``input_ids`` ``[T]``: logits of ``logits_indices``, and states ``[T, hidden]`` of each layer in ``taps``.

        Layer i is the residual stream after i layers, before the final norm.
        """
        input_ids, logits_indices = input_ids.contiguous(), logits_indices.contiguous()
        num_tokens, num_logits = len(input_ids), len(logits_indices)
        kinds = Kinds(step, cache.kinds)
        tapped = {layer: self._embeddings.new_empty(num_tokens, self._hidden_size) for layer in taps}
        self._bind(cache, tapped)
        starts = np.zeros(len(step.num_query_tokens) + 1, dtype=np.int64)
        np.cumsum(step.num_query_tokens, out=starts[1:])
        lengths = np.array(step.lengths, dtype=np.int64)
        positions = step.positions
        struct = Step(
            len(lengths),
            starts.ctypes.data,
            lengths.ctypes.data,
            positions.ctypes.data,
            self._rotary.cos.data_ptr(),
            self._rotary.signed_sin.data_ptr(),
            len(self._rotary.cos),
            kinds.structs,
            torch.get_num_threads(),
        )
        logits = self._embeddings.new_empty(num_logits, self._vocab_size)
        is_done = self._forward(
            byref(self._shape),
            self._layers,
            len(self._layers),
            byref(struct),
            input_ids.data_ptr(),
            self._embeddings.data_ptr(),
            len(self._embeddings),
            tapped[0].data_ptr() if 0 in tapped else None,
            self._final_norm.data_ptr(),
            byref(self._head.struct),
            logits_indices.data_ptr(),
            num_logits,
            byref(self._scratch.of(num_tokens)),
            logits.data_ptr(),
        )
        if not is_done:
            raise IndexError(f"a token id, a position or an index of logits is out of range: {input_ids.tolist()}")
        return logits, tapped

    def _bind(self, cache: RaggedCache, tapped: Mapping[int, torch.Tensor]) -> None:
        """Tell each layer where its cache and its tap are; buffers change when the cache grows."""
        for index, (layer, ragged) in enumerate(zip(self._layers, cache.ragged_layers, strict=True)):
            layer.tap = tapped[index + 1].data_ptr() if index + 1 in tapped else None
            if not ragged.is_initialized:
                nothing = self._embeddings.new_empty(self._kv_shape)
                ragged.lazy_initialization(nothing, nothing)
            keys, values = ragged.buffers()
            if keys is not self._bound[index]:
                self._bound[index] = keys
                layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
                layer.capacity = ragged.capacity
                layer.kind = cache.kinds.index(ragged.kind)


class _LayerWeights:
    """A layer's weights as the kernels read them, and the tensors that hold them."""

    def __init__(self, layer: LlamaLayer) -> None:
        self._query_key_value = PackedLinear.of([layer.query, layer.key, layer.value])
        self._output = PackedLinear.of([layer.output])
        biases = (layer.gate.bias, layer.up.bias)
        self._gate_up = PackedLinear(
            interleaved(layer.gate.weight.detach(), layer.up.weight.detach()),
            None if biases[0] is None else interleaved(*(bias.detach() for bias in biases)),
        )
        self._down = PackedLinear.of([layer.down])
        self._norms = (layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)

    def struct(self) -> Layer:
        """Points into this object, which has to outlive it."""
        linears = (self._query_key_value, self._output, self._gate_up, self._down)
        norms = (None if norm is None else norm.data_ptr() for norm in self._norms)
        return Layer(*(linear.struct for linear in linears), *norms)


class _ScratchSpace:
    """Memory for what a step computes on its way; it grows to the largest step."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: numbers a token, by the fields of :class:`Scratch`."""
        self._sizes = sizes
        self._num_tokens = 0
        self._tensors: list[torch.Tensor] = []
        self._struct = Scratch()

    def of(self, num_tokens: int) -> Scratch:
        """Valid until it is asked for again."""
        if num_tokens > self._num_tokens:
            self._num_tokens = num_tokens
            self._tensors = [torch.empty(num_tokens * size, dtype=torch.bfloat16) for size in self._sizes]
            self._struct = Scratch(*(tensor.data_ptr() for tensor in self._tensors))
        return self._struct
