"""Validate a mapping against a pydantic model, one fault per key, keeping the values that are sound."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from specplug.config.keys import expectation, show

__all__ = ["field_name", "missing", "validate"]

ModelT = TypeVar("ModelT", bound=BaseModel)


def validate(
    model: type[ModelT],
    values: Mapping[str, Any],
    where: Callable[[str], str],
    *,
    explain: Callable[[str, Any], str | None] = lambda key, value: None,
    as_json: bool = True,
) -> tuple[ModelT | None, list[str]]:
    """``values`` as an instance of ``model`` and the faults; None when a required key is missing or unsound.

    ``where(key)`` is how a message names a key; ``explain(key, value)`` may give a better message than the
    generic one. Unsound values are left out of the instance. ``as_json``: strict as JSON is, where lists serve as
    tuples; otherwise strict in Python's types, values kept as they are.
    """
    sound = dict(values)
    faults: list[str] = []
    while True:
        try:
            return _build(model, sound, as_json=as_json), faults
        except ValidationError as error:
            errors = {str(each["loc"][0]) if each["loc"] else "": each for each in reversed(error.errors())}
        for key, each in errors.items():
            if key in sound or key not in values:  # else: required, and already a fault
                faults.append(explain(key, values.get(key)) or _describe(model, where, key, values, each))
        if any(key not in sound for key in errors):
            return None, faults
        for key in errors:
            del sound[key]


def _build(model: type[ModelT], values: Mapping[str, Any], *, as_json: bool) -> ModelT:
    """Without coercion of numbers or text. What JSON cannot hold is validated as Python values."""
    if not as_json:
        return model.model_validate(values, strict=True)
    try:
        text = json.dumps(values, default=os.fspath)
    except (TypeError, ValueError, RecursionError):
        return model.model_validate(values)
    return model.model_validate_json(text, strict=True)


def _describe(
    model: type[BaseModel], where: Callable[[str], str], key: str, values: Mapping[str, Any], error: Any
) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return f"{where('')}: {message}."
    if error["type"] == "missing" and key not in values:
        return missing(where(key))
    if error["type"] == "value_error":  # a validator's own words
        return f"{where(key)}={show(values.get(key))}: {message}."
    field = model.model_fields.get(field_name(model, key) or key)
    wanted = expectation(field) if field is not None and len(error["loc"]) == 1 else None
    if wanted is None:
        wanted = message[:1].lower() + message[1:]
        return f"{where(key)}={show(values.get(key))} is not valid: {wanted}."
    return f"{where(key)}={show(values.get(key))} is not valid: it must be {wanted}."


def missing(where: str) -> str:
    """The fault of a required key that is absent."""
    return f"{where} is required and missing."


def field_name(model: type[BaseModel], key: str) -> str | None:
    """The field that ``key`` sets, by name or alias; None when the model has none."""
    return next((name for name, names in _names(model) if key in names), None)


def _names(model: type[BaseModel]) -> Iterable[tuple[str, tuple[str | None, ...]]]:
    return ((name, (name, field.alias)) for name, field in model.model_fields.items())
