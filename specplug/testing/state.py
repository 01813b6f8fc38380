"""What an object holds on to: a walk over everything reachable from a plugin instance."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

__all__ = ["find_mentions", "num_items"]

_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, CodeType, BuiltinFunctionType)
_MAX_OBJECTS = 2_000_000


def find_mentions(plugin: object, texts: Set[str], *, ignore: Iterable[object] = ()) -> list[str]:
    """Paths under ``plugin`` (and its module's containers) at which one of ``texts`` is a key or a value.

    ``ignore``: objects that are not the plugin's own and are not entered.
    """
    return [f"{path} ({value!r})" for path, value in _walk(plugin, ignore) if isinstance(value, str) and value in texts]


def num_items(plugin: object, *, ignore: Iterable[object] = ()) -> int:
    """Entries of all containers, arrays, tensors and buffers reachable from ``plugin`` and its module's containers."""
    return sum(_length(value) for _, value in _walk(plugin, ignore))


def _length(value: object) -> int:
    if hasattr(value, "numel") and not isinstance(value, type | ModuleType):
        return int(value.numel())
    if isinstance(value, str | type) or not hasattr(value, "__len__"):
        return 0
    try:
        return len(value)
    except TypeError:  # an array of no dimensions has a __len__ that raises
        return 1


def _walk(plugin: object, ignore: Iterable[object]) -> Iterator[tuple[str, Any]]:
    seen = {id(value) for value in ignore}
    todo: deque[tuple[str, Any]] = deque([(type(plugin).__name__, plugin), *_module_state(plugin)])
    while todo and len(seen) < _MAX_OBJECTS:
        path, value = todo.popleft()
        if id(value) in seen and not isinstance(value, str):
            continue
        seen.add(id(value))
        yield path, value
        todo.extend(_children(path, value))


def _module_state(plugin: object) -> Iterator[tuple[str, Any]]:
    """Containers at module level, where per-request state hides from the instance."""
    module = sys.modules.get(type(plugin).__module__)
    for name, value in list(vars(module).items()) if module else []:
        if not name.startswith("__") and isinstance(value, dict | list | set | deque):
            yield f"{type(plugin).__module__}.{name}", value


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _LEAVES) or _is_array(value):
        return
    if isinstance(value, FunctionType):
        for number, cell in enumerate(value.__closure__ or ()):
            yield f"{path}.<closure {number}>", cell.cell_contents
    elif isinstance(value, MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, Mapping):
        for key, item in list(value.items()):
            yield f"{path} key", key
            yield f"{path}[{key!r}]", item
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for number, item in enumerate(list(value)):
            yield f"{path}[{number}]", item
    yield from _attributes(path, value)


def _attributes(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    names = list(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names.extend([slots] if isinstance(slots, str) else slots)
    for name in names:
        try:
            yield f"{path}.{name}", object.__getattribute__(value, name)
        except AttributeError:  # a slot that was never filled, or one with a mangled name
            continue


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")
