"""From a checkpoint and a loaded target to a proposer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch

from specplug import ConfigError, DraftSpace, ModelError, PluginConfig, PluginContext
from specplug.models.loading import find_folder
from specplug.proposers.heads.features import final_norm
from specplug.proposers.heads.files import read_tensor
from specplug.proposers.heads.last_state import listed_ids
from specplug.proposers.heads.products import make_linears_fast, target_output
from specplug_medusa.checkpoint import SHARED_HEAD, TOKEN_MAP, Checkpoint
from specplug_medusa.heads import MedusaHeads
from specplug_medusa.options import MedusaOptions
from specplug_medusa.proposer import MedusaProposer

__all__ = ["build_proposer", "load_heads"]


def build_proposer(config: PluginConfig, context: PluginContext) -> MedusaProposer:
    """The proposer of a session. Raises ModelError or ConfigError where checkpoint, target and settings do not fit."""
    options = cast(MedusaOptions, config.options)
    target = context.target
    if target.model is None:
        raise ModelError(f'method "{config.name}" reads hidden states of a real model; the target is a toy')
    checkpoint = Checkpoint.read(find_folder(options.model, options.revision))
    num, limit = config.num_speculative_tokens, checkpoint.config.num_heads
    tree = options.tree(limit)
    if tree is not None:
        num_tokens = min(num, len(tree))
        num_heads = len(tree.widths(num_tokens))
    elif num > limit:
        raise ConfigError(
            f"num_speculative_tokens={num} exceeds the {limit} Medusa heads: each head drafts one token; use at most "
            f"{limit}, or more with medusa_tree"
        )
    else:
        num_tokens = num_heads = num
    with torch.inference_mode():
        heads, space = load_heads(checkpoint, target, num_heads)
    return MedusaProposer(
        heads,
        space,
        final_norm(target.model),
        layer=target.num_layers,
        device=target.device,
        max_num_tokens=num_tokens,
        name=config.name,
        kernels=getattr(target, "kernels", None),
        is_probabilistic=options.draft_sample_method == "probabilistic",
        tree=tree,
    )


def load_heads(checkpoint: Checkpoint, target: Any, num_heads: int) -> tuple[MedusaHeads, DraftSpace]:
    """The first heads in the target's dtype and on its device, and their vocabulary.

    Raises ModelError where they do not fit.
    """
    faults = list(_faults(checkpoint, target))
    if faults:
        raise ModelError(f'the Medusa heads in "{checkpoint.folder}" do not fit the target: {"; ".join(faults)}')
    config, tensors = checkpoint.config, checkpoint.tensors
    token_map = read_tensor(tensors[TOKEN_MAP]) if TOKEN_MAP in tensors else None
    uses_target = config.shares_output and SHARED_HEAD not in tensors and token_map is None
    num_rows = target.vocab_size if uses_target else config.draft_vocab_size
    space = listed_ids(token_map, num_rows, target.vocab_size, target.device)
    num_outputs = 0 if uses_target else 1 if config.shares_output else num_heads
    with torch.device("meta"):
        heads = MedusaHeads(config, num_heads, num_outputs)
    weights = {
        name: _parameter(checkpoint, target, name, num_heads, token_map).to(device=target.device, dtype=target.dtype)
        for name in heads.state_dict()
    }
    heads.load_state_dict(weights, assign=True)
    heads.requires_grad_(False).eval()
    make_linears_fast(heads, target)
    if uses_target:
        heads.target_output = target_output(target)
    return heads, space


def _parameter(
    checkpoint: Checkpoint, target: Any, name: str, num_heads: int, token_map: torch.Tensor | None
) -> torch.Tensor:
    """The parameter of :class:`MedusaHeads` that has this name."""
    tensors = checkpoint.tensors
    part, *numbers, kind = name.split(".")
    if part == "first":
        return torch.cat([read_tensor(tensors[f"blocks.{head}.layers.0.{kind}"]) for head in range(num_heads)])
    if part == "later":
        layer, head = numbers
        return read_tensor(tensors[f"blocks.{head}.layers.{int(layer) + 1}.{kind}"])
    stored = tensors.get(SHARED_HEAD if checkpoint.config.shares_output else f"lm_heads.{numbers[0]}.weight")
    rows = target.model.get_output_embeddings().weight if stored is None else read_tensor(stored)
    is_whole = token_map is not None and len(rows) > len(token_map)
    return rows[token_map.to(device=rows.device, dtype=torch.int64)] if is_whole and token_map is not None else rows


def _faults(checkpoint: Checkpoint, target: Any) -> Iterator[str]:
    config = checkpoint.config
    if config.hidden_size != target.hidden_size:
        yield f"they read states of width {config.hidden_size}, the target's are {target.hidden_size} wide"
