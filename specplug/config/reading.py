"""From what the user wrote (text, mapping, plugin entries) to plain mappings."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from specplug.config.keys import show
from specplug.errors import ConfigError

__all__ = ["PluginEntry", "read_mapping", "read_plugin_entry", "unique_keys"]

_EXAMPLE = {"method": "ngram", "num_speculative_tokens": 3}
_PYTHON_MARKS = ("'", "True", "False", "None")


def read_mapping(value: object, name: str) -> dict[str, Any] | None:
    """``value``, a mapping or its JSON text, with dashes in keys as underscores; None for None and ``null``.

    ``name`` is what messages call it. Raises ``ConfigError`` for anything else.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, str):
        value = _decode(value, name)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name}={show(value)} is of type {type(value).__name__}; write a mapping such as {json.dumps(_EXAMPLE)}"
        )
    return unique_keys(value, name)


def unique_keys(value: Mapping[Any, Any], name: str) -> dict[str, Any]:
    """The mapping with vLLM's spelling of keys. Raises ``ConfigError`` if two keys become one or one is no text."""
    result: dict[str, Any] = {}
    for key, each in value.items():
        if not isinstance(key, str):
            raise ConfigError(f"{name} has the key {show(key)}; keys are text")
        spelled = key.replace("-", "_")
        if spelled in result:
            raise ConfigError(f"{name}.{spelled} is given twice, with a dash and with an underscore; keep one")
        result[spelled] = each
    return result


def _decode(text: str, name: str) -> object:
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, name), parse_constant=_reject)
    except json.JSONDecodeError as error:
        raise ConfigError(_not_json(text, name, error)) from None
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply; it looks like {json.dumps(_EXAMPLE)}") from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{name} cannot be read: {error}") from None
    except _NotJsonNumberError as error:
        raise ConfigError(f"{name} holds {error}, which is not a JSON number; write a finite number") from None
    if isinstance(value, str):
        raise ConfigError(_quoted_twice(value, name))
    return value


class _NotJsonNumberError(Exception):
    """JSON text with NaN or Infinity in it, which Python's reader would take."""


def _reject(constant: str) -> object:
    raise _NotJsonNumberError(constant)


def _object(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ConfigError(f"{name}.{twice} is given twice; keep one")
    return result


def _not_json(text: str, name: str, error: json.JSONDecodeError) -> str:
    example = json.dumps(_EXAMPLE)
    literal = _python_literal(text)
    if isinstance(literal, Mapping) and any(mark in text for mark in _PYTHON_MARKS):
        return (
            f"{name} looks like a Python dict, not JSON: JSON needs double quotes and true/false/null; or pass the "
            f"mapping itself. First bad character at {error.pos}. As JSON: {show(literal)}"
        )
    stripped = text.strip()
    if len(stripped) > 1 and stripped[0] == stripped[-1] == "'":
        return f"{name} still has the shell's quotes around it; write {stripped[1:-1]} without the single quotes"
    if not stripped:
        return f"{name} is empty; write {example}, or leave it out to run without speculation"
    if stripped.replace("_", "").isalnum():
        return f'{name}="{stripped}" is a bare word; write {json.dumps({**_EXAMPLE, "method": stripped})}'
    return f"{name} is not valid JSON: {error.msg} at character {error.pos} of {show(text)}. It looks like {example}"


def _python_literal(text: str) -> object:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _quoted_twice(inner: str, name: str) -> str:
    try:
        settings = json.loads(inner)
    except (ValueError, RecursionError):
        settings = None
    settings = settings if isinstance(settings, dict) else _EXAMPLE
    as_yaml = "; ".join(f"{key}: {json.dumps(value)}" for key, value in settings.items())
    return (
        f"{name} decoded to *text*, not a mapping: it is quoted twice; remove one layer of quotes. In YAML write a "
        f"plain mapping ({name}: followed by indented lines {as_yaml}), or one single-quoted JSON string: "
        f"{name}: '{json.dumps(settings)}'"
    )


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """One element of ``plugins=``; ``where`` is what messages call it."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    where: str = "plugins"


def read_plugin_entry(value: object, number: int) -> PluginEntry:
    """An entry of ``plugins=``: ``{"name": ..., **options}``, ``"NAME"`` or ``"NAME:JSON"``.

    Raises ``ConfigError`` saying what to write.
    """
    where = f"plugins[{number}]"
    if isinstance(value, str):
        name, colon, text = value.partition(":")
        options = read_mapping(text, f"{where} ({name})") or {} if colon else {}
    elif isinstance(value, Mapping):
        options = unique_keys(value, where)
        name = options.pop("name", "")
    else:
        name, options = "", {}
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f'{where}={show(value)} names no plugin; write "NAME", "NAME:JSON" or {{"name": "NAME", ...}}'
        )
    return PluginEntry(name, options, f"{where} ({name})")
