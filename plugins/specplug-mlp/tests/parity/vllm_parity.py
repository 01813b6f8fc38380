"""Logits of vLLM's own MLP speculator modules with random weights, as goldens for the tests beside this folder.

    VLLM_PYTHON plugins/specplug-mlp/tests/parity/vllm_parity.py [FOLDER]

Runs where vLLM 0.32 is installed, on a CPU, without specplug. vLLM 0.32 keeps the speculator's modules and its weight
loader, and no longer the loop over them; the loop here calls these modules as its last version with one did.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "emb_dim": 32,
    "inner_dim": 16,
    "n_predict": 3,
    "top_k_tokens_per_head": [5, 4, 3],
}


def speculator(config: Any) -> Any:
    from vllm.model_executor.models.mlp_speculator import MLPSpeculator

    return MLPSpeculator(vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=config)))  # type: ignore[arg-type]


def random_weights(config: Any) -> dict[str, torch.Tensor]:
    """A checkpoint; tied tensors are repeated per stage, so that vLLM's loader finds each."""
    generator = torch.Generator().manual_seed(7)
    inner = config.inner_dim
    weights: dict[str, torch.Tensor] = {}
    for stage in range(config.n_predict):
        first = 1 if stage > 1 else 0
        shapes = {
            f"emb.{stage}.weight": (config.vocab_size, inner),
            f"proj.{stage}.weight": (inner, inner if stage else config.emb_dim),
            f"head.{stage}.weight": (config.vocab_size, inner),
            f"ln.{stage}.weight": (inner,),
            f"ln.{stage}.bias": (inner,),
        }
        for name, shape in shapes.items():
            weights[f"speculator.{name}"] = torch.randn(shape, generator=generator)
            source = name.replace(str(stage), str(first) if name.startswith("proj") else "0", 1)
            if config.tie_weights and stage > (1 if name.startswith("proj") else 0):
                weights[f"speculator.{name}"] = weights[f"speculator.{source}"].clone()
    return weights


def logits_of(module: Any, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """``[stages, n, vocab]`` from vLLM's modules, for tokens ``[stages, n]``."""
    if module.scale_input:
        states = module.ln0(states) / math.sqrt(2)
    logits = []
    for stage, ids in enumerate(token_ids):
        mixed = module.proj[stage](states).add(module.emb[stage](ids), alpha=module.emb_weight / module.state_weight)
        states = module.activation(module.ln[stage](mixed))
        logits.append(module.logits_processor(module.head[stage], states))
    return torch.stack(logits)


def write(folder: Path, *, is_tied: bool) -> None:
    from vllm.transformers_utils.configs.mlp_speculator import MLPSpeculatorConfig

    config = MLPSpeculatorConfig(**SIZES, tie_weights=is_tied, scale_input=is_tied)
    module, weights = speculator(config), random_weights(config)
    loaded = module.load_weights(weights.items())
    missing = {name for name, _ in module.named_parameters()} - loaded
    if missing:
        raise RuntimeError(f"vLLM's loader left {sorted(missing)} unset")
    for part in module.modules():
        if hasattr(part, "quant_method"):
            part.quant_method.process_weights_after_loading(part)
    generator = torch.Generator().manual_seed(8)
    states = torch.randn(5, config.emb_dim, generator=generator)
    token_ids = torch.randint(config.vocab_size, (config.n_predict, 5), generator=generator)
    with torch.no_grad():
        logits = logits_of(module.float(), states, token_ids)
    golden = {"states": states, "token_ids": token_ids, "logits": logits.contiguous()}
    golden |= {f"weights.{name}": value for name, value in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(golden, folder / f"{'tied' if is_tied else 'untied'}.safetensors")
    print(f"{'tied' if is_tied else 'untied'}: logits {list(logits.shape)}, largest {logits.abs().max():.3f}")  # noqa: T201


def main() -> None:
    os.environ.setdefault("VLLM_USE_V1", "1")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDENS
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29617", 0, "gloo")
        initialize_model_parallel(1, 1)
        for is_tied in (True, False):
            write(folder, is_tied=is_tied)


if __name__ == "__main__":
    main()
