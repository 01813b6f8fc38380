"""Heads with random weights for tiny targets (``specplug.testing.tiny_llama``), named as their trainers name them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file

__all__ = [
    "LLAMA",
    "QWEN3",
    "Tensors",
    "eagle3_tensors",
    "eagle_tensors",
    "speculators_config",
    "write_head",
]

Tensors: TypeAlias = dict[str, torch.Tensor]

LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
}
"""Config of decoder layers for ``tiny_llama()``."""
QWEN3: Mapping[str, Any] = {**LLAMA, "model_type": "qwen3", "head_dim": 16}
"""The same with Qwen3's layers."""


def _random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    """Weights large enough that drafts differ from context to context; norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.1 + 1.0
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 0.3
        for name, shape in shapes.items()
    }


def _layer_shapes(body: Mapping[str, Any], *, width: int, has_input_norm: bool) -> dict[str, tuple[int, ...]]:
    hidden, inner = body["hidden_size"], body["intermediate_size"]
    dim = body.get("head_dim", hidden // body["num_attention_heads"])
    queries, keys = body["num_attention_heads"] * dim, body["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    }
    if has_input_norm:
        shapes["input_layernorm.weight"] = (hidden,)
    if body["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return shapes


def eagle_tensors(body: Mapping[str, Any] = LLAMA, *, num_layers: int = 1, seed: int = 0) -> Tensors:
    """An EAGLE head without embeddings and output head."""
    hidden = body["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    for index in range(num_layers):
        layer = _layer_shapes(body, width=hidden, has_input_norm=index > 0)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return _random_tensors(shapes, seed)


def eagle3_tensors(
    body: Mapping[str, Any] = LLAMA,
    *,
    num_layers: int = 1,
    target_hidden_size: int = 32,
    num_inputs: int = 3,
    draft_ids: tuple[int, ...] | None = None,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    is_parallel: bool = False,
    has_embeddings: bool = False,
    prefix: str = "layers.0.",
    seed: int = 0,
) -> Tensors:
    """An EAGLE-3 or P-EAGLE head. ``draft_ids``: the target ids that it drafts; None for all, which needs no table."""
    hidden, vocab_size = body["hidden_size"], body["vocab_size"]
    width = num_inputs * target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, width),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab_size if draft_ids is None else len(draft_ids), hidden),
        f"{prefix}hidden_norm.weight": (hidden,),
    }
    for index in range(num_layers):
        layer = _layer_shapes(body, width=2 * hidden if index == 0 else hidden, has_input_norm=True)
        shapes |= {f"{f'layers.{index}.' if index else prefix}{name}": shape for name, shape in layer.items()}
    if norm_before_fc:
        shapes["input_norm.weight"] = (width,)
    if fc_norm:
        shapes |= {f"fc_norm.{number}.weight": (target_hidden_size,) for number in range(num_inputs)}
    if is_parallel:
        shapes["mask_hidden"] = (1, 1, width)
    if has_embeddings:
        shapes["embed_tokens.weight"] = (vocab_size, hidden)
    tensors = _random_tensors(shapes, seed)
    if draft_ids is not None:
        table = torch.tensor(draft_ids)
        tensors["d2t"] = table - torch.arange(len(draft_ids))
        tensors["t2d"] = torch.isin(torch.arange(vocab_size), table)
    return tensors


def write_head(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """The checkpoint's folder, made where it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def speculators_config(kind: str = "eagle3", body: Mapping[str, Any] = LLAMA, **keys: Any) -> dict[str, Any]:
    """A config.json in the speculators format; ``keys`` replace or add top-level ones."""
    return {
        "speculators_model_type": kind,
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": dict(body),
        "draft_vocab_size": body["vocab_size"],
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
        **keys,
    }
