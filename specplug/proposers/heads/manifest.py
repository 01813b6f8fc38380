"""Whether a head's folder holds what its format says: its config, and its tensors by name and shape.

Importing this module imports no torch, so that configurations can be checked before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from specplug.errors import ModelError
from specplug.proposers.heads.files import StoredTensor

__all__ = ["Shapes", "listed", "read_head_config", "size_of", "tensor_faults"]

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape."""


def read_head_config(folder: Path) -> Mapping[str, Any]:
    """The folder's ``config.json``. Raises ModelError where it cannot be read or is no mapping."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"its config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError("its config.json holds no mapping")
    return config


def size_of(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number, 1 or more. Raises ModelError naming the key for anything else, and for none without a default."""
    value = config.get(key, default)
    if type(value) is not int or value < 1:
        raise ModelError(f"{key}={value!r} in its config.json must be a whole number, 1 or more")
    return value


def tensor_faults(tensors: Mapping[str, StoredTensor], required: Shapes, optional: Shapes, what: str) -> Iterator[str]:
    """What is missing, of another shape, or unknown; ``what`` names the format."""
    known = {**optional, **required}
    if missing := [name for name in required if name not in tensors]:
        yield f"tensors are missing: {listed(missing)}"
    for name, tensor in tensors.items():
        if name in known and tensor.shape != known[name]:
            yield f'"{name}" has the shape {list(tensor.shape)}, and its config says {list(known[name])}'
    if unknown := [name for name in tensors if name not in known]:
        yield f"{what} has no tensors like these: {listed(unknown)}"


def listed(names: Iterable[str]) -> str:
    """A few of them, and how many more there are."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:4])
    return shown if len(ordered) <= 4 else f"{shown} and {len(ordered) - 4} more"
