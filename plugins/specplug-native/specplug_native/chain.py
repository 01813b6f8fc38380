"""A head that drafts several tokens in one call of the compiled library."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof, pointer
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from specplug.models.kernels import ChainParts
from specplug_native.layer import NativeLayer
from specplug_native.library import Chain, Kind, Library, Linear, Step
from specplug_native.weights import NativeLinear, NativeNorm, readable

if TYPE_CHECKING:
    from specplug.models.cache import RaggedLayer
    from specplug.models.step_plan import StepPlan

__all__ = ["NativeChain", "chain_of"]


def chain_of(parts: ChainParts, library: Library) -> NativeChain | None:
    """None for parts that other code runs, whose norms do not share an epsilon, or that draft what they cannot read."""
    norms = (parts.embedding_norm, parts.feature_norm, parts.output_norm)
    if not isinstance(parts.layer, NativeLayer) or not isinstance(parts.output, NativeLinear):
        return None
    own_norms = [norm for norm in norms if isinstance(norm, NativeNorm)]
    eps = parts.layer.shape.norm_eps
    if len(own_norms) < len(norms) or any(abs(norm.eps - eps) > 1e-3 * eps for norm in own_norms):
        return None
    num_ids = parts.output.struct.out_features if parts.target_ids is None else int(parts.target_ids.max()) + 1
    if num_ids > len(parts.embeddings):
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
        target_ids, rotary = parts.target_ids, layer.rotary
        fc = parts.features if isinstance(parts.features, NativeLinear) else None
        self._held = (parts, norms)
        self._features = parts.features if fc is None else None
        self._width = layer.shape.hidden_size if fc is None else fc.struct.in_features
        self._layer, self._run = layer, library.chain
        self._kind = Kind()
        self._step = Step(
            cos=rotary.cos.data_ptr(),
            sin=rotary.signed_sin.data_ptr(),
            num_positions=len(rotary.cos),
            kinds=pointer(self._kind),
        )
        self._struct = Chain(
            Linear() if fc is None else fc.struct,
            parts.embeddings.data_ptr(),
            len(parts.embeddings),
            *(norm.weight.data_ptr() for norm in norms),
            parts.adds_to_norm,
            parts.feeds_back_norm,
            output.struct,
            None if target_ids is None else target_ids.data_ptr(),
        )
        self._addresses = addressof(layer.shape), addressof(self._step), addressof(self._struct)

    def __call__(
        self,
        token_ids: Sequence[int],
        states: torch.Tensor,
        num_read: Sequence[int],
        num_tokens: int,
        step: StepPlan,
        cache: RaggedLayer,
        drafted: torch.Tensor,
        probs: torch.Tensor,
    ) -> None:
        """See the protocol. What a call needs is kept, not made: after a target's forward all code and all objects
        have left the processor's caches, and each one touched costs more than it computes."""
        states = readable(states if self._features is None else self._features(states), self._width)
        ids, starts = array("q", token_ids), array("q", accumulate(num_read, initial=0))
        if not len(ids) == len(states) == starts[-1]:
            raise ValueError(f"{len(ids)} ids and {len(states)} states for {starts[-1]} tokens")
        lengths, native = array("q", step.lengths), self._step
        self._kind.size = cache.kind.size
        native.rows, native.threads = len(lengths), torch.get_num_threads()
        native.starts, native.lengths = starts.buffer_info()[0], lengths.buffer_info()[0]
        shape, step_address, chain = self._addresses
        is_done = self._run(
            shape,
            addressof(self._layer.bound(cache)),
            step_address,
            chain,
            num_tokens,
            ids.buffer_info()[0],
            states.data_ptr(),
            addressof(self._layer.scratch.room(len(ids))),
            drafted.data_ptr(),
            probs.data_ptr(),
        )
        if not is_done:
            raise IndexError(f"rows of {step.lengths} entries grow beyond the rotary table, or an id beyond the table")
