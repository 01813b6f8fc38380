"""Medusa heads with random weights in either published layout: for tests, and to try the method without training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["ORIGINAL_CONFIG", "SAMPLE_CONFIG", "original_names", "sample_tensors", "write_sample"]

SAMPLE_CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 32,
        "vocab_size": 64,
        "num_heads": 4,
        "num_hidden_layers": 1,
    }
)
"""vLLM's layout, for ``specplug.testing.tiny_llama``."""
ORIGINAL_CONFIG: Mapping[str, Any] = MappingProxyType(
    {"medusa_num_heads": 4, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}
)
"""The layout of the original heads, whose config says less."""


def sample_tensors(
    config: Mapping[str, Any], *, has_bias: bool = False, num_outputs: int | None = None, seed: int = 0
) -> dict[str, torch.Tensor]:
    """vLLM's names. Weights so large that drafts differ from context to context. ``num_outputs``: output heads there
    are, one per head by default."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    size, num_heads = config["hidden_size"], config["num_heads"]
    tensors = {}
    for head in range(num_heads):
        for layer in range(config["num_hidden_layers"]):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = torch.randn(size, size, generator=generator)
            if has_bias:
                tensors[f"blocks.{head}.layers.{layer}.bias"] = torch.randn(size, generator=generator)
    num_rows = config.get("truncated_vocab_size", config["vocab_size"])
    for head in range(num_heads if num_outputs is None else num_outputs):
        tensors[f"lm_heads.{head}.weight"] = torch.randn(num_rows, size, generator=generator)
    return tensors


def original_names(tensors: Mapping[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """The same tensors under the names of the original layout."""
    renamed = {}
    for name, tensor in tensors.items():
        part, head, *rest = name.split(".")
        if part == "blocks":
            renamed[f"{head}.{rest[1]}.linear.{rest[2]}"] = tensor
        else:
            renamed[f"{head}.{num_layers}.weight"] = tensor
    return renamed


def write_sample(
    folder: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    seed: int = 0,
    base: Mapping[str, Any] = SAMPLE_CONFIG,
    **config: Any,
) -> Path:
    """Write a checkpoint to ``folder``; ``config`` over ``base``, where None leaves a key out."""
    from safetensors.torch import save_file

    settings = {key: value for key, value in {**base, **config}.items() if value is not None}
    if tensors is None:
        tensors = sample_tensors({**SAMPLE_CONFIG, **settings}, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(dict(tensors), folder / "medusa_lm_head.safetensors")
    return folder
