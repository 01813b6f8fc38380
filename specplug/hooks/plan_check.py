"""Checks of what ``specplug_plan`` and ``specplug_draft_space`` answer."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from specplug.draft_space import DraftSpace
from specplug.hooks.faults import Malformed
from specplug.hooks.step import CurrentCall

__all__ = ["PlanCheck", "check_draft_space"]


class PlanCheck:
    """One whole number of at least 0 per row of the batch."""

    def __init__(self, call: CurrentCall) -> None:
        self._call = call

    def __call__(self, answer: Any, plugin: str) -> tuple[int, ...]:
        """The answer of one implementation."""
        batch_size = len(self._call.batch)
        advice = f"the answer is ignored; return one whole number of at least 0 per row (here {batch_size}), or None"
        if isinstance(answer, str) or not isinstance(answer, Sequence):
            raise Malformed("type", f"returned {type(answer).__name__}, not a sequence of limits", advice)
        if len(answer) != batch_size:
            raise Malformed("rows", f"returned {len(answer)} limits for {batch_size} rows", advice)
        try:
            limits = tuple(map(index, answer))
        except TypeError:
            raise Malformed("value", f"returned {_shown(answer)}", advice) from None
        if limits and min(limits) < 0:
            raise Malformed("value", f"returned {_shown(answer)}", advice)
        return limits

    def answers(self, answers: Any, plugin: str) -> list[tuple[int, ...]]:
        """What a wrapper returned: the list of the inner answers, changed or not."""
        if not isinstance(answers, list):
            advice = "the inner answers are kept; a wrapper of this hook returns the list of all answers"
            raise Malformed("type", f"the wrapper returned {type(answers).__name__}", advice)
        return [self(answer, plugin) for answer in answers]


def check_draft_space(answer: Any, plugin: str) -> DraftSpace:
    """A ``DraftSpace``."""
    if not isinstance(answer, DraftSpace):
        seen = f"returned {type(answer).__name__}, not a DraftSpace"
        raise Malformed("type", seen, "the answer is ignored; subclass specplug.draft_space.DraftSpace, or return None")
    return answer


def _shown(answer: Sequence[Any]) -> str:
    return f"{list(answer[:8])!r}{' ...' if len(answer) > 8 else ''}"
