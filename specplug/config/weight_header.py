"""What a safetensors file says it holds, without reading weights and without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["read_weight_header"]

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


def read_weight_header(file: Path) -> dict[str, Mapping[str, Any]]:
    """Name -> ``{"dtype": ..., "shape": [...], ...}`` of each tensor. Raises OSError or ValueError for another file."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header holds no mapping")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}
