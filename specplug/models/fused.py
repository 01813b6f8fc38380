"""Models of the Llama shape in fewer calls, on a CPU in bfloat16: the same bits, less time.

A small model's step is dozens of small operations a layer, and each costs as much to start as to run. So query, key
and value projection become one product, gate and up projection another, the rotary embedding turns queries and keys
together, and a step goes from the token ids to the logits without a module's call in between. Only for models that
specplug loaded itself, and only where the layers' results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import embedding, rms_norm

from specplug.models.attention import attend, packed_attention
from specplug.models.kernels import Map
from specplug.models.llama import can_join, is_llama_layer, is_llama_model, linears_of, llama_parts
from specplug.models.packing import PackedLinear
from specplug.models.rotary import Embeddings, RotaryTable, Turn

if TYPE_CHECKING:
    from specplug.models.cache import RaggedCache, RaggedLayer
    from specplug.models.step_plan import StepPlan

__all__ = ["FusedDecoder", "FusedLayer", "fuse_layers"]

_TOKENS_TRIED = (1, 7, 33)


class FusedDecoder:
    """The packed forward of a model whose layers are all :class:`FusedLayer`."""

    kernels = None

    def __init__(self, model: Any, num_positions: int) -> None:
        """``num_positions``: positions that steps may hold."""
        decoder = model.get_decoder()
        self._embeddings: torch.Tensor = decoder.embed_tokens.weight
        self._turn_at = _rotary(decoder.rotary_emb, num_positions, self._embeddings)
        self._layers: Sequence[FusedLayer] = tuple(decoder.layers)
        self._norm = _norm(decoder.norm)
        self.project: Map = model.get_output_embeddings().forward

    @classmethod
    def of(cls, model: Any, num_positions: int) -> FusedDecoder | None:
        """None for a model that was not fused, or that does more around its layers than embed, norm and project."""
        if not is_llama_model(model) or not all(type(layer) is FusedLayer for layer in model.get_decoder().layers):
            return None
        return cls(model, num_positions)

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
        states = embedding(input_ids, self._embeddings)
        turn = self._turn_at(step.position_ids)
        tapped = {0: states} if 0 in taps else {}
        for number, (layer, layer_cache) in enumerate(zip(self._layers, cache.ragged_layers, strict=True), start=1):
            states = layer.step(states, turn, step, layer_cache)
            if number in taps:
                tapped[number] = states
        return self.project(self._norm(states[logits_indices])), tapped


class FusedLayer(torch.nn.Module):
    """A decoder layer for inference, called like the one it is made from, whose weights it copies.

    Its parts are no modules: a module's call and its attributes cost as much as a small operation.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.head_dim: int = attention.head_dim
        self.num_query_heads, self.num_kv_heads = (p.out_features // self.head_dim for p in projections[:2])
        self.num_turned = self.num_query_heads + self.num_kv_heads
        self.scaling: float = attention.scaling
        self.layer_idx: int = attention.layer_idx
        self.is_causal: bool = attention.is_causal
        self.num_key_value_groups: int = attention.num_key_value_groups
        self._project = _product(*projections)
        self._gate_up = _product(mlp.gate_proj, mlp.up_proj)
        self._down = _product(mlp.down_proj)
        self._output = _product(attention.o_proj)
        self._act_fn: Map = getattr(mlp.act_fn, "forward", mlp.act_fn)
        self._input_norm = _norm(layer.input_layernorm)
        self._mlp_norm = _norm(layer.post_attention_layernorm)
        self._head_norms = (_norm(attention.q_norm), _norm(attention.k_norm)) if hasattr(attention, "q_norm") else None

    def step(self, states: torch.Tensor, turn: Turn, step: StepPlan, cache: RaggedLayer) -> torch.Tensor:
        """Packed states ``[T, hidden]`` in and out, attending over ``cache``, which takes what they add."""
        turned, values = self._heads(self._input_norm(states), turn)
        queries, keys = self._queries_and_keys(turned)
        all_keys, all_values = cache.append(step, keys, values)
        attended = attend(step, cache.kind, queries, all_keys, all_values, self.scaling)
        return self._finish(states, attended.reshape(len(states), -1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        use_cache: bool | None = None,
        position_embeddings: Embeddings | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``[batch, tokens, hidden]`` in and out. ``cache`` is what newer transformers call ``past_key_values``."""
        if position_embeddings is None:
            raise ValueError("a fused layer needs position_embeddings")
        turned, values = self._heads(self._input_norm(hidden_states), Turn.of(position_embeddings))
        query, key = (part.transpose(1, 2) for part in self._queries_and_keys(turned))
        value = values.transpose(1, 2)
        cache = past_key_values if cache is None else cache
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attended, _ = packed_attention(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self._finish(hidden_states, attended.reshape(*hidden_states.shape[:-1], -1))

    def _heads(self, states: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys in one, turned by their position, and values: ``[..., tokens, heads, head_dim]``."""
        heads = self._project(states).view(*states.shape[:-1], -1, self.head_dim)
        turning = heads[..., : self.num_turned, :]
        if self._head_norms is not None:
            parts = zip(self._head_norms, self._queries_and_keys(turning), strict=True)
            turning = torch.cat([normalise(part) for normalise, part in parts], dim=-2)
        return turn(turning), heads[..., self.num_turned :, :]

    def _queries_and_keys(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return heads[..., : self.num_query_heads, :], heads[..., self.num_query_heads :, :]

    def _finish(self, states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """From the attention's output on; what is added to is fresh each time."""
        states = self._output(attended).add_(states)
        gate, up = self._gate_up(self._mlp_norm(states)).chunk(2, dim=-1)
        return self._down(self._act_fn(gate).mul_(up)).add_(states)


def _rotary(rotary: Any, num_positions: int, like: torch.Tensor) -> Callable[[torch.Tensor], Turn]:
    """From positions ``[1, tokens]`` to their turn; by a table, unless the embedding changes with a text's length."""
    if getattr(rotary, "rope_type", None) in RotaryTable.KINDS:
        return RotaryTable(rotary.forward, num_positions, dtype=like.dtype, device=like.device)

    def turn_at(position_ids: torch.Tensor) -> Turn:
        cos, sin = rotary.forward(like[:1], position_ids)
        return Turn.of((cos[0], sin[0]))

    return turn_at


def _product(*layers: torch.nn.Linear) -> Map:
    """The linear layers as one, ``[..., in_features]`` to ``[..., out_features of all]``."""
    packed = PackedLinear(layers[0] if len(layers) == 1 else _joined(*layers))
    return packed.forward


def _norm(norm: Any) -> Map:
    """An RMS norm in float32 and back, then the weight, as the models do it."""
    weight, eps = norm.weight.detach(), float(norm.variance_epsilon)
    shape = weight.shape

    def normalise(states: torch.Tensor) -> torch.Tensor:
        return rms_norm(states.float(), shape, None, eps).to(states.dtype).mul_(weight)

    return normalise


def _joined(*layers: torch.nn.Linear) -> torch.nn.Linear:
    joined = torch.nn.Linear(1, 1, bias=False, device="meta")
    joined.in_features, joined.out_features = layers[0].in_features, sum(layer.out_features for layer in layers)
    joined.weight = torch.nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]), requires_grad=False)
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if biases:
        joined.bias = torch.nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined


@torch.inference_mode()
def fuse_layers(model: Any) -> int:
    """Replace the decoder layers of ``model``, which is changed; returns how many were."""
    layers = getattr(model.get_decoder(), "layers", None)
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if layers is None or rotary is None or not all(_can_fuse(layer) for layer in layers):
        return 0
    if not all(_acts_alike(layers[index]) and _is_equal(layers[index], rotary) for index in {0, len(layers) - 1}):
        return 0
    for index, layer in enumerate(layers):
        layers[index] = FusedLayer(layer)
    return len(layers)


def _can_fuse(layer: Any) -> bool:
    """In bfloat16, and a fused group has biases throughout or none."""
    if not is_llama_layer(layer):
        return False
    parts = llama_parts(layer)
    return can_join(parts) and all(linear.weight.dtype == torch.bfloat16 for linear in linears_of(parts))


def _acts_alike(layer: Any) -> bool:
    """Whether the activation has the same bits in a strided view: what takes values one by one may round otherwise."""
    values = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    strided = torch.stack((values, values), dim=-1)[:, 0]
    return torch.equal(layer.mlp.act_fn(values), layer.mlp.act_fn(strided))


def _is_equal(layer: Any, rotary: Any) -> bool:
    fused = FusedLayer(layer)
    generator = torch.Generator().manual_seed(0)
    hidden_size = layer.self_attn.o_proj.out_features
    for num_tokens in _TOKENS_TRIED:
        states = torch.randn(1, num_tokens, hidden_size, generator=generator).to(torch.bfloat16)
        positions = torch.arange(num_tokens)[None] + 100
        embeddings = rotary(states, positions)
        expected = layer(states, position_embeddings=embeddings, position_ids=positions)
        if isinstance(expected, tuple) or not torch.equal(expected, fused(states, position_embeddings=embeddings)):
            return False
    return True
