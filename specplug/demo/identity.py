"""Is the output the target's own? Exactly in float32; in bfloat16 by asking the target at every position.

In bfloat16 a forward over n tokens rounds differently from n forwards of one token, so greedy texts may part
where two tokens are nearly tied, with and without speculation. Teacher forcing shows that nothing else happened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Deviation", "Equality", "ForcedText", "TeacherForcing", "compare_outputs", "teacher_force"]

_BFLOAT16_FRACTION_BITS = 7


@dataclass(frozen=True, slots=True)
class Equality:
    """Outputs of one kind compared token for token; ``first_difference`` of the first pair that differs."""

    kind: str
    num_equal: int
    num_compared: int
    first_difference: int | None = None


@dataclass(frozen=True, slots=True)
class ForcedText:
    """An output to check: what was read and what was emitted."""

    label: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Deviation:
    """An emitted token that is not the arg-max: the arg-max's logit is ``gap`` above its own."""

    label: str
    position: int
    emitted_id: int
    best_id: int
    gap: float
    best_logit: float

    @property
    def ulps(self) -> float:
        """The gap in units of bfloat16's last place at that logit."""
        exponent = math.frexp(abs(self.best_logit) or 1.0)[1] - 1
        return float(self.gap / 2.0 ** (exponent - _BFLOAT16_FRACTION_BITS))


@dataclass(frozen=True, slots=True)
class TeacherForcing:
    """All positions checked, and those where the emitted token is not the arg-max."""

    num_positions: int
    deviations: tuple[Deviation, ...]


def compare_outputs(kind: str, plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Equality:
    """Compare two runs of the same prompts."""
    differences = [_first_difference(a, b) for a, b in zip(plain, other, strict=True)]
    parted = [position for position in differences if position is not None]
    return Equality(kind, len(differences) - len(parted), len(differences), parted[0] if parted else None)


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    if list(a) == list(b):
        return None
    return next((position for position, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def teacher_force(
    model: Any, texts: Sequence[ForcedText], advance: Callable[[int], object] = lambda _count: None
) -> TeacherForcing:
    """Let ``model`` (a transformers causal LM) read each prompt and output in one forward, and compare at every
    emitted position its arg-max with what was emitted. ``advance`` gets the number of positions checked."""
    deviations: list[Deviation] = []
    checked = 0
    for text in texts:
        if not text.output_ids:
            continue
        deviations += _deviations(text, _logits(model, text))
        checked += len(text.output_ids)
        advance(len(text.output_ids))
    return TeacherForcing(checked, tuple(sorted(deviations, key=lambda one: -one.gap)))


@torch.inference_mode()
def _logits(model: Any, text: ForcedText) -> torch.Tensor:
    """``[len(output_ids), vocab]``: what the target says at each emitted position."""
    ids = torch.tensor([[*text.prompt_ids, *text.output_ids[:-1]]], device=model.device)
    kept = len(text.output_ids)
    logits: torch.Tensor = model(input_ids=ids, logits_to_keep=kept, use_cache=False).logits[0]
    return logits.float()


def _deviations(text: ForcedText, logits: torch.Tensor) -> Iterator[Deviation]:
    emitted = torch.tensor(text.output_ids, device=logits.device)
    best = logits.max(dim=1)
    own = logits.gather(1, emitted[:, None])[:, 0]
    # A tie is no deviation: both tokens are the arg-max.
    for position in (own < best.values).nonzero()[:, 0].tolist():
        yield Deviation(
            label=text.label,
            position=position,
            emitted_id=int(emitted[position]),
            best_id=int(best.indices[position]),
            gap=float(best.values[position] - own[position]),
            best_logit=float(best.values[position]),
        )
