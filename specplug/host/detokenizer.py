"""Token ids to text, incrementally: no broken characters, and the same text whatever the block size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Detokenizer"]

_CONTEXT_TOKENS = 6  # prompt tokens decoded along, so that a leading space is rendered as inside running text
_REPLACEMENT = "\ufffd"  # what an unfinished multi-byte character decodes to


class Detokenizer:
    """The text of one request's output. Without a tokenizer the text stays empty.

    ``error``: why the tokenizer could not decode, if it could not; the text then stays as it was.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self.text = ""
        self.error: str | None = None
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._prefix_start = 0
        self._read_start = len(self._ids)
        self._num_seen = 0
        self._is_cut = False

    def append(self, token_ids: Sequence[int]) -> None:
        """Take in output tokens; text that ends inside a character waits for its next token."""
        self._num_seen += len(token_ids)
        if self._tokenizer is None or not token_ids:
            return
        self._ids.extend(token_ids)
        self._render(flush=False)

    def catch_up(self, output_token_ids: Sequence[int]) -> None:
        """Take in those tokens of the whole output that were not appended yet."""
        self.append(output_token_ids[self._num_seen :])

    def flush(self) -> None:
        """The output has ended: render what was held back as it is."""
        if self._tokenizer is not None and not self._is_cut:
            self._render(flush=True)

    def truncate(self, length: int) -> None:
        """Cut the text, for good: a stop string ended the output."""
        self.text = self.text[:length]
        self._is_cut = True

    def _render(self, *, flush: bool) -> None:
        try:
            self._extend_text(flush=flush)
        except Exception as error:  # noqa: BLE001 - foreign code; it ends this request and no other
            self.error = f"the tokenizer cannot decode the output: {type(error).__name__}: {error}"
            self._tokenizer = None

    def _extend_text(self, *, flush: bool) -> None:
        prefix = self._decode(self._ids[self._prefix_start : self._read_start])
        rendered = self._decode(self._ids[self._prefix_start :])
        if len(rendered) <= len(prefix) or (rendered.endswith(_REPLACEMENT) and not flush):
            return
        self.text += rendered[len(prefix) :]
        self._prefix_start = self._read_start
        self._read_start = len(self._ids)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text
