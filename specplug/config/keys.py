"""What is known about a configuration key beside its type: its group, its term, and who reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

__all__ = ["Key", "TermKind", "closest", "expectation", "key_of", "show", "term_fault", "term_note"]

TermKind: TypeAlias = Literal["acts", "plugin", "accepted", "refused"]
"""Acts here; acts where a plugin is installed that specplug does not have; accepted without effect here; refused,
naming the door that supports it."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of vLLM's vocabulary.

    ``why``: for a key that does not act, the reason, as the end of a sentence.
    ``neutral``: values that ask for nothing, beside None, False and empty ones.
    ``used_by``: the known methods that read the key; None: all of them.
    """

    group: str
    term: TermKind = "acts"
    why: str = ""
    neutral: tuple[object, ...] = ()
    used_by: frozenset[str] | None = None

    def asks_nothing(self, value: object) -> bool:
        """Whether ``value`` is the same as leaving the key out."""
        return value is None or value is False or value in ("", (), [], {}) or value in self.neutral


def key_of(field: FieldInfo) -> Key:
    """The ``Key`` that a field of our own models is annotated with."""
    return next(item for item in field.metadata if isinstance(item, Key))


def term_fault(where: str, value: object, key: Key) -> str | None:
    """The fault of a refused key that asks for something, else None."""
    if key.term != "refused" or key.asks_nothing(value):
        return None
    allowed = " or ".join(["leave it out", *(f"write {show(each)}" for each in key.neutral)])
    return f"{where}={show(value)}: {key.why}. vLLM supports it: run there (docs/configuration.md), or {allowed}."


def term_note(where: str, value: object, key: Key) -> str | None:
    """The note of a key that is accepted without effect, else None."""
    if key.term != "accepted" or value is None:
        return None
    return f"{where}={show(value)}: accepted, no effect here ({key.why})."


def show(value: object) -> str:
    """``value`` as the user would write it in JSON, shortened; Python's repr for what JSON cannot hold."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = _python_text(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _python_text(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # whole numbers of thousands of digits, endless nesting
        return f"a {type(value).__name__} too long to print"


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` was most likely meant to be."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a mapping"}


def expectation(field: FieldInfo) -> str | None:
    """What a field's values must be, in words; None for types that we have no words for."""
    annotation = _without_none(field.annotation)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(show(choice) for choice in get_args(annotation))
    kind = _KINDS.get(get_origin(annotation) or annotation)
    if kind is None:
        return None
    low = next((item.ge for item in field.metadata if isinstance(item, Ge)), None)
    above = next((item.gt for item in field.metadata if isinstance(item, Gt)), None)
    high = next((item.le for item in field.metadata if isinstance(item, Le)), None)
    if low is not None and high is not None:
        return f"{kind} from {low} to {high}"
    bounds = ((low, "of at least"), (above, "above"), (high, "of at most"))
    return " ".join([kind, *(f"{words} {bound}" for bound, words in bounds if bound is not None)])


def _without_none(annotation: Any) -> Any:
    kept = [part for part in get_args(annotation) if part is not type(None)]
    is_optional = type(None) in get_args(annotation)
    return kept[0] if is_optional and len(kept) == 1 else annotation
