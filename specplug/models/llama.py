"""Causal LMs of the Llama shape, in the parts that a decoder of another package is built from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from specplug.models.rotary import RotaryTable

__all__ = ["LlamaLayer", "LlamaModel", "can_join", "is_llama_layer", "is_llama_model", "linears_of", "llama_parts"]

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_LAYER_CLASSES = frozenset(f"{family}DecoderLayer" for family in _FAMILIES)
_MODEL_CLASSES = frozenset(f"{family}ForCausalLM" for family in _FAMILIES)


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of a decoder layer; norms are root-mean-square norms.

    ``input_norm``: None for a layer of a head, whose input comes normalised.
    ``query_norm``, ``key_norm``: of every head, before its rotation (Qwen3), else None.
    """

    query: torch.nn.Linear
    key: torch.nn.Linear
    value: torch.nn.Linear
    output: torch.nn.Linear
    gate: torch.nn.Linear
    up: torch.nn.Linear
    down: torch.nn.Linear
    input_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LlamaModel:
    """A loaded model's parts. Layers come from :meth:`take_layers`, one by one, and leave the model."""

    embeddings: torch.Tensor
    """``[vocab, hidden_size]``."""
    head: torch.nn.Linear
    final_norm: torch.Tensor
    norm_eps: float
    activation: str
    """By its name in transformers, such as "silu"."""
    head_dim: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    scaling: float
    """What scores are multiplied with."""
    rotary: RotaryTable
    _layers: torch.nn.ModuleList

    @classmethod
    def of(cls, model: Any, num_positions: int) -> LlamaModel | None:
        """None for a model that is not of the Llama shape throughout. ``num_positions``: those of the rotary table."""
        if not is_llama_model(model):
            return None
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        rotary = decoder.rotary_emb
        if type(head) is not torch.nn.Linear or rotary.rope_type not in RotaryTable.KINDS:
            return None
        if not decoder.layers or not all(map(is_llama_layer, decoder.layers)):
            return None
        attention = decoder.layers[0].self_attn
        embeddings = decoder.embed_tokens.weight.detach()
        return cls(
            embeddings=embeddings,
            head=head,
            final_norm=decoder.norm.weight.detach(),
            norm_eps=float(decoder.norm.variance_epsilon),
            activation=model.config.hidden_act,
            head_dim=attention.head_dim,
            num_heads=attention.q_proj.out_features // attention.head_dim,
            num_kv_heads=attention.k_proj.out_features // attention.head_dim,
            intermediate_size=decoder.layers[0].mlp.gate_proj.out_features,
            scaling=attention.scaling,
            rotary=RotaryTable(rotary.forward, num_positions, dtype=embeddings.dtype, device=embeddings.device),
            _layers=decoder.layers,
        )

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._layers)

    def layers(self) -> Iterator[LlamaLayer]:
        """Each layer's parts."""
        return map(llama_parts, self._layers)

    def take_layers(self) -> Iterator[LlamaLayer]:
        """Each layer's parts, once: the model forgets them, so that one is freed before the next is copied."""
        for index in range(len(self._layers)):
            layer, self._layers[index] = self._layers[index], torch.nn.Identity()
            yield llama_parts(layer)


def is_llama_model(model: Any) -> bool:
    """Whether a causal LM embeds, runs its layers, normalises and projects, and does no more."""
    return _is_of(model, _MODEL_CLASSES) and type(model.get_input_embeddings()) is torch.nn.Embedding


def is_llama_layer(layer: Any) -> bool:
    """Whether a decoder layer is one of those, with plain linear layers."""
    is_known = _is_of(layer, _LAYER_CLASSES)
    return is_known and all(type(linear) is torch.nn.Linear for linear in linears_of(llama_parts(layer)))


def linears_of(layer: LlamaLayer) -> tuple[torch.nn.Linear, ...]:
    """All of a layer's."""
    return (layer.query, layer.key, layer.value, layer.output, layer.gate, layer.up, layer.down)


def can_join(layer: LlamaLayer) -> bool:
    """Whether the products of one input can be one product: they have biases throughout or none."""
    groups = ((layer.query, layer.key, layer.value), (layer.gate, layer.up))
    return all(len({linear.bias is None for linear in group}) == 1 for group in groups)


def _is_of(module: Any, classes: frozenset[str]) -> bool:
    return type(module).__name__ in classes and type(module).__module__.startswith("transformers.models.")


def llama_parts(layer: Any) -> LlamaLayer:
    """The parts of a decoder layer."""
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = hasattr(attention, "q_norm")
    return LlamaLayer(
        query=attention.q_proj,
        key=attention.k_proj,
        value=attention.v_proj,
        output=attention.o_proj,
        gate=mlp.gate_proj,
        up=mlp.up_proj,
        down=mlp.down_proj,
        input_norm=layer.input_layernorm.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        query_norm=attention.q_norm.weight.detach() if has_norms else None,
        key_norm=attention.k_norm.weight.detach() if has_norms else None,
    )
