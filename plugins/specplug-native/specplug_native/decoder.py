"""A model's forward as one call of the compiled library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import byref
from typing import TYPE_CHECKING

import torch

from specplug.models.llama import LlamaModel
from specplug_native.layer import buffers_of
from specplug_native.library import Heads, Layer, Library, Shape
from specplug_native.memory import LargePages
from specplug_native.steps import NativeStep, ScratchSpace
from specplug_native.weights import LayerWeights, NativeLinear

if TYPE_CHECKING:
    from specplug.models.cache import RaggedCache
    from specplug.models.kernels import Kernels
    from specplug.models.step_plan import StepPlan

__all__ = ["NativeDecoder"]

_CHUNK = 64 << 20
"""Bytes of memory that are taken at once for weights."""


class NativeDecoder:
    """The packed forward of a model, from token ids to logits.

    A token's result depends on the tokens it sees and on nothing else in the step: not on the number of rows, of draft
    tokens or of threads, to the last bit; a tree's nodes are as near to a text of their own as roundings let them.
    """

    def __init__(self, model: LlamaModel, library: Library, kernels: Kernels) -> None:
        self.kernels = kernels
        self._forward = library.forward
        self._embeddings = model.embeddings
        self._hidden_size = model.embeddings.shape[1]
        self._vocab_size = model.head.out_features
        self._rotary = model.rotary
        self._final_norm = model.final_norm
        pages = LargePages(_CHUNK)
        self.project = NativeLinear(model.head.weight.detach(), model.head.bias, library, pages)
        """``[n, hidden]`` to logits ``[n, vocab]``."""
        heads = Heads(model.num_heads, model.num_kv_heads, model.head_dim, model.scaling)
        self._shape = Shape(heads, model.norm_eps, self._hidden_size, model.intermediate_size)
        self._weights = [LayerWeights(layer, pages) for layer in model.take_layers()]
        self._layers = (Layer * len(self._weights))(*[weights.struct() for weights in self._weights])
        self._bound: list[torch.Tensor | None] = [None] * len(self._weights)
        self._scratch = ScratchSpace(self._shape)

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
        input_ids, logits_indices = input_ids.long().contiguous(), logits_indices.long().contiguous()
        num_tokens, num_logits = len(input_ids), len(logits_indices)
        tapped = {layer: self._embeddings.new_empty(num_tokens, self._hidden_size) for layer in taps}
        self._bind(cache, tapped)
        native = NativeStep(step, cache.kinds, self._rotary)
        logits = self._embeddings.new_empty(num_logits, self._vocab_size)
        is_done = self._forward(
            byref(self._shape),
            self._layers,
            len(self._layers),
            byref(native.struct),
            input_ids.data_ptr(),
            self._embeddings.data_ptr(),
            len(self._embeddings),
            tapped[0].data_ptr() if 0 in tapped else None,
            self._final_norm.data_ptr(),
            byref(self.project.struct),
            logits_indices.data_ptr(),
            num_logits,
            byref(self._scratch.room(num_tokens)),
            logits.data_ptr(),
        )
        if not is_done:
            raise IndexError(f"a token id, a position or an index of logits is out of range: {input_ids.tolist()}")
        return logits, tapped

    def _bind(self, cache: RaggedCache, tapped: Mapping[int, torch.Tensor]) -> None:
        """Tell each layer where its cache and its tap are; buffers change when the cache grows."""
        for index, (layer, ragged) in enumerate(zip(self._layers, cache.ragged_layers, strict=True)):
            layer.tap = tapped[index + 1].data_ptr() if index + 1 in tapped else None
            keys, values = buffers_of(ragged, self._shape)
            if keys is not self._bound[index]:
                self._bound[index] = keys
                layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
                layer.capacity = ragged.capacity
                layer.kind = cache.kinds.index(ragged.kind)
