"""Bad words: token sequences whose last token is ruled out after the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from specplug.errors import RequestError
from specplug.host.paths import Ids
from specplug.host.processing.block import Block

__all__ = ["BadWords", "spell_bad_words"]

_ANY = -2
_NO_TOKEN = -1


class BadWords:
    """One request's bad words. ``words``: non-empty lists of token ids."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        distinct = sorted({tuple(word) for word in words})
        longer = [word for word in distinct if len(word) > 1]
        self.single_ids: Ids = np.array([word[0] for word in distinct if len(word) == 1], dtype=np.int64)
        """Ruled out everywhere."""
        self._last_ids: Ids = np.array([word[-1] for word in longer], dtype=np.int64)
        self._num_context = max((len(word) for word in longer), default=1) - 1
        # what must stand before the last token, right-aligned
        self._contexts = np.full((len(longer), self._num_context), _ANY, dtype=np.int64)
        for number, word in enumerate(longer):
            self._contexts[number, self._num_context - len(word) + 1 :] = word[:-1]

    def entries(self, block: Block, vocab_size: int) -> Ids:
        """Entries that words of several tokens rule out in the block's rows. Only output counts, as in vLLM."""
        if not len(self._last_ids):
            return np.empty(0, dtype=np.int64)
        num_output = min(block.num_output_tokens, self._num_context)
        missing = np.full(self._num_context - num_output, _NO_TOKEN, dtype=np.int64)
        text = np.concatenate((missing, block.token_ids[len(block.token_ids) - num_output :], block.draft_ids))
        windows: NDArray[np.int64] = sliding_window_view(text, self._num_context)[block.first :]
        contexts = self._contexts
        does_match = ((windows[:, None] == contexts) | (contexts == _ANY)).all(axis=2)
        row, word = np.nonzero(does_match)
        found: Ids = block.rows[row] * vocab_size + self._last_ids[word]
        return found


def spell_bad_words(words: Sequence[str | Sequence[int]], tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """Token ids of the words: texts at the start of a line and, as in vLLM, inside running text where that differs.

    Raises ``RequestError`` for a text without a tokenizer, a text without tokens, or an id outside the vocabulary.
    """
    spelled: list[list[int]] = []
    for word in words:
        if not isinstance(word, str):
            spelled.append(list(word))
            continue
        if tokenizer is None:
            raise RequestError(f"bad_words={word!r} needs a tokenizer, and the target has none; give token ids")
        alone, inside = (_encode(tokenizer, prefix + word.lstrip()) for prefix in ("", " "))
        if not alone:
            raise RequestError(f"bad_words={word!r} has no tokens in this vocabulary; give token ids")
        spelled.append(alone)
        if inside and len(inside) == len(alone) and inside[0] != alone[0]:
            spelled.append(inside)
    for word in spelled:
        if max(word) >= vocab_size:
            raise RequestError(f"bad_words={word} must be token ids of the target, 0 to {vocab_size - 1}")
    return spelled


def _encode(tokenizer: Any, text: str) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=False))
    except Exception:  # noqa: BLE001 - foreign code; what cannot be written needs no ban
        return []
