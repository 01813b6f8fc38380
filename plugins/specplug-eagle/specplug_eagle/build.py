"""From a checkpoint and a loaded target to a proposer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch.nn.functional import embedding
from transformers import CONFIG_MAPPING

from specplug import PluginConfig, PluginContext
from specplug.draft_space import DraftSpace, IdentityDraftSpace, num_token_ids
from specplug.errors import ModelError
from specplug.models.loading import find_folder
from specplug.models.packing import can_pack, pack_linears
from specplug.proposers.heads.features import final_norm
from specplug.proposers.heads.files import read_tensor
from specplug.proposers.heads.layers import bound_linear, rotary_table
from specplug.proposers.heads.products import target_output
from specplug.proposers.heads.proposer import HeadProposer
from specplug.proposers.heads.reader import READ_AHEAD, HeadReader
from specplug.proposers.heads.tree import TreeHeadProposer
from specplug.proposers.heads.vocabulary import ReducedVocabulary, output_space
from specplug_eagle.checkpoint import Checkpoint, HeadConfig
from specplug_eagle.heads import Eagle3Head, EagleHead
from specplug_eagle.options import EagleOptions

__all__ = ["build_proposer", "load_head"]


def build_proposer(config: PluginConfig, context: PluginContext) -> HeadProposer:
    """The proposer of a session. Raises ModelError where checkpoint and target do not fit each other."""
    options = cast(EagleOptions, config.options)
    target = context.target
    if target.model is None:
        raise ModelError(f'method "{config.name}" reads hidden states of a real model; the target is a toy')
    checkpoint = options.read(find_folder(options.model, options.revision))
    max_len = min(options.max_model_len or target.max_model_len, target.max_model_len)
    with torch.inference_mode():
        head, space = load_head(checkpoint, target, max_len)
        mask = _mask(checkpoint, head, target) if options.parallel_drafting else None
    num_nodes = options.eagle_tree_width * (options.eagle_tree_depth - 1)
    reader = HeadReader(
        head,
        max_num_seqs=target.max_num_seqs,
        max_len=max_len,
        max_query_tokens=target.max_query_tokens + READ_AHEAD + max(config.num_speculative_tokens, num_nodes),
        device=target.device,
    )
    if options.eagle_tree_width:
        shape = {"depth": options.eagle_tree_depth, "width": options.eagle_tree_width}
        return TreeHeadProposer(head, reader, space, name=config.name, **shape)
    is_probabilistic = options.draft_sample_method == "probabilistic"
    return HeadProposer(head, reader, space, name=config.name, is_probabilistic=is_probabilistic, mask=mask)


def load_head(checkpoint: Checkpoint, target: Any, num_positions: int) -> tuple[EagleHead | Eagle3Head, DraftSpace]:
    """The head in the target's dtype and on its device, and its vocabulary. Raises ModelError where they do not fit."""
    config = checkpoint.config
    faults = list(_faults(checkpoint, target))
    if faults:
        raise ModelError(f'the head in "{checkpoint.folder}" does not fit the target: {"; ".join(faults)}')
    body = CONFIG_MAPPING[config.body_type](**copy.deepcopy(dict(config.body)))
    layers = _layers(config, target.num_layers)
    head = _empty_head(checkpoint, body, layers, target.model)
    weights = dict(_weights(checkpoint, head, target))
    head.load_state_dict(weights, assign=True)
    head.requires_grad_(False).eval()
    head.rotary = rotary_table(body, num_positions, dtype=target.dtype, device=target.device)
    try:
        space = _space(checkpoint, target)
    except ModelError as error:
        raise ModelError(f'the head in "{checkpoint.folder}" does not fit the target: {error}') from error
    lm_head = _output(checkpoint, target, space)
    if lm_head is not None:
        head.lm_head = lm_head
    kernels = getattr(target, "kernels", None)
    if kernels is None and can_pack(target.device, target.dtype):
        pack_linears(head)
    own_table = _own(checkpoint, "embed_tokens.weight", target)
    table = target.model.get_input_embeddings().weight if own_table is None else own_table
    head.embed = partial(_look_up, table)
    head.bind(kernels)
    own_output = None if lm_head is None else cast(torch.nn.Linear, head.lm_head)
    head.output = target_output(target) if own_output is None else bound_linear(own_output, head.kernels)
    if isinstance(head, Eagle3Head):
        num_outputs = target.vocab_size if own_output is None else own_output.out_features
        _bind_chain(head, table, space, num_outputs)
    return head, space


def _bind_chain(head: Eagle3Head, embeddings: torch.Tensor, space: DraftSpace, num_outputs: int) -> None:
    """Where every output of the head is a token of its own that the head can read."""
    if isinstance(space, ReducedVocabulary) and space.is_injective:
        head.bind_chain(embeddings, space.target_ids)
    elif isinstance(space, IdentityDraftSpace) and space.num_ids == num_outputs <= len(embeddings):
        head.bind_chain(embeddings, None)


def _space(checkpoint: Checkpoint, target: Any) -> DraftSpace:
    d2t = read_tensor(checkpoint.tensors["d2t"]) if "d2t" in checkpoint.tensors else None
    uses_target = d2t is None and "lm_head.weight" not in checkpoint.tensors
    num_ids = target.vocab_size if uses_target else checkpoint.config.draft_vocab_size
    return output_space(d2t, num_ids, target.vocab_size, target.device)


def _layers(config: HeadConfig, num_layers: int) -> tuple[int, ...]:
    """The target's layers that the head reads."""
    if not config.uses_layers:
        return (num_layers,)
    return config.layer_ids or (2, num_layers // 2, num_layers - 3)


def _faults(checkpoint: Checkpoint, target: Any) -> Iterator[str]:
    config, hidden_size, num_layers = checkpoint.config, target.hidden_size, target.num_layers
    if config.target_hidden_size != hidden_size:
        yield f"it reads states of width {config.target_hidden_size}, the target's are {hidden_size} wide"
    layers = _layers(config, num_layers)
    if max(layers) > num_layers or min(layers) < 0 or len(set(layers)) < len(layers):
        named = "eagle_aux_hidden_state_layer_ids in its config.json"
        how = named if config.layer_ids else f"the default (2, n / 2, n - 3), without {named}"
        yield f"it reads the layers {list(layers)} ({how}), the target has layers 0 to {num_layers}"
    width = int(target.model.get_input_embeddings().weight.shape[1])
    if "embed_tokens.weight" not in checkpoint.tensors and width != config.hidden_size:
        yield (
            f"it has no embeddings of its own, and the target's are {width} wide where its hidden size is "
            f"{config.hidden_size}"
        )
    if config.vocab_size < _num_ids(target):
        yield f"it knows {config.vocab_size} token ids, the target has {_num_ids(target)}"
    if "lm_head.weight" not in checkpoint.tensors and hidden_size != config.hidden_size:
        yield (
            f"it has no output head of its own, and the target's reads states of width {hidden_size} where its hidden "
            f"size is {config.hidden_size}"
        )


def _num_ids(target: Any) -> int:
    """Ids that can come: rows of the target's output beyond its tokenizer are padding."""
    num_rows: int = target.vocab_size
    return num_rows if target.tokenizer is None else min(num_rows, num_token_ids(target.tokenizer))


def _empty_head(checkpoint: Checkpoint, body: Any, layers: tuple[int, ...], model: Any) -> EagleHead | Eagle3Head:
    config = checkpoint.config
    with torch.device("meta"):
        if config.method == "eagle":
            has_bias = "fc.bias" in checkpoint.tensors
            return EagleHead(config, body, layers, has_bias=has_bias, norm=final_norm(model))
        return Eagle3Head(config, body, layers, norm=None if config.uses_layers else final_norm(model))


_PARTS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.o": ("self_attn.o_proj",),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "input_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
}
"""Our names in a layer -> the checkpoint's; several are one after the other, as one projection."""
_FIRST_NORMS = {
    "embedding_norm.weight": "layers.0.input_layernorm.weight",
    "feature_norm.weight": "layers.0.hidden_norm.weight",
}
"""EAGLE-3's two norms before its first layer."""


def _weights(checkpoint: Checkpoint, head: torch.nn.Module, target: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of the head, from the checkpoint."""
    for name, empty in head.state_dict().items():
        parts = [read_tensor(checkpoint.tensors[each]) for each in _stored_names(name)]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts).view(empty.shape)
        yield name, joined.to(device=target.device, dtype=target.dtype)


def _stored_names(name: str) -> list[str]:
    if name in _FIRST_NORMS:
        return [_FIRST_NORMS[name]]
    if not name.startswith("blocks."):
        return [name]
    _, index, inner = name.split(".", 2)
    part, kind = inner.rsplit(".", 1)
    return [f"layers.{index}.{stored}.{kind}" for stored in _PARTS[part]]


def _own(checkpoint: Checkpoint, name: str, target: Any) -> torch.Tensor | None:
    """A tensor that a head may have or take from the target: its own, None where it has none."""
    stored = checkpoint.tensors.get(name)
    return None if stored is None else read_tensor(stored).to(device=target.device, dtype=target.dtype)


def _output(checkpoint: Checkpoint, target: Any, space: DraftSpace) -> torch.nn.Linear | None:
    """The head's output: its own, or the target's rows of the ids that it drafts; None where those are all."""
    weight = _own(checkpoint, "lm_head.weight", target)
    if weight is None and "d2t" not in checkpoint.tensors:
        return None
    if weight is None:
        draft_ids = torch.arange(checkpoint.config.draft_vocab_size, device=target.device)
        weight = target.model.get_output_embeddings().weight[space.to_target_ids(draft_ids)]
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.load_state_dict({"weight": weight}, assign=True)
    return linear


def _look_up(table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return embedding(token_ids, table)


def _mask(checkpoint: Checkpoint, head: EagleHead | Eagle3Head, target: Any) -> tuple[int, torch.Tensor]:
    """Token and features that stand for the tokens to be drafted."""
    hidden = read_tensor(checkpoint.tensors["mask_hidden"]).reshape(1, -1)
    features = head.features(hidden.to(device=target.device, dtype=target.dtype))
    return cast(int, checkpoint.config.mask_token_id), features
