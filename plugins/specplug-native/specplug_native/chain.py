"""A head that drafts several tokens in one call of the compiled library."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from typing import TYPE_CHECKING

import torch

from specplug.models.kernels import ChainParts
from specplug_native.layer import NativeLayer
from specplug_native.library import Chain, Library
from specplug_native.steps import NativeStep
from specplug_native.weights import NativeLinear, NativeNorm

if TYPE_CHECKING:
    from specplug.models.cache import RaggedLayer
    from specplug.models.step_plan import StepPlan

__all__ = ["NativeChain", "chain_of"]


def chain_of(parts: ChainParts, library: Library) -> NativeChain | None:
    """None for parts that other code runs, or whose norms do not share an epsilon."""
    norms = (parts.embedding_norm, parts.feature_norm, parts.output_norm)
    if not isinstance(parts.layer, NativeLayer) or not isinstance(parts.output, NativeLinear):
        return None
    own_norms = [norm for norm in norms if isinstance(norm, NativeNorm)]
    eps = parts.layer.shape.norm_eps
    if len(own_norms) < len(norms) or any(abs(norm.eps - eps) > 1e-3 * eps for norm in own_norms):
        return None
    return NativeChain(parts, parts.layer, own_norms, parts.output, library)


class NativeChain:
    """Implements :class:`specplug.models.kernels.Chain`."""

    def __init__(
        self,
        parts: ChainParts,
        layer: NativeLayer,
        norms: Sequence[NativeNorm],
        output: NativeLinear,
        library: Library,
    ) -> None:
        target_ids = parts.target_ids
        self._held = (parts, norms)
        self._layer, self._output, self._run = layer, output, library.chain
        self._struct = Chain(
            parts.embeddings.data_ptr(),
            len(parts.embeddings),
            *(norm.weight.data_ptr() for norm in norms),
            parts.adds_to_norm,
            parts.feeds_back_norm,
            output.struct,
            None if target_ids is None else target_ids.data_ptr(),
        )

    def __call__(
        self, token_ids: torch.Tensor, features: torch.Tensor, step: StepPlan, num_tokens: int, cache: RaggedLayer
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """``num_tokens`` more for each row that appends so many in ``step``."""
        if not step.sees_all_before(cache.kind):
            return None
        layer, num_rows = self._layer.bound(cache), len(token_ids)
        native = NativeStep(step, [cache.kind], self._layer.rotary, is_one_each=True)
        token_ids, features = token_ids.clone(), features.clone(memory_format=torch.contiguous_format)
        drafted = token_ids.new_empty(num_tokens, num_rows)
        probs = features.new_empty(num_tokens, num_rows, dtype=torch.float32)
        joined = features.new_empty(num_rows, 2 * features.shape[1])
        logits = features.new_empty(num_rows, self._output.struct.out_features)
        is_done = self._run(
            byref(self._layer.shape),
            byref(layer),
            byref(native.struct),
            native.struct.lengths,
            byref(self._struct),
            num_tokens,
            *(token_ids.data_ptr(), features.data_ptr()),
            byref(self._layer.scratch.room(num_rows)),
            *(joined.data_ptr(), logits.data_ptr(), drafted.data_ptr(), probs.data_ptr()),
        )
        if not is_done:
            raise IndexError(f"rows of {step.lengths} entries grow beyond the rotary table, or an id beyond the table")
        return drafted, probs
