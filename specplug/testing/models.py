"""Tiny random transformers models and tokenizers: a host's real code paths in milliseconds, without downloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specplug.testing.toys import EOS_TOKEN_ID

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["tiny_llama", "toy_tokenizer"]


def tiny_llama(
    *, seed: int = 0, sliding_window: int | None = None, eos_token_id: int | None = EOS_TOKEN_ID, **overrides: Any
) -> PreTrainedModel:
    """A Llama-style model with random weights: 2 layers, hidden 32, 4 heads, 64 ids, 64 positions, fp32 on the CPU.

    ``sliding_window``: every layer sees that many last tokens only (Mistral's architecture, which is Llama's with a
    window). ``overrides``: other configuration values. The weights are larger than an untrained model's (standard
    deviation 0.2), so that texts vary; torch's random state is left as it was.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    values: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
    } | overrides
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any
        if sliding_window is None:
            model = LlamaForCausalLM(LlamaConfig(**values))
        else:
            model = MistralForCausalLM(MistralConfig(sliding_window=sliding_window, **values))
    tiny: PreTrainedModel = model.float().eval()
    return tiny


def toy_tokenizer(token_texts: Sequence[str], *, eos_token_id: int | None = EOS_TOKEN_ID) -> PreTrainedTokenizerBase:
    """A real Hugging Face tokenizer in which token i reads ``token_texts[i]``; encoding takes the longest text first.

    The texts must differ and must not be empty. ``eos_token_id`` beyond the last text: no end of sequence. Characters
    that no text begins with cannot be encoded.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if len(set(token_texts)) != len(token_texts) or "" in token_texts:
        raise ValueError("the token texts must differ from each other and must not be empty")
    tokenizer = Tokenizer(models.WordLevel({text: token_id for token_id, text in enumerate(token_texts)}))
    escaped = ["".join(f"\\x{{{ord(char):x}}}" for char in text) for text in sorted(token_texts, key=len, reverse=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(escaped)), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    has_eos = eos_token_id is not None and eos_token_id < len(token_texts)
    eos_token = token_texts[eos_token_id] if eos_token_id is not None and has_eos else None
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token)
