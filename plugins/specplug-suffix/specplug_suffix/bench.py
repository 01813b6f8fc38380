"""The drafter behind four methods, for replays and cost tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specplug_suffix.drafter import DraftRules, RequestText, SuffixDrafter
from specplug_suffix.lengths import DraftLengths
from specplug_suffix.shared import SharedIndex

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Drafter"]


class Drafter:
    """``start``, ``append``, ``propose``, ``stop``; every parameter of ours by its short name."""

    def __init__(
        self,
        *,
        k: int = 32,
        factor: float = 2.0,
        min_match: int = 1,
        depth: int = 0,
        min_prob: float = 0.0,
        budget: int = 1_000_000,
        max_cached_requests: int = 10_000,
        live: int = 1,
        carry: int = 1,
    ) -> None:
        """``depth``: bound of match and draft together, 0 for none; ``carry``: resumed copies count for more."""
        lengths = DraftLengths(
            max_draft=int(k), factor=float(factor), min_match=int(min_match), max_depth=int(depth) or None
        )
        rules = DraftRules(
            lengths,
            int(k),
            min_probability=float(min_prob),
            shares_running=bool(live),
            counts_carried=bool(carry),
        )
        shared = SharedIndex(
            max_tokens=int(budget), max_requests=int(max_cached_requests), counts=rules.min_probability > 0
        )
        self.drafter = SuffixDrafter(rules, shared)
        self._texts: dict[str, RequestText] = {}

    def start(self, request_id: str, prompt: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """A request with all of its prompt."""
        text = self._texts[request_id] = self.drafter.start(len(prompt))
        self.drafter.append(text, prompt.tolist())

    def append(self, request_id: str, token_ids: list[int]) -> None:
        """The next output tokens."""
        self.drafter.append(self._texts[request_id], token_ids)

    def propose(self, request_id: str, tail: object, k: int) -> list[int]:
        """A draft of at most ``k`` tokens; the end of the text need not be handed in again."""
        return self.drafter.propose(self._texts[request_id], k)

    def stop(self, request_id: str) -> None:
        """The request ended."""
        self.drafter.finish(self._texts.pop(request_id))
