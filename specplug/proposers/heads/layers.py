"""Decoder layers of heads, over packed tokens and a ragged cache: Llama's and Qwen3's, and what heads change in them.

Small modules of our own instead of transformers' layers, because heads change widths and norms, and because a draft
token must cost little more than its matrix products: projections of the same input are one product, and once its
weights are final a module is *bound*: it looks its parts up once, since a module's call and its attributes cost as much
as a small operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import layer_norm, rms_norm, silu

from specplug.errors import ModelError
from specplug.models.attention import attend
from specplug.models.cache import RaggedLayer
from specplug.models.kernels import Kernels, LayerStep, Map
from specplug.models.llama import LlamaLayer
from specplug.models.rotary import RotaryTable
from specplug.models.step_plan import StepPlan

__all__ = ["DecoderLayer", "Map", "Norm", "Shape", "bound_linear", "root_mean_square_norm", "rotary_table"]


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


def root_mean_square_norm(weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None) -> Map:
    """``x / rms(x) * weight + bias`` over the last axis.

    On a CPU, where ``rms_norm`` is half a dozen operations, it is the first half of the layer norm of ``(x, -x)``,
    whose mean is 0.
    """
    size = weight.shape[-1]
    if weight.device.type != "cpu":
        if bias is None:
            return lambda states: rms_norm(states, (size,), weight, eps)
        return lambda states: rms_norm(states, (size,), weight, eps) + bias
    nothing = torch.zeros_like(weight)
    scales, shifts = torch.cat((weight, nothing)), None if bias is None else torch.cat((bias, nothing))

    def normalise(states: torch.Tensor) -> torch.Tensor:
        return layer_norm(torch.cat((states, -states), -1), (2 * size,), scales, shifts, eps)[..., :size]

    return normalise


class Norm(torch.nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = eps

    def bound(self, kernels: Kernels | None = None) -> Map:
        """``[..., size]`` in and out."""
        weight = self.weight.detach()
        compiled = None if kernels is None else kernels.norm(weight, self.eps)
        return compiled or root_mean_square_norm(weight, self.eps)


def bound_linear(linear: torch.nn.Linear, kernels: Kernels | None) -> Map:
    """``[..., in]`` to ``[..., out]``."""
    compiled = None if kernels is None else kernels.linear(linear.weight.detach(), linear.bias)
    return compiled or linear.forward


def rotary_table(config: Any, num_positions: int, *, dtype: torch.dtype, device: torch.device) -> RotaryTable:
    """By a transformers config. Raises ModelError for an embedding that depends on the length."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = config.rope_parameters["rope_type"]
    if kind not in RotaryTable.KINDS:
        kinds = ", ".join(RotaryTable.KINDS)
        raise ModelError(f'rope_type="{kind}" of the head is not supported; these are: {kinds}')
    return RotaryTable(LlamaRotaryEmbedding(config).to(device), num_positions, dtype=dtype, device=device)


def _split(linear: torch.nn.Linear, sizes: Sequence[int]) -> list[torch.nn.Linear]:
    """The layers that were joined in one, on its weights."""
    weights = torch.split(linear.weight.detach(), list(sizes))
    biases = [None] * len(sizes) if linear.bias is None else torch.split(linear.bias.detach(), list(sizes))
    parts = []
    for weight, bias in zip(weights, biases, strict=True):
        part = torch.nn.Linear(linear.in_features, len(weight), bias=bias is not None, device="meta")
        state = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        part.load_state_dict(state, assign=True)
        parts.append(part)
    return parts


class _Attention(torch.nn.Module):
    """Grouped-query attention; ``qkv``: queries, keys and values as one projection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        num_all = shape.num_heads + 2 * shape.num_kv_heads
        self.qkv = torch.nn.Linear(shape.input_size, num_all * shape.head_dim, bias=shape.attention_bias)
        self.o = torch.nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=shape.attention_bias)
        if shape.normalises_heads:
            self.q_norm = Norm(shape.head_dim, shape.norm_eps)
            self.k_norm = Norm(shape.head_dim, shape.norm_eps)


class _Mlp(torch.nn.Module):
    """SiLU-gated; ``gate_up``: both projections as one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = torch.nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=shape.mlp_bias)
        self.down = torch.nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)


class DecoderLayer(torch.nn.Module):
    """Attention and MLP with their norms, both added to the residual stream: :meth:`bind`, then call the methods."""

    def __init__(self, shape: Shape, *, normalises_input: bool = True) -> None:
        """Without ``normalises_input`` the layer has no norm before its attention (the first of EAGLE's layers)."""
        super().__init__()
        self.shape = shape
        self.input_norm = Norm(shape.hidden_size, shape.norm_eps) if normalises_input else None
        self.attention = _Attention(shape)
        self.mlp_norm = Norm(shape.hidden_size, shape.norm_eps)
        self.mlp = _Mlp(shape)

    def compiled(self, kernels: Kernels, rotary: RotaryTable) -> LayerStep | None:
        """The layer from its normalised input on as installed kernels run it; None if they do not."""
        shape, attention, mlp = self.shape, self.attention, self.mlp
        kv_size = shape.num_kv_heads * shape.head_dim
        query, key, value = _split(attention.qkv, [shape.num_heads * shape.head_dim, kv_size, kv_size])
        gate, up = _split(mlp.gate_up, [shape.intermediate_size] * 2)
        parts = LlamaLayer(
            query=query,
            key=key,
            value=value,
            output=attention.o,
            gate=gate,
            up=up,
            down=mlp.down,
            input_norm=None,
            mlp_norm=self.mlp_norm.weight.detach(),
            query_norm=attention.q_norm.weight.detach() if shape.normalises_heads else None,
            key_norm=attention.k_norm.weight.detach() if shape.normalises_heads else None,
        )
        sizes = {"head_dim": shape.head_dim, "scaling": shape.head_dim**-0.5, "norm_eps": shape.norm_eps}
        return kernels.layer(parts, rotary, **sizes)

    def bind(self, rotary: RotaryTable, kernels: Kernels | None = None, compiled: LayerStep | None = None) -> None:
        """Look everything up; again whenever a part was replaced. With ``compiled`` the plain weights are let go."""
        self._rotary = rotary
        self._input_norm = self.input_norm.bound(kernels) if self.input_norm is not None else None
        self.compiled_layer = compiled
        """By which it runs from its normalised input on; None: torch."""
        if compiled is not None:
            del self.attention, self.mlp
            return
        shape, attention, mlp = self.shape, self.attention, self.mlp
        self._num_queries, self._num_turned = shape.num_heads, shape.num_heads + shape.num_kv_heads
        self._head_dim = shape.head_dim
        self._scaling = shape.head_dim**-0.5
        self._qkv: Map = attention.qkv.forward
        self._o: Map = attention.o.forward
        self._gate_up: Map = mlp.gate_up.forward
        self._down: Map = mlp.down.forward
        self._mlp_norm = self.mlp_norm.bound()
        self._head_norms = (attention.q_norm.bound(), attention.k_norm.bound()) if shape.normalises_heads else None

    def step(self, states: torch.Tensor, step: StepPlan, cache: RaggedLayer) -> torch.Tensor:
        """Packed states ``[T, hidden_size]`` in and out; ``cache``: the layer's own."""
        normed = states if self._input_norm is None else self._input_norm(states)
        return self.finish(states, normed, step, cache)

    def finish(self, residual: torch.Tensor, states: torch.Tensor, step: StepPlan, cache: RaggedLayer) -> torch.Tensor:
        """The layer from its normalised ``states`` ``[T, input_size]`` on, added to ``residual``."""
        if self.compiled_layer is not None:
            return self.compiled_layer(residual, states, step, cache)
        heads = self._qkv(states).view(len(states), -1, self._head_dim)
        turned = self._rotary(step.position_ids)(self._normalised(heads[:, : self._num_turned]))
        keys, values = cache.append(step, turned[:, self._num_queries :], heads[:, self._num_turned :])
        attended = attend(step, cache.kind, turned[:, : self._num_queries], keys, values, self._scaling)
        states = self._o(attended.reshape(len(states), -1)).add_(residual)
        gate, up = self._gate_up(self._mlp_norm(states)).chunk(2, dim=-1)
        return self._down(silu(gate).mul_(up)).add_(states)

    def _normalised(self, heads: torch.Tensor) -> torch.Tensor:
        """Queries and keys ``[T, heads, head_dim]``, normalised where they are."""
        if self._head_norms is None:
            return heads
        parts = heads[:, : self._num_queries], heads[:, self._num_queries :]
        return torch.cat([norm(part) for norm, part in zip(self._head_norms, parts, strict=True)], 1)
