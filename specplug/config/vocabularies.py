"""Vocabularies of tokenizers, compared; and read from a folder without loading the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["read_vocabulary", "vocabulary_fault"]


def vocabulary_fault(target: Mapping[str, int], draft: Mapping[str, int]) -> str | None:
    """The message for two vocabularies (token -> id) in which an id means different tokens; None otherwise.

    Ids that only one side has are its padding.
    """
    if target == draft:
        return None
    target_tokens, draft_tokens = _by_id(target), _by_id(draft)
    shared = target_tokens.keys() & draft_tokens.keys()
    different = min((each for each in shared if target_tokens[each] != draft_tokens[each]), default=None)
    if different is None:
        return None
    return (
        f"draft and target have different vocabularies: the first difference is at id {different}, "
        f"{_quoted(target_tokens[different])} in the target and {_quoted(draft_tokens[different])} in the draft. Set "
        "speculative_config.use_heterogeneous_vocab=true, or use a draft of the target's family."
    )


def _by_id(vocabulary: Mapping[str, int]) -> dict[int, str]:
    return {token_id: token for token, token_id in vocabulary.items()}


def _quoted(token: str) -> str:
    return json.dumps(token, ensure_ascii=False)


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Token -> id, added tokens included, of the folder's ``tokenizer.json``; None where there is none to read."""
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        listed: Any = content["model"]["vocab"]
        base = listed if isinstance(listed, dict) else {entry[0]: token_id for token_id, entry in enumerate(listed)}
        return {**base, **{each["content"]: each["id"] for each in content.get("added_tokens") or ()}}
    except (OSError, ValueError, LookupError, TypeError):
        return None  # who loads the tokenizer says what is wrong with it
