"""Decoder layers of the Llama shape in fewer calls, on a CPU in bfloat16: the same bits, less time.

Query, key and value projection become one product, gate and up projection another, and the rotary embedding turns
queries and keys together. A small model's step is dozens of small operations a layer, and each costs as much to start
as to run. Only for models that specplug loaded itself, and only for layers whose results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import rms_norm

from specplug.models.attention import packed_attention
from specplug.models.packing import PackedLinear

__all__ = ["FusedLayer", "fuse_layers"]

_LAYER_CLASSES = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
_TOKENS_TRIED = (1, 7, 33)


class FusedLayer(torch.nn.Module):
    """A decoder layer for inference, called like the one it is made from, whose weights it copies."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.head_dim: int = attention.head_dim
        self.num_query_heads, self.num_kv_heads = (p.out_features // self.head_dim for p in projections[:2])
        self.scaling: float = attention.scaling
        self.layer_idx: int = attention.layer_idx
        self.is_causal: bool = attention.is_causal
        self.num_key_value_groups: int = attention.num_key_value_groups
        self.qkv_proj = _joined(*projections)
        self.o_proj = PackedLinear(attention.o_proj)
        self.gate_up_proj = _joined(mlp.gate_proj, mlp.up_proj)
        self.down_proj = PackedLinear(mlp.down_proj)
        self.act_fn = mlp.act_fn
        self.input_norm = _Norm(layer.input_layernorm)
        self.post_attention_norm = _Norm(layer.post_attention_layernorm)
        self.q_norm = _Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = _Norm(attention.k_norm) if hasattr(attention, "k_norm") else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        use_cache: bool | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``[batch, tokens, hidden]`` in and out. ``cache`` is what newer transformers call ``past_key_values``."""
        if position_embeddings is None:
            raise ValueError("a fused layer needs position_embeddings")
        query, key, value = self._attended(self.input_norm(hidden_states), *position_embeddings)
        cache = past_key_values if cache is None else cache
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attended, _ = packed_attention(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        hidden_states = hidden_states + self.o_proj(attended.reshape(*hidden_states.shape[:-1], -1))
        gate, up = self.gate_up_proj(self.post_attention_norm(hidden_states)).chunk(2, dim=-1)
        output: torch.Tensor = hidden_states + self.down_proj(self.act_fn(gate) * up)
        return output

    def _attended(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Query, key and value, each ``[batch, heads, tokens, head_dim]``; the first two turned by their position."""
        heads = self.qkv_proj(states).view(*states.shape[:-1], -1, self.head_dim)
        num_turned = self.num_query_heads + self.num_kv_heads
        turning = heads[..., :num_turned, :]
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = turning.split([self.num_query_heads, self.num_kv_heads], dim=-2)
            turning = torch.cat((self.q_norm(queries), self.k_norm(keys)), dim=-2)
        turned = _turn(turning, cos[..., None, :], sin[..., None, :]).transpose(1, 2)
        value = heads[..., num_turned:, :].transpose(1, 2)
        return turned[:, : self.num_query_heads], turned[:, self.num_query_heads :], value


class _Norm(torch.nn.Module):
    """An RMS norm in float32 and back, then the weight, as the models do it."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps: float = norm.variance_epsilon

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(states.float(), self.weight.shape, None, self.eps)
        output: torch.Tensor = self.weight * normed.to(states.dtype)
        return output


def _turn(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotary embedding in halves; the sign is taken first, since the models round in that order."""
    half = states.shape[-1] // 2
    swapped = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return (states * cos).add_(swapped.mul_(sin))


def _joined(*layers: torch.nn.Linear) -> PackedLinear:
    joined = torch.nn.Linear(1, 1, bias=False, device="meta")
    joined.in_features, joined.out_features = layers[0].in_features, sum(layer.out_features for layer in layers)
    joined.weight = torch.nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]), requires_grad=False)
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if biases:
        joined.bias = torch.nn.Parameter(torch.cat(biases), requires_grad=False)
    return PackedLinear(joined)


@torch.inference_mode()
def fuse_layers(model: Any) -> int:
    """Replace the decoder layers of ``model``, which is changed; returns how many were."""
    layers = getattr(model.get_decoder(), "layers", None)
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if layers is None or rotary is None or not all(_can_fuse(layer) for layer in layers):
        return 0
    if not all(_is_equal(layers[index], rotary) for index in {0, len(layers) - 1}):
        return 0
    for index, layer in enumerate(layers):
        layers[index] = FusedLayer(layer)
    return len(layers)


def _can_fuse(layer: Any) -> bool:
    if type(layer).__name__ not in _LAYER_CLASSES or not type(layer).__module__.startswith("transformers.models."):
        return False
    biases = [[p.bias is None for p in group] for group in _fused_groups(layer)]
    is_plain = all(type(m) is torch.nn.Linear and m.weight.dtype == torch.bfloat16 for m in _linears(layer))
    return is_plain and all(len(set(group)) == 1 for group in biases)


def _fused_groups(layer: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    attention, mlp = layer.self_attn, layer.mlp
    return (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)


def _linears(layer: Any) -> Iterator[Any]:
    for group in _fused_groups(layer):
        yield from group
    yield from (layer.self_attn.o_proj, layer.mlp.down_proj)


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
