"""A shared index in a file, and corpora from files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from specplug_suffix.segment import Segment
from specplug_suffix.shared import SharedIndex

__all__ = ["read_corpus", "read_index", "write_index"]

FORMAT = "specplug-suffix 1"
_ARRAYS = ("token_ids", "piece_lengths", "piece_documents", "segment_pieces")


class StoredSegment(NamedTuple):
    """``cache_salt``: its namespace; ``is_corpus``: it belongs to none; ``pieces``: see ``Segment.pieces``."""

    cache_salt: str | None
    is_corpus: bool
    pieces: list[tuple[int, list[int]]]


def write_index(path: str | os.PathLike[str], shared: SharedIndex, *, vocab_size: int) -> None:
    """Write corpus and kept texts with their namespaces; the file appears whole or not at all."""
    import numpy as np
    from safetensors.numpy import save_file

    segments: list[tuple[str | None, bool, Segment]] = [(None, True, segment) for segment in shared.corpus]
    segments += [(salt, False, segment) for salt, segment in shared.kept()]
    pieces = [list(segment.pieces()) for _, _, segment in segments]
    flat = [piece for group in pieces for piece in group]
    columns: dict[str, Sequence[int]] = {
        "token_ids": [token_id for _, token_ids in flat for token_id in token_ids],
        "piece_lengths": [len(token_ids) for _, token_ids in flat],
        "piece_documents": [document for document, _ in flat],
        "segment_pieces": [len(group) for group in pieces],
    }
    metadata = {
        "format": FORMAT,
        "vocab_size": str(vocab_size),
        "segments": json.dumps([[salt, is_corpus] for salt, is_corpus, _ in segments]),
    }
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    save_file({name: np.asarray(column, dtype=np.int32) for name, column in columns.items()}, unfinished, metadata)
    unfinished.replace(target)


def read_index(path: str | os.PathLike[str], *, vocab_size: int) -> list[StoredSegment]:
    """The segments of a file that ``write_index`` wrote.

    Raises ``ValueError`` for any other file, and for one that was written for another vocabulary.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} has the format {metadata.get('format')!r}, not {FORMAT!r}")
            columns = {name: file.get_tensor(name).tolist() for name in _ARRAYS}
    except SafetensorError as error:
        raise ValueError(f"{path} is no index of specplug-suffix: {error}") from error
    if metadata["vocab_size"] != str(vocab_size):
        raise ValueError(f"{path} was written for {metadata['vocab_size']} token ids; this target has {vocab_size}")
    _check_ids(path, columns["token_ids"], vocab_size)
    return list(_segments(columns, json.loads(metadata["segments"])))


def _segments(columns: dict[str, list[int]], owners: list[tuple[str | None, bool]]) -> Iterator[StoredSegment]:
    bounds = pairwise(accumulate(columns["piece_lengths"], initial=0))
    texts = [columns["token_ids"][start:stop] for start, stop in bounds]
    pieces = list(zip(columns["piece_documents"], texts, strict=True))
    cuts = pairwise(accumulate(columns["segment_pieces"], initial=0))
    for (cache_salt, is_corpus), (start, stop) in zip(owners, cuts, strict=True):
        yield StoredSegment(cache_salt, is_corpus, pieces[start:stop])


def read_corpus(
    path: str | os.PathLike[str], *, vocab_size: int, encode: Callable[[str], list[int]] | None
) -> list[list[int]]:
    """The texts of a ``.jsonl`` file: each line a list of token ids, or a text that ``encode`` turns into them.

    Raises ``ValueError`` naming the line that is neither.
    """
    texts = []
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                texts.append(_read_line(f"{path}, line {number}", line, vocab_size, encode))
    return texts


def _read_line(where: str, line: str, vocab_size: int, encode: Callable[[str], list[int]] | None) -> list[int]:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if isinstance(value, str):
        if encode is None:
            raise ValueError(f"{where}: a text, and the target has no tokenizer; write a list of token ids")
        value = encode(value)
    if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
        raise ValueError(f"{where}: write a list of token ids, or a text in quotes")
    _check_ids(where, value, vocab_size)
    return value


def _check_ids(where: object, token_ids: list[int], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise ValueError(
            f"{where}: token ids run from 0 to {vocab_size - 1}; found {min(token_ids)} to {max(token_ids)}"
        )
