"""What token strings stand for, in each family of vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specplug.testing import toy_tokenizer
from specplug.tli import Vocabulary
from specplug.tli.spelling import ByteLevel, Marked, Raw, find_spelling

TEXTS = ["The quick brown fox", "  two  spaces", "a\tb\r\n\n", "Größe naïve ¡Hola!", "東京 🎉", "<s> is text", "▁"]


@pytest.mark.parametrize(
    ("name", "family"),
    [("bytes", "byte-level BPE"), ("marked", "SentencePiece"), ("prefixed", "SentencePiece")],
)
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_spell_the_text(tokenizers: Any, name: str, family: str, text: str) -> None:
    """Against the tokenizer's own encoder, which knows nothing of our tables."""
    if text == "▁" and name != "bytes":
        pytest.skip("SentencePiece cannot tell its marker from a space")
    tokenizer = tokenizers[name]
    vocabulary = Vocabulary(tokenizer, len(tokenizer))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    spelled = b"".join(map(vocabulary.bytes_of, ids))
    assert vocabulary.spelling.name == family
    assert spelled == (b" " if name == "prefixed" else b"") + text.encode()


def test_the_byte_alphabet_is_the_one_in_use() -> None:
    spelling = ByteLevel()
    characters = {spelling.forms(bytes([byte]))[0] for byte in range(256)}
    assert characters == set(pre_tokenizers.ByteLevel.alphabet())
    assert all(spelling.to_bytes(spelling.forms(bytes([byte]))[0]) == bytes([byte]) for byte in range(256))


def test_one_string_two_meanings() -> None:
    """What comparing strings joins: the raw byte A1, and the letter."""
    assert ByteLevel().to_bytes("¡") == b"\xa1"
    assert Marked(has_byte_fallback=True).to_bytes("¡") == "¡".encode()
    assert ByteLevel().to_bytes("Ċ") == Marked(has_byte_fallback=True).to_bytes("<0x0A>") == b"\n"
    assert Marked(has_byte_fallback=False).to_bytes("<0x0A>") == b"<0x0A>"


def test_a_string_outside_the_byte_alphabet_spells_nothing() -> None:
    assert ByteLevel().to_bytes("東") is None
    assert ByteLevel().to_bytes("a b") is None


def test_forms_never_name_a_token_of_other_bytes() -> None:
    """A marker or a byte token that is meant as text has no form: as a token its string stands for something else."""
    spelling = Marked(has_byte_fallback=True)
    for data in (b" a", b"a", b"\n", b"\xa1", "é".encode(), "▁".encode(), b"<0x41>", b"a <0x41>"):
        assert all(spelling.to_bytes(form) == data for form in spelling.forms(data)), data
    assert spelling.forms("▁".encode()) == ()
    assert spelling.forms(b"<0x41>") == ()
    assert spelling.forms(b"A") == ("A",)
    assert spelling.byte_form(0x41) == "<0x41>"


class TiktokenTokenizer:
    """A tokenizer whose vocabulary is the table that tiktoken publishes: bytes to ranks."""

    added_tokens_decoder: dict[int, Any] = {}
    special_tokens_map: dict[str, str] = {}
    all_special_ids: list[int] = []

    def __init__(self) -> None:
        self._ranks = {bytes([byte]): byte for byte in range(256)} | {b" a": 256, "é".encode(): 257}

    def __len__(self) -> int:
        return len(self._ranks)

    def get_vocab(self) -> dict[bytes, int]:
        return dict(self._ranks)

    def convert_tokens_to_string(self, tokens: list[bytes]) -> str:
        return b"".join(tokens).decode(errors="replace")

    def convert_tokens_to_ids(self, token: bytes) -> int:
        return self._ranks[token]


def test_tiktoken_tables_are_read_as_they_are(vocabulary: Callable[[str], Vocabulary]) -> None:
    raw = Vocabulary(TiktokenTokenizer(), 258)
    assert isinstance(raw.spelling, Raw)
    assert raw.bytes_of(257) == "é".encode()
    assert raw.id_of(b" a") == 256
    assert raw.id_of(b"absent") is None
    assert vocabulary("bytes").id_of(raw.bytes_of(97)) is not None


def test_other_vocabularies_spell_what_their_decoder_writes() -> None:
    plain = toy_tokenizer(["a", "bc", "é"], eos_token_id=None)
    assert find_spelling(plain).to_bytes("bc") == b"bc"
    words = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "c": 2, "[UNK]": 3}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece(cleanup=False)
    pieces = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=words), 4)
    assert [pieces.bytes_of(token_id) for token_id in (0, 1, 2)] == [b" a", b"b", b" c"]
    assert pieces.id_of(b"b") == 1
    assert pieces.id_of(b"##b") is None
