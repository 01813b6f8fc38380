"""PARD-2: what the target thought when it read the token before is added to the draft's token embeddings.

Position t of the draft reads ``embedding(token t) + scale * projection(states of the target at t - 1)``, position 0
without the second term; masks take the newest token's. Config keys of the checkpoints: ``pard2_target_layers`` (indices
into transformers' ``hidden_states``, -1 being the normalised last) and ``pard2_scale``; the projection is the tensor
``target_proj.weight``, with ``target_proj.bias`` where there is one, in a safetensors file beside the model's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.functional import linear

from specplug import Batch, ConfigError, PluginContext
from specplug.proposers.draft_cache import Reading
from specplug.proposers.heads.features import final_norm

__all__ = ["TargetFeatures", "load_features"]

logger = logging.getLogger(__name__)

_WEIGHT, _BIAS = "target_proj.weight", "target_proj.bias"
_WHERE = "speculative_config.model"


class TargetFeatures:
    """The projected states of every request that the draft has yet to read, added to what it embeds."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[int],
        *,
        project: Callable[[torch.Tensor], torch.Tensor],
        norms: Sequence[Callable[[torch.Tensor], torch.Tensor] | None],
    ) -> None:
        """``layers``: taps of the target, in the order of the projection's input; ``norms``: for each, or None."""
        self.layers = tuple(layers)
        self._project = project
        self._norms = tuple(norms)
        self._states: dict[str, tuple[int, torch.Tensor]] = {}  # request -> position of the first state, states
        self._added: torch.Tensor | None = None
        embeddings = model.get_input_embeddings()
        self._nothing = embeddings.weight.new_zeros(1, embeddings.weight.shape[1])
        embeddings.register_forward_hook(self._add)

    def _add(self, module: torch.nn.Module, args: tuple[Any, ...], embedded: torch.Tensor) -> torch.Tensor:
        added, self._added = self._added, None
        return embedded if added is None else embedded + added

    def follow(self, batch: Batch, rows: Sequence[int]) -> None:
        """Take the new states of these rows."""
        for row in rows:
            num_new = len(batch.new_token_ids[row])
            if num_new:
                request_id, end = batch.request_ids[row], batch.num_computed_tokens[row]
                new = self._projected(batch, row)
                start, old = self._states.get(request_id, (end - num_new, new[:0]))
                self._states[request_id] = (start, torch.cat([old, new]))

    def _projected(self, batch: Batch, row: int) -> torch.Tensor:
        parts = [batch.new_hidden_states[layer][row] for layer in self.layers]
        normed = [part if norm is None else norm(part) for part, norm in zip(parts, self._norms, strict=True)]
        return self._project(torch.cat(normed, dim=-1))

    def prepare(self, readings: Sequence[Reading]) -> None:
        """The draft's next forward embeds this, packed."""
        self._added = torch.cat([part for reading in readings for part in self._parts(reading)])

    def _parts(self, reading: Reading) -> Iterator[torch.Tensor]:
        first, end = reading.num_past, reading.num_tokens
        start, states = self._states[reading.request_id]
        if first == 0:
            yield self._nothing
        of_tokens = states[max(first, 1) - 1 - start : end - 1 - start]
        yield of_tokens
        newest = of_tokens[-1:] if len(of_tokens) else self._nothing
        yield newest.expand(reading.num_masks, -1)
        kept = max(start, first - 1)  # the same may be read again, after an interruption
        self._states[reading.request_id] = (kept, states[kept - start :])

    def forget(self, request_id: str) -> None:
        """Drop a request's states; unknown ids are ignored."""
        self._states.pop(request_id, None)


def load_features(draft: Any, folder: Path, context: PluginContext) -> TargetFeatures | None:
    """The features of a PARD-2 draft; None for a PARD draft, and for a folder without the projection.

    Raises ``ConfigError`` for a projection of another target.
    """
    config = draft.model.config
    layers = getattr(config, "pard2_target_layers", None)
    if layers is None:
        return None
    weight, bias = _projection(folder, draft.model)
    if weight is None:
        logger.info(
            "%s is a PARD-2 draft whose folder holds no %s in safetensors; it drafts from tokens alone, as PARD does",
            folder,
            _WEIGHT,
        )
        return None
    target = context.target
    indices = [_absolute(index, target.num_layers) for index in layers]
    if weight.shape[1] != len(indices) * target.hidden_size:
        raise ConfigError(
            f'{_WHERE}="{folder}": its projection takes {weight.shape[1]} values, and {len(indices)} layers of this '
            f"target have {len(indices)} x {target.hidden_size}; it was trained for another target"
        )
    weight = weight * float(getattr(config, "pard2_scale", 0.02))
    bias = None if bias is None else bias * float(getattr(config, "pard2_scale", 0.02))

    def project(states: torch.Tensor) -> torch.Tensor:
        return linear(states.to(weight.device, weight.dtype), weight, bias)

    norms = [final_norm(target.model) if index == target.num_layers else None for index in indices]
    return TargetFeatures(draft.model, indices, project=project, norms=norms)


def _absolute(index: int, num_layers: int) -> int:
    """The tap that an index into ``hidden_states``, of ``num_layers + 1`` entries, means."""
    tap = index + num_layers + 1 if index < 0 else index
    if not 0 <= tap <= num_layers:
        raise ConfigError(
            f"{_WHERE}: pard2_target_layers names layer {index}, the target has {num_layers}; it was trained for "
            "another target"
        )
    return tap


def _projection(folder: Path, model: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    embeddings = model.get_input_embeddings().weight
    for file in sorted(folder.rglob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = set(tensors.keys())
            if _WEIGHT in names:
                found = [
                    tensors.get_tensor(name).to(embeddings) if name in names else None for name in (_WEIGHT, _BIAS)
                ]
                return found[0], found[1]
    return None, None
