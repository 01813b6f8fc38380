"""A tokenizer's vocabulary by what its ids stand for: bytes, or a declared role."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from specplug.config.engine_terms import NO_TOKENIZER
from specplug.errors import ConfigError
from specplug.tli.spelling import Spelling, find_spelling

__all__ = ["Vocabulary"]

_UNKNOWN_ROLE = "unk_token"  # what "unknown" stands for differs: it is never a counterpart
_NEEDED = ("get_vocab", "convert_tokens_to_string", "convert_tokens_to_ids", "added_tokens_decoder")


class Vocabulary:
    """The ids below ``num_ids`` of a Hugging Face tokenizer.

    Special tokens stand for no bytes, whatever their string is: a literal ``<s>`` in a text is text. Ids without a
    token (a model's padding) and tokens that no bytes spell are left out of everything.
    """

    def __init__(
        self, tokenizer: Any, num_ids: int, *, eos_token_ids: Collection[int] = (), side: str = "this"
    ) -> None:
        """``num_ids``: rows of the model's output; ``eos_token_ids``: what ends the model's texts, if it says so.

        Raises ``ConfigError`` naming ``side`` where there is no tokenizer, or one that does not tell its vocabulary.
        """
        _check(tokenizer, side)
        self.tokenizer = tokenizer
        self.num_ids = num_ids
        self.num_tokens = len(tokenizer)
        self.is_fast: bool = getattr(tokenizer, "is_fast", False)
        self.spelling: Spelling = find_spelling(tokenizer)
        self._eos_token_ids = eos_token_ids
        self._added: Mapping[int, Any] = tokenizer.added_tokens_decoder  # a property that builds a new dict
        self._bytes: dict[int, bytes | None] = {}

    # --- special tokens

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that carry no text."""
        return frozenset(self.tokenizer.all_special_ids) | {i for i, token in self._added.items() if token.special}

    @cached_property
    def roles(self) -> dict[str, int]:
        """Declared role (``eos``, ``bos``, ``pad``, ...) -> id. An id that plays several has the first of them.

        The end of a text is what ends the model's, where that differs from the tokenizer's idea of it.
        """
        declared = {
            name: self.tokenizer.convert_tokens_to_ids(token)
            for name, token in self.tokenizer.special_tokens_map.items()
            if isinstance(token, str) and name != _UNKNOWN_ROLE
        }
        eos = declared.pop("eos_token", None)
        if self._eos_token_ids and eos not in self._eos_token_ids:
            eos = min(self._eos_token_ids)
        roles: dict[str, int] = {}
        for name, token_id in {"eos_token": eos, **declared}.items():
            if token_id is not None and token_id < self.num_ids and token_id not in roles.values():
                roles[name.removesuffix("_token")] = token_id
        return roles

    # --- bytes

    def bytes_of(self, token_id: int) -> bytes:
        """What an id stands for; nothing for special tokens and for ids without a token."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id] or b""

    def _find_bytes(self, token_id: int) -> bytes | None:
        if token_id in self.special_ids or token_id < 0:
            return None
        if token_id in self._added:
            return self._bytes_of_added(token_id)
        token = self._id_to_token(token_id)
        return None if token is None else self.spelling.to_bytes(token)

    def _bytes_of_added(self, token_id: int) -> bytes | None:
        """Added tokens are written as plain text; a decoder that knows no such string leaves them as they are."""
        content: str = self._added[token_id].content
        return content.encode() if self.spelling.name == "byte-level BPE" else self.spelling.to_bytes(content)

    def items(self) -> Iterator[tuple[int, bytes]]:
        """(id, bytes) of every id that stands for bytes, in no order. Reads the whole vocabulary."""
        to_bytes, num_ids, apart = self.spelling.to_bytes, self.num_ids, self._apart
        for token, token_id in self.tokenizer.get_vocab().items():
            if token_id < num_ids and token_id not in apart and (data := to_bytes(token)):
                yield token_id, data
        yield from self._added_items()

    def _added_items(self) -> Iterator[tuple[int, bytes]]:
        for token_id in self._added:
            if (
                token_id < self.num_ids
                and token_id not in self.special_ids
                and (data := self._bytes_of_added(token_id))
            ):
                yield token_id, data

    @cached_property
    def _apart(self) -> frozenset[int]:
        """Ids whose string in the vocabulary is not spelled as the others are."""
        return self.special_ids | self._added.keys()

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """Bytes -> the id that the tokenizer writes for them, of several the lowest. Reads the whole vocabulary."""
        return self._first_ids(self.items())

    @cached_property
    def _added_ids(self) -> dict[bytes, int]:
        return self._first_ids(self._added_items())

    def _first_ids(self, items: Iterable[tuple[int, bytes]]) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for token_id, data in items:
            other = found.setdefault(data, token_id)
            if other != token_id and self._rank(token_id) < self._rank(other):
                found[data] = token_id
        return found

    def _rank(self, token_id: int) -> tuple[bool, int]:
        """A byte token is written only where there is no other."""
        return token_id in self._byte_ids, token_id

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        forms = [form for byte in range(256) if (form := self.spelling.byte_form(byte)) is not None]
        return frozenset(token_id for form in forms if (token_id := self._token_to_id(form)) is not None)

    def id_of(self, data: bytes) -> int | None:
        """``ids[data]``, looked up without reading the whole vocabulary, where the spelling allows it."""
        forms = self.spelling.forms(data)
        if forms is None:
            return self.ids.get(data)
        lowest = self._added_ids.get(data)
        for form in forms:
            token_id = self._find(form)
            if token_id is not None and (lowest is None or token_id < lowest):
                lowest = token_id
        if lowest is None and len(data) == 1 and (byte_form := self.spelling.byte_form(data[0])) is not None:
            return self._find(byte_form)
        return lowest

    def _find(self, form: Any) -> int | None:
        token_id = self._token_to_id(form)
        return None if token_id is None or token_id >= self.num_ids or token_id in self._apart else token_id

    @cached_property
    def _token_to_id(self) -> Callable[[Any], int | None]:
        if self.is_fast:
            find: Callable[[Any], int | None] = self.tokenizer.backend_tokenizer.token_to_id
            return find
        return dict(self.tokenizer.get_vocab()).get

    @cached_property
    def _id_to_token(self) -> Callable[[int], Any]:
        if self.is_fast:
            find: Callable[[int], Any] = self.tokenizer.backend_tokenizer.id_to_token
            return find
        return {token_id: token for token, token_id in self.tokenizer.get_vocab().items()}.get


def _check(tokenizer: Any, side: str) -> None:
    if tokenizer is None:
        lack = (
            NO_TOKENIZER
            if side == "target"
            else f"the {side} model has none; put its tokenizer files beside its weights"
        )
        raise ConfigError(
            f"speculative_config.use_heterogeneous_vocab compares the two tokenizers, and {lack}, or use a draft model "
            "with the target's own vocabulary"
        )
    missing = [name for name in _NEEDED if not hasattr(tokenizer, name)]
    if missing:
        raise ConfigError(
            f"speculative_config.use_heterogeneous_vocab: the {side} model's tokenizer, {type(tokenizer).__name__}, "
            f"does not tell its vocabulary (no {missing[0]}); give a Hugging Face tokenizer"
        )
