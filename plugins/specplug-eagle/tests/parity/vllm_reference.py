"""EAGLE's head as vLLM's own module computes it, to compare ours with.

``python vllm_reference.py FOLDER`` writes a tiny checkpoint and, beside it, texts with states and what vLLM's module
drafts after each. Attention alone is plain softmax attention here, since vLLM's needs its engine's paged cache.
Needs ``vllm`` 0.32 with its CPU build; nothing of specplug is used here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

NUM_DRAFT_TOKENS = 4
VOCAB_SIZE = 40
HIDDEN_SIZE = 16
TEXT_LENGTHS = (2, 5, 9)
BODY = {
    "model_type": "llama",
    "architectures": ["EagleLlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Random weights under the names of published EAGLE checkpoints, with embeddings and output head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BODY, indent=2))
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, queries, keys = HIDDEN_SIZE, 24, 32, 16
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB_SIZE, hidden),
        "lm_head.weight": (VOCAB_SIZE, hidden),
        "fc.weight": (hidden, 2 * hidden),
    }
    for index in range(2):
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "post_attention_layernorm": (hidden,),
        }
        if index:
            layer["input_layernorm"] = (hidden,)
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) == 1 else 0.2) + float(len(shape) == 1)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


class PlainAttention(torch.nn.Module):
    """Causal softmax attention of one text, with the constructor and the call of vLLM's ``Attention``."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, **settings: Any) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size, self.scale = num_heads, num_kv_heads, head_size, scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """All ``[T, heads * head_size]``."""
        queries = query.view(len(query), self.num_heads, self.head_size)
        groups = self.num_heads // self.num_kv_heads
        keys, values = (
            each.view(len(query), self.num_kv_heads, self.head_size).repeat_interleave(groups, 1)
            for each in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.scale
        future = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).reshape(len(query), -1)


@contextmanager
def vllm_module(folder: Path) -> Iterator[Any]:
    """``EagleLlamaForCausalLM`` with the folder's weights, for one process without an engine."""
    from transformers import LlamaConfig
    from vllm.config import CompilationConfig, CompilationMode, DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM

    body = LlamaConfig(**{key: value for key, value in BODY.items() if key not in ("model_type", "torch_dtype")})
    no_compiling = CompilationConfig(mode=CompilationMode.NONE)
    config = VllmConfig(device_config=DeviceConfig("cpu"), compilation_config=no_compiling)
    plain = mock.patch("vllm.model_executor.models.llama.Attention", PlainAttention)
    with set_current_vllm_config(config, check_compile=False), plain, torch.inference_mode():
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29655", 0, "gloo")
        initialize_model_parallel(1, 1)
        try:
            module = EagleLlamaForCausalLM(vllm_config=_StandIn(config, body)).float().eval()
            stored = load_file(folder / "model.safetensors")
            module.load_weights((name, each) for name, each in stored.items() if name != "lm_head.weight")
            for part in module.modules():  # what vLLM's loader does last
                if (method := getattr(part, "quant_method", None)) is not None:
                    method.process_weights_after_loading(part)
            yield partial(_run, module, stored["lm_head.weight"])
        finally:
            cleanup_dist_env_and_memory()


def _run(
    module: Any, output: torch.Tensor, token_ids: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's outputs ``[T, hidden]``, and their logits by the output head, which in vLLM is the target's."""
    outputs, _ = module(token_ids, torch.arange(len(token_ids)), states)
    return outputs, outputs @ output.T


class _StandIn:
    """A ``VllmConfig`` whose model configs, which would read checkpoints, are just what the module asks for."""

    def __init__(self, config: Any, body: Any) -> None:
        self._config = config
        self.model_config = _Model(body)
        self.speculative_config = _Speculative(_Model(body))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _Model:
    dtype = torch.float32
    quantization = None
    is_attention_free = False
    use_mla = False

    def __init__(self, body: Any) -> None:
        self.hf_config = self.hf_text_config = body

    def get_num_layers(self, parallel_config: Any) -> int:
        return 4


class _Speculative:
    quantization = None
    parallel_drafting = False

    def __init__(self, draft: _Model) -> None:
        self.draft_model_config = draft


def draft(module: Any, token_ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[K]`` and raw logits ``[K, vocab]`` after a text ``[n + 1]`` whose states ``[n, hidden]`` are given."""
    ids, features = token_ids[1:], states
    rows = []
    for _ in range(NUM_DRAFT_TOKENS):
        outputs, logits = module(ids, features)
        rows.append(logits[-1])
        ids = torch.cat((ids, rows[-1].argmax(-1, keepdim=True)))
        features = torch.cat((features, outputs[-1:]))
    drafted = torch.stack(rows)
    return drafted.argmax(-1), drafted


def write(folder: Path, seed: int = 0) -> Path:
    """A checkpoint, and beside it texts, states, drafts and logits by name and number."""
    target = write_checkpoint(folder / "eagle", seed)
    generator = torch.Generator().manual_seed(seed)
    cases: dict[str, torch.Tensor] = {}
    with vllm_module(target) as module:
        for number, length in enumerate(TEXT_LENGTHS):
            token_ids = torch.randint(VOCAB_SIZE, (length,), generator=generator)
            states = torch.randn(length - 1, HIDDEN_SIZE, generator=generator)
            draft_ids, logits = draft(module, token_ids, states)
            case = {"token_ids": token_ids, "states": states, "draft_ids": draft_ids, "logits": logits}
            cases |= {f"{name}.{number}": each.clone().contiguous() for name, each in case.items()}
    save_file(cases, folder / "eagle.safetensors")
    return target


if __name__ == "__main__":
    sys.stdout.write(f"{write(Path(sys.argv[1]))}\n")
