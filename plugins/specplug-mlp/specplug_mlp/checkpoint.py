"""The published layout of MLP speculators, and whether a folder holds it. Weights are not read, only file headers.

Names: ``speculator.{emb,proj,head}.{i}.weight`` and ``speculator.ln.{i}.{weight,bias}`` for stage i of ``n_predict``.
With ``tie_weights`` all stages share one embedding, head and norm, and all but the first one projection; files then
hold the shared tensors once or repeat them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specplug import ModelError
from specplug.proposers.heads.files import StoredTensor, stored_tensors
from specplug.proposers.heads.manifest import read_head_config, size_of, tensor_faults

__all__ = ["TOKEN_MAP", "Checkpoint", "SpeculatorConfig"]

TOKEN_MAP = "token_map"
"""Optional ``[draft_vocab]``: the target ids that the rows of the heads stand for, where those are not all ids."""

_MODEL_TYPE = "mlp_speculator"
_ARCHITECTURE = "mlpspeculator"


@dataclass(frozen=True, slots=True)
class SpeculatorConfig:
    """``emb_dim``: width of the target's states; ``inner_dim``: of the speculator's; ``draft_vocab_size``: rows of its
    heads, of the ``vocab_size`` ids that its embeddings know."""

    emb_dim: int
    inner_dim: int
    vocab_size: int
    n_predict: int
    tie_weights: bool = False
    scale_input: bool = False
    draft_vocab_size: int = 0

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> SpeculatorConfig:
        """Absent keys have the published defaults. Raises ModelError for another format and for impossible sizes."""
        names = " ".join(map(str, config.get("architectures") or ())).lower()
        if config.get("model_type") != _MODEL_TYPE and _ARCHITECTURE not in names:
            raise ModelError(
                f'model_type "{config.get("model_type")}" is no MLP speculator; supported is the published layout, '
                f'model_type "{_MODEL_TYPE}" (speculator.emb.0.weight and so on)'
            )
        emb_dim = size_of(config, "emb_dim", 4096)
        vocab_size = size_of(config, "vocab_size", 32000)
        parsed = cls(
            emb_dim=emb_dim,
            inner_dim=size_of(config, "inner_dim") if config.get("inner_dim") else emb_dim,
            vocab_size=vocab_size,
            n_predict=size_of(config, "n_predict", 3),
            tie_weights=bool(config.get("tie_weights", False)),
            scale_input=bool(config.get("scale_input", False)),
            draft_vocab_size=size_of(config, "truncated_vocab_size", vocab_size),
        )
        if parsed.tie_weights and parsed.n_predict == 1:
            raise ModelError("tie_weights=true with n_predict=1 ties nothing; such a checkpoint is damaged")
        return parsed


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A speculator's folder; tensors without the prefix ``speculator.``."""

    folder: Path
    config: SpeculatorConfig
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Raises ModelError, naming the folder, for one that is no usable MLP speculator."""
        try:
            config = SpeculatorConfig.parse(read_head_config(folder))
            tensors = {name.removeprefix("speculator."): tensor for name, tensor in stored_tensors(folder).items()}
            faults = list(_faults(config, tensors))
        except ModelError as error:
            faults = [str(error)]
        if faults:
            raise ModelError(f'the MLP speculator in "{folder}" cannot be used: {"; ".join(faults)}')
        return cls(folder, config, tensors)


def _faults(config: SpeculatorConfig, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    every = expected_tensors(config, config.n_predict)
    required = expected_tensors(config, 1) | _second_projection(config) if config.tie_weights else every
    yield from tensor_faults(tensors, required, {**every, TOKEN_MAP: (config.draft_vocab_size,)}, "an MLP speculator")
    if config.draft_vocab_size < config.vocab_size and TOKEN_MAP not in tensors:
        yield (
            f"its heads have {config.draft_vocab_size} rows for {config.vocab_size} token ids "
            f"(truncated_vocab_size), and the tensor {TOKEN_MAP} that says which ids is missing"
        )


def expected_tensors(config: SpeculatorConfig, num_stages: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of everything that the first stages have."""
    inner = config.inner_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for stage in range(num_stages):
        shapes |= {
            f"emb.{stage}.weight": (config.vocab_size, inner),
            f"proj.{stage}.weight": (inner, inner if stage else config.emb_dim),
            f"head.{stage}.weight": (config.draft_vocab_size, inner),
            f"ln.{stage}.weight": (inner,),
            f"ln.{stage}.bias": (inner,),
        }
    return shapes


def _second_projection(config: SpeculatorConfig) -> dict[str, tuple[int, ...]]:
    return {"proj.1.weight": (config.inner_dim, config.inner_dim)}
