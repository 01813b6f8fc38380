"""The two published layouts of Medusa heads under one set of names, and whether a folder holds one of them.

Weights are not read here, only file headers. Layouts:

- vLLM's: ``model_type`` "medusa"; ``blocks.{head}.layers.{layer}.{weight,bias}``, ``lm_heads.{head}.weight`` (one for
  all heads with ``original_lm_head``), ``token_map`` where the heads know a part of the vocabulary;
- FasterDecoding's, the original: ``medusa_num_heads``, ``medusa_num_layers``; ``{head}.{layer}.linear.{weight,bias}``
  and, as the last layer, ``{head}.{layer}.weight``.

Either may have the prefix ``medusa_heads.`` or ``medusa_head.``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specplug import ModelError
from specplug.proposers.heads.files import StoredTensor, stored_tensors
from specplug.proposers.heads.manifest import listed, read_head_config, size_of, tensor_faults

__all__ = ["SHARED_HEAD", "TOKEN_MAP", "Checkpoint", "HeadsConfig"]

TOKEN_MAP = "token_map"
"""``[draft_vocab]``: the target ids that the rows of the heads stand for."""
SHARED_HEAD = "lm_head.weight"
"""Our name of the one output head of all, where there is one."""

_PREFIXES = ("medusa_heads.", "medusa_head.")
_ORIGINAL_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_ORIGINAL_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")
_PART = re.compile(r"(?:blocks|lm_heads)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """``vocab_size``: ids that the heads were trained for; ``draft_vocab_size``: rows of their output, fewer with a
    token map. ``shares_output``: one output head for all, the target's own unless the checkpoint has it."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    has_bias: bool
    shares_output: bool
    logit_scale: float

    @classmethod
    def parse(cls, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> HeadsConfig:
        """From the config and, for what it leaves out, the tensors' shapes. Raises ModelError for another format."""
        if (model_type := config.get("model_type")) not in (None, "medusa") and "medusa_num_heads" not in config:
            raise ModelError(
                f'model_type "{model_type}" is no Medusa checkpoint; supported are vLLM\'s layout (model_type '
                '"medusa") and FasterDecoding\'s (medusa_num_heads)'
            )
        block, output = tensors.get("blocks.0.layers.0.weight"), tensors.get("lm_heads.0.weight")
        if block is None:
            raise ModelError(
                f"no Medusa head is in its tensors ({listed(tensors)}); the first is blocks.0.layers.0.weight, or "
                "0.0.linear.weight in the original layout"
            )
        num_rows = output.shape[0] if output is not None else None
        vocab_size = size_of(config, "vocab_size", num_rows)
        return cls(
            num_heads=size_of(config, "num_heads", size_of(config, "medusa_num_heads", _num_heads(tensors))),
            num_layers=size_of(config, "num_hidden_layers", size_of(config, "medusa_num_layers", 1)),
            hidden_size=size_of(config, "hidden_size", block.shape[0]),
            vocab_size=vocab_size,
            draft_vocab_size=size_of(config, "truncated_vocab_size", vocab_size)
            if config.get("truncated_vocab_size")
            else vocab_size,
            has_bias="blocks.0.layers.0.bias" in tensors,
            shares_output=bool(config.get("original_lm_head", False)),
            logit_scale=float(config.get("logit_scale") or 1.0),
        )


def _num_heads(tensors: Mapping[str, StoredTensor]) -> int:
    return 1 + max(int(found[1]) for name in tensors if (found := _PART.match(name)))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with Medusa heads; tensors under vLLM's names, ``lm_head.weight`` for an output head of all."""

    folder: Path
    config: HeadsConfig
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Raises ModelError, naming the folder, for one without usable Medusa heads."""
        try:
            config = read_head_config(folder)
            tensors = {plain_name(name): tensor for name, tensor in stored_tensors(folder).items()}
            parsed = HeadsConfig.parse(config, tensors)
            if parsed.shares_output and SHARED_HEAD not in tensors and "lm_heads.0.weight" in tensors:
                tensors[SHARED_HEAD] = tensors["lm_heads.0.weight"]
            faults = list(_faults(parsed, tensors))
        except ModelError as error:
            faults = [str(error)]
        if faults:
            raise ModelError(f'the Medusa heads in "{folder}" cannot be used: {"; ".join(faults)}')
        return cls(folder, parsed, tensors)


def plain_name(name: str) -> str:
    """vLLM's name of a tensor of either layout."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    if found := _ORIGINAL_BLOCK.fullmatch(name):
        return f"blocks.{found[1]}.layers.{found[2]}.{found[3]}"
    if found := _ORIGINAL_HEAD.fullmatch(name):
        return f"lm_heads.{found[1]}.weight"
    return name


def _faults(config: HeadsConfig, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    num_stored = _num_heads(tensors)
    required = expected_tensors(config, config.num_heads)
    optional = expected_tensors(config, max(num_stored, config.num_heads))  # a config may name fewer than are there
    rows = _output_rows(config, tensors)
    output = (rows, config.hidden_size)
    outputs = {f"lm_heads.{head}.weight": output for head in range(max(num_stored, config.num_heads))}
    optional |= {**outputs, SHARED_HEAD: output, TOKEN_MAP: (config.draft_vocab_size,)}
    if not config.shares_output:
        required |= {name: output for head, name in enumerate(outputs) if head < config.num_heads}
    yield from tensor_faults(tensors, required, optional, "a Medusa checkpoint")
    if config.draft_vocab_size < config.vocab_size and TOKEN_MAP not in tensors:
        yield (
            f"its heads know {config.draft_vocab_size} of {config.vocab_size} ids (truncated_vocab_size), and the "
            f"tensor {TOKEN_MAP} that says which is missing"
        )


def _output_rows(config: HeadsConfig, tensors: Mapping[str, StoredTensor]) -> int:
    """Rows of the stored output heads: of a truncated vocabulary, or still of all ids."""
    stored = tensors.get(SHARED_HEAD) or tensors.get("lm_heads.0.weight")
    is_whole = stored is not None and stored.shape[0] == config.vocab_size
    return config.vocab_size if is_whole else config.draft_vocab_size


def expected_tensors(config: HeadsConfig, num_heads: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the blocks of the first heads."""
    size = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(config.num_layers):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (size, size)
            if config.has_bias:
                shapes[f"blocks.{head}.layers.{layer}.bias"] = (size,)
    return shapes
