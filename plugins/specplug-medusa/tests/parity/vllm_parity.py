"""Logits of vLLM's own Medusa module with random weights, as goldens for the tests beside this folder.

    VLLM_PYTHON plugins/specplug-medusa/tests/parity/vllm_parity.py [FOLDER]

Runs where vLLM 0.32 is installed, on a CPU, without specplug. vLLM loads each layout with its own loader.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
SIZES: dict[str, Any] = {"hidden_size": 32, "vocab_size": 64, "num_heads": 3}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"num_hidden_layers": 1},
    "deep": {"num_hidden_layers": 2, "medusa_fc_bias": True, "logit_scale": 0.5},
    "shared": {"num_hidden_layers": 1, "original_lm_head": True},
    "truncated": {"num_hidden_layers": 1, "original_lm_head": True, "truncated_vocab_size": 16},
    "original": {"num_hidden_layers": 1, "medusa_fc_bias": True},
}
"""``original`` has the names of the first release; the others have vLLM's. vLLM's loader takes a truncated vocabulary
with one output head for all only."""


def random_weights(kind: str, config: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    size, weights = config.hidden_size, {}
    for head in range(config.num_heads):
        for layer in range(config.num_hidden_layers):
            name = f"{head}.{layer}.linear" if kind == "original" else f"blocks.{head}.layers.{layer}"
            weights[f"{name}.weight"] = torch.randn(size, size, generator=generator)
            if getattr(config, "medusa_fc_bias", False):
                weights[f"{name}.bias"] = torch.randn(size, generator=generator)
    for head in range(1 if "original_lm_head" in KINDS[kind] else config.num_heads):
        name = f"{head}.{config.num_hidden_layers}" if kind == "original" else f"lm_heads.{head}"
        weights[f"{name}.weight"] = torch.randn(config.vocab_size, size, generator=generator)
    if kind == "truncated":
        weights["token_map"] = torch.randperm(config.vocab_size, generator=generator)[: config.truncated_vocab_size]
    return weights


def write(kind: str, folder: Path) -> None:
    from vllm.model_executor.models.medusa import Medusa
    from vllm.transformers_utils.configs.medusa import MedusaConfig

    config = MedusaConfig(**SIZES, **KINDS[kind])
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    module: Any = Medusa(vllm_config=SimpleNamespace(speculative_config=draft))  # type: ignore[arg-type]
    weights = random_weights(kind, config)
    missing = {name for name, _ in module.named_parameters()} - module.load_weights(weights.items()) - {"token_map"}
    if missing:
        raise RuntimeError(f"vLLM's loader left {sorted(missing)} unset")
    for part in [module, *module.modules(), *module.lm_heads]:
        if hasattr(part, "quant_method"):
            part.quant_method.process_weights_after_loading(part)
    states = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = torch.stack(module.float().compute_logits(module(states)))
    golden = {f"weights.{name}": value for name, value in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**golden, "states": states, "logits": logits.contiguous()}, folder / f"{kind}.safetensors")
    print(f"{kind}: logits {list(logits.shape)}, largest {logits.abs().max():.3f}")  # noqa: T201


def main() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDENS
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29618", 0, "gloo")
        initialize_model_parallel(1, 1)
        for kind in KINDS:
            write(kind, folder)


if __name__ == "__main__":
    main()
