"""How long a draft may be for a match of a given length."""

from __future__ import annotations

__all__ = ["DraftLengths"]

MAX_ENTRIES = 4096
"""Matches longer than this are all treated alike."""

_ROUNDING = 1e-6  # 0.1 * 30 is meant to be 3


class DraftLengths:
    """``lengths[match]``: ``int(factor * match)`` tokens, at most ``max_draft``; 0 below ``min_match``.

    ``max_depth`` bounds match and draft together, as a tree of that depth does. A draft then follows from the
    ending of the match that leaves it the most room.
    """

    __slots__ = ("_lengths", "longest")

    def __init__(self, *, max_draft: int, factor: float, min_match: int = 1, max_depth: int | None = None) -> None:
        self._lengths = [0]
        for match in range(1, MAX_ENTRIES if max_depth is None else min(max_depth, MAX_ENTRIES)):
            room = max_draft if max_depth is None else max_depth - match
            length = min(max_draft, room, int(factor * match + _ROUNDING))
            self._lengths.append(max(length, self._lengths[-1]))
            if self._lengths[-1] == max_draft:
                break
        self._lengths = [0 if match < min_match else length for match, length in enumerate(self._lengths)]
        self.longest = len(self._lengths) - 1
        """From this match on, drafts grow no more."""

    def __getitem__(self, match: int) -> int:
        return self._lengths[match] if match < self.longest else self._lengths[-1]
