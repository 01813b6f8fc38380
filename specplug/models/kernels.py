"""Kernels that other packages bring: forwards of models, and parts of heads, in compiled code of their own.

A package offers them by an entry point of the group ``specplug.kernels`` that names a :class:`Kernels`. A loaded model
is tried against transformers' own forward before anything is generated with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from specplug.config.kernels import AUTO, TORCH, installed_kernels, kernels_fault
from specplug.errors import ConfigError, ModelError
from specplug.models.llama import LlamaLayer, LlamaModel

if TYPE_CHECKING:
    from specplug.models.cache import RaggedCache, RaggedLayer
    from specplug.models.rotary import RotaryTable
    from specplug.models.step_plan import StepPlan

__all__ = ["Chain", "ChainParts", "Decoder", "Kernels", "LayerStep", "Map", "find_decoder"]

Map: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""From states ``[..., in]`` to ``[..., out]``."""

logger = logging.getLogger("specplug")


class Decoder(Protocol):
    """A model's forward over packed tokens. It keeps keys and values in the cache's own buffers and layout."""

    @property
    def kernels(self) -> Kernels | None:
        """What it is made of, for heads on the same target; None: torch."""

    def forward(
        self,
        input_ids: torch.Tensor,
        step: StepPlan,
        cache: RaggedCache,
        logits_indices: torch.Tensor,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """``input_ids`` ``[T]``: logits of ``logits_indices``, and states ``[T, hidden]`` of each layer in ``taps``.

        Layer i is the residual stream after i layers (0: the embeddings), before the final norm.
        """

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """The model's output embedding, for heads that share it: ``[n, hidden]`` to ``[n, vocab]``."""


class LayerStep(Protocol):
    """A decoder layer from its normalised input on, over packed tokens."""

    def __call__(
        self, residual: torch.Tensor, states: torch.Tensor, step: StepPlan, cache: RaggedLayer
    ) -> torch.Tensor:
        """``states`` ``[T, in_features]`` through attention and MLP, added to ``residual`` ``[T, hidden_size]``."""


@dataclass(frozen=True, slots=True)
class ChainParts:
    """An EAGLE-3 head of one layer. It reads ``[norm(embedding of a token); norm(feature)]``; the arg-max of its
    normalised output is the next token, and the output the next feature."""

    features: Map
    """The target's states ``[T, any]`` to features ``[T, hidden_size]``."""
    layer: LayerStep
    embeddings: torch.Tensor
    """``[target ids, hidden_size]``."""
    embedding_norm: Map
    feature_norm: Map
    output_norm: Map
    adds_to_norm: bool
    """The layer adds to the normalised feature, not to the feature."""
    feeds_back_norm: bool
    """The next feature is the normalised output."""
    output: Map
    """``[n, hidden_size]`` to logits ``[n, draft ids]``."""
    target_ids: torch.Tensor | None
    """``[draft ids]``: the target's id of each; None where they are the same."""


class Chain(Protocol):
    """A head that reads what is new and drafts several tokens by arg-max, in one call."""

    def __call__(
        self,
        token_ids: Sequence[int],
        states: torch.Tensor,
        num_read: Sequence[int],
        num_tokens: int,
        step: StepPlan,
        cache: RaggedLayer,
        drafted: torch.Tensor,
        probs: torch.Tensor,
    ) -> None:
        """Read T target ids with the target's states ``[T, any]``, ``num_read[row]`` of each row, and draft
        ``num_tokens`` after the last of each of the n rows that has any: target ids into ``drafted``
        ``[n * num_tokens]`` int64, row by row, their probabilities into ``probs``, float32 of the same shape.

        In ``step`` such a row appends its tokens and all drafted ones but the last; each token sees all slots before
        it (:meth:`~specplug.models.step_plan.StepPlan.sees_all_before`).
        """


class Kernels(Protocol):
    """What a package offers. Each method returns None for what the package, or this machine, cannot run."""

    name: str

    def decoder(self, model: LlamaModel) -> Decoder | None:
        """Takes the layers out of the model; changes nothing where it returns None."""

    def layer(
        self, layer: LlamaLayer, rotary: RotaryTable, *, head_dim: int, scaling: float, norm_eps: float
    ) -> LayerStep | None:
        """One layer, whose input comes normalised. The weights are copied."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Map | None:
        """``[..., in]`` to ``[..., out]`` for a ``weight`` ``[out, in]``. The weights are copied."""

    def norm(self, weight: torch.Tensor, eps: float) -> Map | None:
        """``x / rms(x) * weight`` over the last axis."""

    def chain(self, parts: ChainParts) -> Chain | None:
        """Of parts that these kernels made."""

    def likeliest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The arg-max of each row of ``logits`` ``[n, vocab]``, ``[n]`` int64, and its probability, ``[n]`` float32."""


def find_decoder(name: str, model: Any, num_positions: int) -> Decoder | None:
    """By the installed kernels called ``name``, or with "auto" the first that run ``model``; None for torch.

    ``num_positions``: positions that steps may hold. A decoder takes the layers out of the model. Raises ConfigError
    for a name that is not installed or cannot run the model; with "auto" a package that cannot be imported is logged
    and passed over. Raises ModelError where a package fails, the model half taken.
    """
    if (fault := kernels_fault(name)) is not None:
        raise ConfigError(f'kernels="{name}": {fault}')
    if name == TORCH:
        return None
    installed = installed_kernels()
    if name == AUTO:
        made = (_decoder(each, model, num_positions, is_asked_for=False) for each in installed.values())
        return next((decoder for decoder in made if decoder is not None), None)
    decoder = _decoder(installed[name], model, num_positions, is_asked_for=True)
    if decoder is None:
        raise ConfigError(
            f'kernels="{name}" cannot run this model ({type(model).__name__}, {model.dtype}, {model.device}) on this '
            f'machine; write kernels="{AUTO}" to use them only where they can'
        )
    return decoder


def _decoder(entry_point: EntryPoint, model: Any, num_positions: int, *, is_asked_for: bool) -> Decoder | None:
    try:
        kernels: Kernels = entry_point.load()
    except Exception as error:
        fault = f'kernels "{entry_point.name}" ({_origin(entry_point)}) cannot be imported: {error}'
        if is_asked_for:
            raise ModelError(fault) from error
        logger.warning("%s; going on without them", fault)
        return None
    parts = LlamaModel.of(model, num_positions)
    try:
        return None if parts is None else kernels.decoder(parts)
    except Exception as error:
        raise ModelError(
            f'kernels "{entry_point.name}" ({_origin(entry_point)}) failed to take the model: {type(error).__name__}: '
            f'{error}; write kernels="{TORCH}" to do without them'
        ) from error


def _origin(entry_point: EntryPoint) -> str:
    return "unknown" if entry_point.dist is None else f"{entry_point.dist.name} {entry_point.dist.version}"
