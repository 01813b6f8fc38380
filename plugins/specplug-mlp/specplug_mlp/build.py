"""From a checkpoint and a loaded target to a proposer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch

from specplug import ConfigError, DraftSpace, ModelError, PluginConfig, PluginContext
from specplug.draft_space import num_token_ids
from specplug.models.loading import find_folder
from specplug.proposers.heads.features import final_norm
from specplug.proposers.heads.files import read_tensor
from specplug.proposers.heads.last_state import listed_ids
from specplug.proposers.heads.products import make_linears_fast
from specplug_mlp.checkpoint import TOKEN_MAP, Checkpoint
from specplug_mlp.head import MlpHead
from specplug_mlp.options import MlpSpeculatorOptions
from specplug_mlp.proposer import MlpProposer

__all__ = ["build_proposer", "load_head"]


def build_proposer(config: PluginConfig, context: PluginContext) -> MlpProposer:
    """The proposer of a session. Raises ModelError or ConfigError where checkpoint, target and settings do not fit."""
    options = cast(MlpSpeculatorOptions, config.options)
    target = context.target
    if target.model is None:
        raise ModelError(f'method "{config.name}" reads hidden states of a real model; the target is a toy')
    checkpoint = Checkpoint.read(find_folder(options.model, options.revision))
    num, limit = config.num_speculative_tokens, checkpoint.config.n_predict
    if num > limit:
        raise ConfigError(
            f"num_speculative_tokens={num} exceeds the speculator's {limit}: each stage drafts one token; use at most "
            f"{limit}"
        )
    with torch.inference_mode():
        head, space = load_head(checkpoint, target)
    return MlpProposer(
        head,
        space,
        final_norm(target.model),
        layer=target.num_layers,
        device=target.device,
        max_num_tokens=limit,
        name=config.name,
        kernels=getattr(target, "kernels", None),
        is_probabilistic=options.draft_sample_method == "probabilistic",
    )


def load_head(checkpoint: Checkpoint, target: Any) -> tuple[MlpHead, DraftSpace]:
    """The head in the target's dtype and on its device, and its vocabulary. Raises ModelError where they do not fit."""
    faults = list(_faults(checkpoint, target))
    if faults:
        raise ModelError(f'the MLP speculator in "{checkpoint.folder}" does not fit the target: {"; ".join(faults)}')
    tensors = checkpoint.tensors
    with torch.device("meta"):
        head = MlpHead(checkpoint.config)
    weights = {
        name: read_tensor(tensors[name]).to(device=target.device, dtype=target.dtype) for name in head.state_dict()
    }
    head.load_state_dict(weights, assign=True)
    head.requires_grad_(False).eval()
    make_linears_fast(head, target)
    head.bind(getattr(target, "kernels", None))
    token_map = read_tensor(tensors[TOKEN_MAP]) if TOKEN_MAP in tensors else None
    return head, listed_ids(token_map, checkpoint.config.draft_vocab_size, target.vocab_size, target.device)


def _faults(checkpoint: Checkpoint, target: Any) -> Iterator[str]:
    config = checkpoint.config
    if config.emb_dim != target.hidden_size:
        yield f"it reads states of width {config.emb_dim} (emb_dim), the target's are {target.hidden_size} wide"
    num_ids = target.vocab_size
    if target.tokenizer is not None:
        num_ids = min(num_ids, num_token_ids(target.tokenizer))
    if config.vocab_size < num_ids:
        yield f"it knows {config.vocab_size} token ids, the target has {num_ids}"
