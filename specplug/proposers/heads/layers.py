"""Decoder layers of heads, over packed tokens and a ragged cache: Llama's and Qwen3's, and what heads change in them.

Small modules of our own instead of transformers' layers, because heads change widths and norms, and because a draft
token must cost little more than its matrix products: projections of the same input are one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu

from specplug.errors import ModelError
from specplug.models.attention import packed_attention
from specplug.models.cache import RaggedCache
from specplug.models.step_plan import StepPlan

__all__ = ["Attention", "DecoderLayer", "Mlp", "Norm", "Norms", "RotaryTable", "Shape"]

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding that do not depend on how long the text has become."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and switches of a layer; ``input_size``: width of what is projected to queries, keys and values."""

    hidden_size: int
    input_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    attention_bias: bool = False
    mlp_bias: bool = False
    normalises_heads: bool = False
    """Qwen3: queries and keys are normalised per head."""

    @classmethod
    def of(cls, config: Any, *, input_size: int | None = None) -> Shape:
        """From a transformers ``LlamaConfig`` or ``Qwen3Config``. Raises ModelError for an activation but SiLU."""
        if config.hidden_act not in ("silu", "swish"):
            raise ModelError(f'hidden_act="{config.hidden_act}" of the head is not supported; heads use "silu"')
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            input_size=input_size or config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            norm_eps=config.rms_norm_eps,
            attention_bias=bool(getattr(config, "attention_bias", False)),
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            normalises_heads=config.model_type == "qwen3",
        )


class Norm(torch.nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., size]`` in and out."""
        return rms_norm(states, self.weight.shape, self.weight, self.eps)


class Norms(torch.nn.Module):
    """Root-mean-square norms of several tensors that are stacked, each with a weight of its own."""

    def __init__(self, num: int, size: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(num, size))
        self.eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., num, size]`` in and out."""
        return rms_norm(states, self.weight.shape[1:], None, self.eps) * self.weight


class RotaryTable(torch.nn.Module):
    """Cosines and sines of every position, computed once by transformers' own rotary embedding."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: Any, num_positions: int) -> None:
        """``config``: a transformers config. Raises ModelError for an embedding that depends on the length."""
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        super().__init__()
        kind = config.rope_parameters["rope_type"]
        if kind not in _ROPE_TYPES:
            raise ModelError(f'rope_type="{kind}" of the head is not supported; these are: {", ".join(_ROPE_TYPES)}')
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(num_positions)[None])
        self.register_buffer("cos", cos[0, :, None], persistent=False)
        self.register_buffer("sin", sin[0, :, None], persistent=False)

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T]`` to cosines and sines ``[T, 1, head_dim]``."""
        return self.cos[position_ids], self.sin[position_ids]


class Attention(torch.nn.Module):
    """Grouped-query attention; ``qkv``: queries, keys and values as one projection."""

    is_causal = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        num_all = shape.num_heads + 2 * shape.num_kv_heads
        self.shape = shape
        self.qkv = torch.nn.Linear(shape.input_size, num_all * shape.head_dim, bias=shape.attention_bias)
        self.o = torch.nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=shape.attention_bias)
        self.scaling = shape.head_dim**-0.5
        if shape.normalises_heads:
            self.q_norm = Norm(shape.head_dim, shape.norm_eps)
            self.k_norm = Norm(shape.head_dim, shape.norm_eps)

    def forward(
        self, states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], step: StepPlan, cache: Any
    ) -> torch.Tensor:
        """``states`` ``[T, input_size]`` to ``[T, hidden_size]``; ``cache``: this layer's, of a ``RaggedCache``."""
        shape, cos, sin = self.shape, *rotary
        heads = self.qkv(states).view(len(states), -1, shape.head_dim)
        turned = heads[:, : shape.num_heads + shape.num_kv_heads]
        if shape.normalises_heads:
            turned = torch.cat((self.q_norm(heads[:, : shape.num_heads]), self.k_norm(turned[:, shape.num_heads :])), 1)
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-second, first), -1) * sin
        queries, keys = turned[:, : shape.num_heads], turned[:, shape.num_heads :]
        values = heads[:, shape.num_heads + shape.num_kv_heads :]
        all_keys, all_values = cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
        attended, _ = packed_attention(
            self,
            queries.transpose(0, 1)[None],
            all_keys,
            all_values,
            None,
            scaling=self.scaling,
            specplug_step=step,
        )
        output: torch.Tensor = self.o(attended.reshape(len(states), -1))
        return output


class Mlp(torch.nn.Module):
    """SiLU-gated; ``gate_up``: both projections as one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = torch.nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=shape.mlp_bias)
        self.down = torch.nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """``[T, hidden_size]`` in and out."""
        gate, up = self.gate_up(states).chunk(2, dim=-1)
        output: torch.Tensor = self.down(silu(gate) * up)
        return output


class DecoderLayer(torch.nn.Module):
    """Attention and MLP with their norms, both added to the residual stream."""

    def __init__(self, shape: Shape, *, normalises_input: bool = True) -> None:
        """Without ``normalises_input`` the layer has no norm before its attention (the first of EAGLE's layers)."""
        super().__init__()
        self.input_norm = Norm(shape.hidden_size, shape.norm_eps) if normalises_input else torch.nn.Identity()
        self.attention = Attention(shape)
        self.mlp_norm = Norm(shape.hidden_size, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(
        self,
        states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        step: StepPlan,
        cache: RaggedCache,
        index: int,
    ) -> torch.Tensor:
        """``states`` ``[T, hidden_size]`` in and out; ``index``: the layer's place in ``cache``."""
        return self.finish(states, self.input_norm(states), rotary, step, cache, index)

    def finish(
        self,
        residual: torch.Tensor,
        states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        step: StepPlan,
        cache: RaggedCache,
        index: int,
    ) -> torch.Tensor:
        """The layer from its normalised ``states`` ``[T, input_size]`` on, added to ``residual``."""
        attended = residual + self.attention(states, rotary, step, cache.ragged_layers[index])
        output: torch.Tensor = attended + self.mlp(self.mlp_norm(attended))
        return output
