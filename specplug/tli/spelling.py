"""How the strings of a vocabulary spell bytes. Found by asking the tokenizer's own decoder, never by its class.

Two vocabularies can be compared only by what their tokens stand for: byte-level BPE writes a newline as ``Ċ``,
SentencePiece as ``<0x0A>``; the string ``¡`` is the byte A1 in the first and the letter (C2 A1) in the second.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

__all__ = ["MARKER", "ByteLevel", "Marked", "Raw", "Rendered", "Spelling", "find_spelling"]

MARKER = "\u2581"
"""SentencePiece's space."""
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_ANCHOR = "a"


class Spelling(ABC):
    """Between a token's string in the vocabulary and its bytes."""

    name: str

    @abstractmethod
    def to_bytes(self, token: Any) -> bytes | None:
        """What the token stands for; None when that is no sequence of bytes."""

    def forms(self, data: bytes) -> tuple[Any, ...] | None:
        """Every string that may spell ``data``, :meth:`byte_form` apart; None where only a look at all tokens tells."""
        return None

    def byte_form(self, byte: int) -> str | None:
        """The string of a token that stands in for a byte which no other token covers."""
        return None


def _byte_alphabet() -> str:
    """Character i stands for byte i in byte-level BPE: itself where it is printable, else from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return "".join(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))


class ByteLevel(Spelling):
    """Byte-level BPE (GPT-2 and most since, tiktoken vocabularies converted to it): one character per byte."""

    name = "byte-level BPE"

    def __init__(self) -> None:
        alphabet = _byte_alphabet()
        self._to_latin = {ord(char): byte for byte, char in enumerate(alphabet)}
        self._from_latin = dict(enumerate(alphabet))
        self._space = alphabet[ord(" ")]

    def to_bytes(self, token: str) -> bytes | None:
        text = token.replace(self._space, " ")
        if text.isascii() and text.isprintable():  # most tokens, and five times as fast
            return text.encode() if " " not in token else None
        if not self._to_latin.keys() >= set(map(ord, token)):
            return None
        return token.translate(self._to_latin).encode("latin-1")

    def forms(self, data: bytes) -> tuple[str, ...]:
        return (data.decode("latin-1").translate(self._from_latin),)


class Marked(Spelling):
    """SentencePiece: ``▁`` is a space, and with byte fallback ``<0xNN>`` is a byte; all else is text."""

    name = "SentencePiece"

    def __init__(self, *, has_byte_fallback: bool) -> None:
        self._has_byte_fallback = has_byte_fallback

    def to_bytes(self, token: str) -> bytes | None:
        if self._has_byte_fallback and (found := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(found[1])
        return token.replace(MARKER, " ").encode("utf-8", "surrogatepass")

    def forms(self, data: bytes) -> tuple[str, ...]:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return ()
        if MARKER in text or (self._has_byte_fallback and _BYTE_TOKEN.fullmatch(text)):
            return ()  # as a token, this string stands for something else
        return (text.replace(" ", MARKER),)

    def byte_form(self, byte: int) -> str | None:
        return f"<0x{byte:02X}>" if self._has_byte_fallback else None


class Raw(Spelling):
    """A tiktoken vocabulary as it is published: the tokens are bytes."""

    name = "bytes"

    def to_bytes(self, token: Any) -> bytes | None:
        return token if isinstance(token, bytes) else None

    def forms(self, data: bytes) -> tuple[bytes, ...]:
        return (data,)


class Rendered(Spelling):
    """Any other vocabulary: a token stands for the text that it adds behind another one."""

    name = "text"

    def __init__(self, tokenizer: Any) -> None:
        self._render = tokenizer.convert_tokens_to_string
        self._start = len(self._render([_ANCHOR]))

    def to_bytes(self, token: str) -> bytes | None:
        text: str = self._render([_ANCHOR, token])[self._start :]
        return None if _REPLACEMENT in text or not text else text.encode("utf-8", "surrogatepass")


def find_spelling(tokenizer: Any) -> Spelling:
    """The spelling of a Hugging Face tokenizer's vocabulary, found by decoding pieces that tell them apart."""
    if _has_byte_keys(tokenizer):
        return Raw()
    if _decodes(tokenizer, [_ANCHOR, "ĠĊ"], f"{_ANCHOR} \n"):
        return ByteLevel()
    if _decodes(tokenizer, [_ANCHOR, f"{MARKER}b"], f"{_ANCHOR} b"):
        return Marked(has_byte_fallback=_decodes(tokenizer, [_ANCHOR, "<0x41>"], f"{_ANCHOR}A"))
    return Rendered(tokenizer)


def _has_byte_keys(tokenizer: Any) -> bool:
    if getattr(tokenizer, "is_fast", False):
        return False  # its vocabulary holds text only, and reading it takes a while
    return isinstance(next(iter(tokenizer.get_vocab()), None), bytes)


def _decodes(tokenizer: Any, tokens: list[str], text: str) -> bool:
    try:
        found: object = tokenizer.convert_tokens_to_string(tokens)
    except Exception:  # noqa: BLE001 - foreign code, asked about strings that it may not know
        return False
    return found == text
