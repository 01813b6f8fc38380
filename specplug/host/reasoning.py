"""The reasoning section that an output may begin with: where it ends, also inside a block of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specplug.errors import RequestError

__all__ = ["ReasoningSection", "spell_reasoning_end"]


class ReasoningSection:
    """One request's reasoning: its output up to and including the first ``end_ids``.

    ``num_tokens``: its length, None while it lasts.
    """

    def __init__(self, end_ids: Sequence[int]) -> None:
        self._end_ids = list(end_ids)
        self._tail: list[int] = []
        self._num_read = 0
        self.num_tokens: int | None = None

    @property
    def num_tokens_so_far(self) -> int:
        """Reasoning tokens in the output read so far."""
        return self._num_read if self.num_tokens is None else self.num_tokens

    def append(self, token_ids: Sequence[int]) -> None:
        """Take in output tokens that stand."""
        if self.num_tokens is None:
            after = self.num_tokens_before_end(token_ids)
            self.num_tokens = None if after is None else self._num_read + after
            self._tail = self._joined(token_ids)[-len(self._end_ids) :]
        self._num_read += len(token_ids)

    def num_tokens_before_end(self, token_ids: Sequence[int]) -> int | None:
        """How many of these tokens, if they came next, would belong to the section; None if it would not end."""
        if self.num_tokens is not None:
            return 0
        text, size = self._joined(token_ids), len(self._end_ids)
        for stop in range(max(len(self._tail) + 1, size), len(text) + 1):
            if text[stop - size : stop] == self._end_ids:
                return stop - len(self._tail)
        return None

    def _joined(self, token_ids: Sequence[int]) -> list[int]:
        return [*self._tail, *token_ids]


def spell_reasoning_end(end: str | Sequence[int], tokenizer: Any, vocab_size: int) -> list[int]:
    """Token ids of a request's ``reasoning_end``. Raises ``RequestError`` when it has none in this vocabulary."""
    if isinstance(end, str) and tokenizer is None:
        raise RequestError(f"reasoning_end={end!r} needs a tokenizer, and the target has none; give token ids")
    ids = _encode(end, tokenizer) if isinstance(end, str) else list(end)
    if not ids or max(ids) >= vocab_size:
        raise RequestError(f"reasoning_end={end!r} must be text with tokens, or token ids from 0 to {vocab_size - 1}")
    return ids


def _encode(text: str, tokenizer: Any) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:
        raise RequestError(f"reasoning_end={text!r} cannot be encoded: {error}") from error
