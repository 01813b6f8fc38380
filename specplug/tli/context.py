"""A request's text in draft ids: the text that the target's tokens spell, encoded by the draft's own tokenizer.

Looking up the target's tokens one by one would give the draft model a text cut as it never saw one, and nothing at all
for tokens that it lacks. Only the end of the text is encoded again when tokens come: what stands before it cannot
change any more.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from specplug.draft_space import DraftContext
from specplug.errors import ConfigError
from specplug.tli.spelling import MARKER
from specplug.tli.vocabulary import Vocabulary

__all__ = ["DraftEncoder", "RequestText", "TargetText", "num_common"]

_WINDOW_TOKENS = 16
"""Tokens before the new text that are encoded along."""
_WORD_TOKENS = 8
"""How many more are taken to begin the window at a word."""
_NUM_AGREEING = 3
"""Tokens in a row that must come out as before, to know that the window's beginning did no harm."""
_GROWTH = 4
_KEPT_CHARS = 2048
"""Characters of the text that are kept for windows, and let grow to twice as many."""


class TargetText:
    """What the target's ids spell. Special tokens spell nothing."""

    def __init__(self, target: Vocabulary) -> None:
        self._bytes_of = target.bytes_of
        render: Any = target.tokenizer.convert_tokens_to_string
        is_marked = target.spelling.name == "SentencePiece"
        self.drops_first_space = is_marked and render([f"{MARKER}a"]) == "a"
        """A tokenizer with a dummy prefix puts a space before the text, which its decoder takes off again."""

    def read(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of ``token_ids``."""
        return b"".join(map(self._bytes_of, token_ids))


class DraftEncoder:
    """The draft's tokenizer, for pieces of text."""

    def __init__(self, draft: Vocabulary) -> None:
        """Raises ``ConfigError`` for a tokenizer that does not tell which characters a token covers."""
        self._tokenizer = draft.tokenizer
        if not draft.is_fast:
            raise ConfigError(
                f"speculative_config.use_heterogeneous_vocab: the draft model's tokenizer, "
                f"{type(draft.tokenizer).__name__}, does not tell where its tokens lie in a text; give the draft a "
                "tokenizer.json (save_pretrained of its fast tokenizer writes one)"
            )
        self._id_of = draft.id_of
        self._unknown_id: int | None = draft.tokenizer.unk_token_id
        self.prefix: list[int] = self._find_prefix()
        """The begin-of-text token, where the draft's own tokenizer writes one."""

    def _find_prefix(self) -> list[int]:
        ids = self._tokenizer("").input_ids
        bos = self._tokenizer.bos_token_id
        return [bos] if bos is not None and ids[:1] == [bos] else []

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and the characters (start, end) that each covers.

        What looks like a special token is text. Characters that the tokenizer has no token for are left out: an
        unknown token would tell the draft model less than nothing.
        """
        try:
            ids, spans = self._encode(text)
        except Exception:  # noqa: BLE001 - what tokenizers without an unknown token raise for such a character
            ids, spans = self._encode_by_character(text)
        if self._unknown_id in ids:
            known = [number for number, token_id in enumerate(ids) if token_id != self._unknown_id]
            return [ids[number] for number in known], [spans[number] for number in known]
        return ids, spans

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
        )
        return found.input_ids, found.offset_mapping

    def _encode_by_character(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for start, character in enumerate(text):
            try:
                found, _ = self._encode(character)
            except Exception:  # noqa: BLE001 - this one has no token
                continue
            ids += found
            spans += [(start, start + 1)] * len(found)
        return ids, spans

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids of single bytes, for a character that is not complete yet; those without a token are left out."""
        ids = [self._id_of(bytes([byte])) for byte in data]
        return [token_id for token_id in ids if token_id is not None]


class RequestText:
    """One request's context. What ``update`` costs depends on what is new, not on the length of the text."""

    def __init__(self, text: TargetText, encoder: DraftEncoder) -> None:
        self.num_read = 0
        """Target ids taken in."""
        self._text = text
        self._encoder = encoder
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = text.drops_first_space
        self._encoded = _EncodedText(encoder)
        self._ids = list(encoder.prefix)
        self._num_partial = 0
        """Ids at the end that stand for the bytes of an incomplete character."""
        self._num_told = 0

    @property
    def ids(self) -> list[int]:
        """The context, in draft ids."""
        return self._ids

    def update(self, token_ids: Sequence[int]) -> DraftContext:
        """Take in what ``token_ids``, the whole sequence, has beyond what was read."""
        data = self._text.read(token_ids[self.num_read :])
        self.num_read = len(token_ids)
        num_unchanged = self._append(data) if data else len(self._ids)
        num_unchanged, self._num_told = min(num_unchanged, self._num_told), len(self._ids)
        return DraftContext(self._ids, num_unchanged)

    def _append(self, data: bytes) -> int:
        """Returns how many leading ids stand as they did."""
        text = self._decoder.decode(data)
        if self._drops_space and text:
            self._drops_space, text = False, text.removeprefix(" ")
        num_old = len(self._ids) - len(self._encoder.prefix) - self._num_partial
        position, ids = self._encoded.append(text) if text else (num_old, [])
        position += len(self._encoder.prefix)
        partial = self._encoder.encode_bytes(self._decoder.getstate()[0])
        self._num_partial = len(partial)
        old = self._ids[position:]
        self._ids[position:] = new = ids + partial
        return position + num_common(old, new)


class _EncodedText:
    """A text that grows at its end, as the tokenizer would encode it as a whole."""

    def __init__(self, encoder: DraftEncoder) -> None:
        self._encoder = encoder
        self._ids: list[int] = []
        self._spans: list[tuple[int, int]] = []
        """Characters, start and end, that each id covers."""
        self._tail = ""
        self._tail_start = 0
        """Characters of the text that are not kept any more."""

    def append(self, text: str) -> tuple[int, list[int]]:
        """Returns from which id on the encoding is another now, and the ids from there."""
        self._tail += text
        num_back, join = _WINDOW_TOKENS, None
        while join is None:
            window = self._window(num_back)
            first, offset = window or self._widest()
            ids, spans = self._encode_from(offset)
            join = self._agreement(first, ids, spans) or ((first, 0) if window is None else None)
            num_back *= _GROWTH
        position, taken = join
        self._ids[position:] = ids[taken:]
        self._spans[position:] = spans[taken:]
        self._forget_beginning()
        return position, ids[taken:]

    def _window(self, num_back: int) -> tuple[int, int] | None:
        """The first id of a window, and where in the text it begins: at a word if there is one near.

        None where the text that is kept does not reach back so far.
        """
        highest = len(self._ids) - num_back
        clean = None
        for first in range(highest, 0, -1):
            offset = self._spans[first - 1][1]
            if offset < self._tail_start:
                break
            if offset > self._spans[first][0]:
                continue  # two ids share a character
            clean = clean or (first, offset)
            if self._tail[offset - self._tail_start].isspace():
                return first, offset
            if highest - first >= _WORD_TOKENS:
                return clean
        return clean

    def _widest(self) -> tuple[int, int]:
        """All text that is kept."""
        if not self._tail_start:
            return 0, 0
        first = bisect_left(self._spans, self._tail_start, key=lambda span: span[0])
        while 0 < first < len(self._spans) and self._spans[first - 1][1] > self._spans[first][0]:
            first += 1  # two ids share a character
        covered = self._spans[first - 1][1] if first else 0
        return first, max(covered, self._tail_start)

    def _encode_from(self, offset: int) -> tuple[list[int], list[tuple[int, int]]]:
        ids, spans = self._encoder.encode(self._tail[offset - self._tail_start :])
        return ids, [(start + offset, end + offset) for start, end in spans]

    def _agreement(self, first: int, ids: list[int], spans: list[tuple[int, int]]) -> tuple[int, int] | None:
        """The first id, and its number in the window, from which on both encodings agree for a while."""
        number_at = {span: number for number, span in reversed([*enumerate(spans)])}
        for position in range(first, len(self._ids) - _NUM_AGREEING + 1):
            number = number_at.get(self._spans[position])
            if number is None:
                continue
            old = slice(position, position + _NUM_AGREEING)
            new = slice(number, number + _NUM_AGREEING)
            if self._ids[old] == ids[new] and self._spans[old] == spans[new]:
                return position, number
        return None

    def _forget_beginning(self) -> None:
        num_dropped = len(self._tail) - _KEPT_CHARS
        if num_dropped > _KEPT_CHARS:
            self._tail = self._tail[num_dropped:]
            self._tail_start += num_dropped


def num_common(old: Sequence[int], new: Sequence[int]) -> int:
    """How many leading ids two sequences share."""
    count = 0
    for one, other in zip(old, new, strict=False):
        if one != other:
            break
        count += 1
    return count
