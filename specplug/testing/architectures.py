"""Tiny random causal LMs of many architectures, and a driver that feeds a target ragged steps.

For tests of the host: which architectures it drives exactly, and which it refuses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from specplug.models.target import Target

__all__ = ["REFUSED_ARCHITECTURES", "SUPPORTED_ARCHITECTURES", "plain_logits", "ragged_logits", "tiny_model"]

VOCAB_SIZE = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

SUPPORTED_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {**_GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "layer_types": _MIXED},
    ),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 8}),
    "phi": ("PhiConfig", _GROUPED),
    "gpt_neox": ("GPTNeoXConfig", _COMMON),
    "gpt2": ("GPT2Config", {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256,
                            "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}),
}  # fmt: skip
"""Name -> config class of transformers and its arguments. Windows are 8 tokens; weights are large."""

REFUSED_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2Config",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
         "state_size": 8, "n_groups": 1},
    ),
    "jamba": (
        "JambaConfig",
        {**_GROUPED, "mamba_d_state": 8, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "lfm2": ("Lfm2Config", {**_GROUPED, "layer_types": ["conv", "full_attention", "conv"]}),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {**_COMMON, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 8},
    ),
    "rwkv": ("RwkvConfig", {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}),
    "bloom": ("BloomConfig", {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": (
        "FalconConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**_GROUPED, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "gemma2": ("Gemma2Config", {**_GROUPED, "head_dim": 16, "sliding_window": 8}),
    "llama4_text": (
        "Llama4TextConfig",
        {**_GROUPED, "head_dim": 16, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 8},
    ),
}  # fmt: skip
"""Model types that the host refuses: recurrent state, alibi, attention sinks, soft caps, chunked attention."""


def tiny_model(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A model of an architecture named above with random weights, in eval mode, fp32 on the CPU.

    ``overrides``: further arguments of its config.
    """
    import torch
    import transformers

    class_name, values = {**SUPPORTED_ARCHITECTURES, **REFUSED_ARCHITECTURES}[name]
    config = getattr(transformers, class_name)(**{**values, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def plain_logits(model: Any, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``[length, vocab]`` per sequence, each alone, without a cache."""
    import torch

    with torch.inference_mode():
        return [model(input_ids=sequence[None], use_cache=False).logits[0] for sequence in sequences]


def ragged_logits(
    target: Target,
    sequences: Sequence[torch.Tensor],
    *,
    seed: int = 0,
    chunks: Sequence[int] = (0, 1, 3, 7, 16),
    junk: Sequence[int] = (0, 0, 2),
    after_step: Callable[[], None] | None = None,
) -> list[torch.Tensor]:
    """``[length, vocab]`` per sequence, computed side by side in ragged steps.

    Each step appends to every row a number of tokens drawn from ``chunks``, and behind them a number drawn from
    ``junk`` of tokens from elsewhere in the sequence, which is rolled back at once, as a rejected draft is. ``target``
    must be empty.
    """
    import torch

    draw = random.Random(seed)
    for _ in sequences:
        target.acquire(None)  # type: ignore[arg-type]  # no target looks at the request
    done = [0] * len(sequences)
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(count < len(sequence) for count, sequence in zip(done, sequences, strict=True)):
        real = [min(draw.choice(chunks), len(s) - n) for s, n in zip(sequences, done, strict=True)]
        wrong = [min(draw.choice(junk), target.max_query_tokens - n) if n else 0 for n in real]
        if not any(real):
            continue
        pieces = [
            torch.cat([s[n : n + r], s[[draw.randrange(len(s)) for _ in range(w)]]])
            for s, n, r, w in zip(sequences, done, real, wrong, strict=True)
        ]
        counts = [len(piece) for piece in pieces]
        logits = target.forward(torch.cat(pieces), counts, torch.arange(sum(counts))).logits
        for row, part in enumerate(torch.split(logits, counts)):
            found[row].append(part[: real[row]].clone())
            done[row] += real[row]
            target.rollback(row, done[row])
        if after_step is not None:
            after_step()
    return [torch.cat(parts) for parts in found]
