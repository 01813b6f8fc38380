"""Speculators with random weights in the published layout: for tests, and to try the method without a trained one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["SAMPLE_CONFIG", "sample_tensors", "write_sample"]

SAMPLE_CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": 32,
        "inner_dim": 24,
        "vocab_size": 64,
        "n_predict": 4,
        "n_candidates": 4,
        "top_k_tokens_per_head": [4, 3, 2, 2],
        "scale_input": True,
        "tie_weights": False,
    }
)
"""For ``specplug.testing.tiny_llama``."""


def sample_tensors(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights so large that drafts differ from context to context; norms near 1. Tied ones are there once."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    inner = config["inner_dim"] or config["emb_dim"]
    num_rows = config.get("truncated_vocab_size", config["vocab_size"])
    tensors = {}
    for stage in range(config["n_predict"]):
        width = inner if stage else config["emb_dim"]
        shapes = {"emb": (config["vocab_size"], inner), "proj": (inner, width), "head": (num_rows, inner)}
        is_tied = config["tie_weights"] and stage > 0
        for name, shape in shapes.items():
            if not is_tied or (name == "proj" and stage == 1):
                tensors[f"speculator.{name}.{stage}.weight"] = torch.randn(shape, generator=generator)
        if not is_tied:
            tensors[f"speculator.ln.{stage}.weight"] = 1 + 0.1 * torch.randn(inner, generator=generator)
            tensors[f"speculator.ln.{stage}.bias"] = 0.1 * torch.randn(inner, generator=generator)
    return tensors


def write_sample(
    folder: Path, tensors: Mapping[str, torch.Tensor] | None = None, *, seed: int = 0, **config: Any
) -> Path:
    """Write a checkpoint to ``folder``; ``config`` over ``SAMPLE_CONFIG``, where None leaves a key out."""
    from safetensors.torch import save_file

    settings = {key: value for key, value in {**SAMPLE_CONFIG, **config}.items() if value is not None}
    if tensors is None:
        tensors = sample_tensors({**SAMPLE_CONFIG, **settings}, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder
