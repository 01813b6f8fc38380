"""Whether a draft model can pay: what its tokens cost beside the target's, against what they can save.

With acceptance rate a, draft length K and c, the cost of a draft token in target steps, the speed-up over plain
decoding is ``(1 - a**(K + 1)) / ((1 - a) * (K * c + 1))``; some K gains if and only if a > c (Leviathan et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CostReport", "ModelSize", "best_draft_length", "estimate_cost", "read_size", "speed_up"]

_MOST_DRAFT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Read from a checkpoint's config and its weights' headers.

    ``num_weights_read``: those that a step reads, all but an input embedding that is not the output head too.
    """

    folder: str
    model_type: str
    vocab_size: int
    num_layers: int
    num_weights: int
    num_weights_read: int


@dataclass(frozen=True, slots=True)
class CostReport:
    """What a draft token costs, in target steps: between the ratio of weights and that of layers, since large models
    are bound by reading weights, small ones by the number of operations. ``ceiling``: the acceptance rate that cannot
    be passed. ``speed_up``: what it would be there, for either cost, with the best draft length for it."""

    weights_ratio: float
    layers_ratio: float
    ceiling: float
    best_speed_up: float
    best_draft_length: int
    worst_speed_up: float
    worst_draft_length: int

    @property
    def least(self) -> float:
        """The lower of the two costs."""
        return min(self.weights_ratio, self.layers_ratio)

    @property
    def most(self) -> float:
        """The higher of the two costs."""
        return max(self.weights_ratio, self.layers_ratio)


def speed_up(acceptance: float, draft_length: int, cost: float) -> float:
    """Tokens per step, in the time of plain steps; verification of a draft counts as one target step."""
    tokens = sum(acceptance**depth for depth in range(draft_length + 1))
    return tokens / (draft_length * cost + 1.0)


def best_draft_length(acceptance: float, cost: float) -> int:
    """The draft length with the highest speed-up; 0 where none gains."""
    lengths = range(_MOST_DRAFT_TOKENS + 1)
    return max(lengths, key=lambda length: (speed_up(acceptance, length, cost), -length))


def estimate_cost(target: ModelSize, draft: ModelSize, ceiling: float) -> CostReport:
    """``ceiling``: the highest acceptance rate there can be, 1.0 for equal vocabularies."""
    weights = draft.num_weights_read / target.num_weights_read
    layers = draft.num_layers / target.num_layers
    low, high = best_draft_length(ceiling, min(weights, layers)), best_draft_length(ceiling, max(weights, layers))
    return CostReport(
        weights_ratio=weights,
        layers_ratio=layers,
        ceiling=ceiling,
        best_speed_up=speed_up(ceiling, low, min(weights, layers)),
        best_draft_length=low,
        worst_speed_up=speed_up(ceiling, high, max(weights, layers)),
        worst_draft_length=high,
    )


def read_size(folder: Path, config: Any) -> ModelSize:
    """``config``: the model's, as transformers reads it. Only the headers of the weights are read."""
    text = config.get_text_config(decoder=True)
    num_weights = sum(_sizes(sorted(folder.glob("*.safetensors"))))
    is_tied = bool(getattr(text, "tie_word_embeddings", False))
    num_unread = 0 if is_tied else text.vocab_size * text.hidden_size
    return ModelSize(
        folder=str(folder),
        model_type=text.model_type,
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
        num_weights=num_weights,
        num_weights_read=max(1, num_weights - num_unread),
    )


def _sizes(paths: Iterable[Path]) -> Iterable[int]:
    import math

    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="np") as weights:
            yield sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
