"""One request's hidden states as a safetensors file that grows by a step's tokens at a time.

The format fits: ``hidden_states`` ``[tokens, layers, hidden]`` is row-major and the first tensor, so tokens are
appended; ``token_ids`` ``[tokens]`` int64 follows at the end; the header's room is kept free in front and filled last.
Only then does the file get its name, so that a name always means a complete file.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import torch

__all__ = ["GrowingFile", "complete_files", "file_problem", "layers_text", "size_of_files"]

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
_HEADER_ROOM = 512
_BUFFER_BYTES = 1 << 18
_NAME = re.compile(r"hs_.+\.safetensors")


@dataclass(frozen=True, slots=True)
class _Layout:
    """What all tokens of a file share."""

    dtype: str
    num_layers: int
    hidden_size: int


class GrowingFile:
    """A file under way, at ``path`` with ``.part`` added. Not thread-safe.

    ``metadata``: texts for the safetensors header.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Opens the part file, replacing one that a broken-off run left. Raises ``OSError``."""
        self.path = path
        self.num_tokens = 0
        self._num_state_bytes = 0
        self._part = path.with_name(f"{path.name}.part")
        self._metadata = dict(metadata)
        self._token_ids: list[int] = []
        self._layout: _Layout | None = None
        # JSON may be followed by blanks, and readers need a multiple of 8
        self._header_size = -(-(_HEADER_ROOM + len(json.dumps(self._metadata))) // 8) * 8
        self._file: BinaryIO = self._part.open("wb", buffering=_BUFFER_BYTES)
        self._file.write(bytes(8 + self._header_size))

    @property
    def num_bytes(self) -> int:
        """What it takes on disk."""
        return 8 + self._header_size + self._num_state_bytes + 8 * self.num_tokens

    def append(self, states: torch.Tensor, token_ids: Sequence[int]) -> None:
        """Add tokens: ``states`` ``[tokens, layers, hidden]`` on the CPU, contiguous. Raises ``OSError``."""
        if self._layout is None:
            self._layout = _layout_of(states)
        self._num_state_bytes += self._file.write(_bytes_of(states))
        self._token_ids.extend(token_ids)
        self.num_tokens += len(token_ids)

    def complete(self) -> None:
        """Write what is missing, down to the disk. Raises ``OSError``."""
        self._file.write(np.asarray(self._token_ids, dtype="<i8").tobytes())
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._header_size) + self._header().ljust(self._header_size))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def take_name(self) -> None:
        """Give the complete file its name. Raises ``OSError``."""
        self._part.replace(self.path)

    def discard(self) -> None:
        """Give the file up. Raises nothing."""
        with suppress(OSError):  # of a full disk: what is left in the buffer is not wanted
            self._file.close()
        with suppress(OSError):
            self._part.unlink(missing_ok=True)

    def _header(self) -> bytes:
        layout = self._layout or _Layout("F32", 0, 0)
        split = self._num_state_bytes
        header: dict[str, Any] = {
            "__metadata__": self._metadata,
            "hidden_states": {
                "dtype": layout.dtype,
                "shape": [self.num_tokens, layout.num_layers, layout.hidden_size],
                "data_offsets": [0, split],
            },
            "token_ids": {
                "dtype": "I64",
                "shape": [self.num_tokens],
                "data_offsets": [split, split + 8 * self.num_tokens],
            },
        }
        return json.dumps(header, separators=(",", ":")).encode()


def _layout_of(states: torch.Tensor) -> _Layout:
    return _Layout(_DTYPES[str(states.dtype).removeprefix("torch.")], states.shape[1], states.shape[2])


def _bytes_of(states: torch.Tensor) -> memoryview:
    import torch

    array: Any = states.view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def file_problem(path: Path, prompt_token_ids: Sequence[int], layers: Sequence[int]) -> str | None:
    """Why an existing file does not hold this prompt's states of these layers; None when it does."""
    try:
        with safe_open(path, framework="numpy") as file:
            found = (file.metadata() or {}).get("layers")
            token_ids = file.get_tensor("token_ids").tolist()
    except (OSError, SafetensorError) as error:
        return f"{path.name} is there and cannot be read: {error}"
    if found != layers_text(layers):
        return f"{path.name} is there with layers {found}, not {layers_text(layers)}"
    if token_ids[: len(prompt_token_ids)] != list(prompt_token_ids):
        return f"{path.name} is there and holds another prompt"
    return None


def layers_text(layers: Sequence[int]) -> str:
    """How a file's metadata writes its layers."""
    return json.dumps(list(layers))


def complete_files(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """The files that are complete, by what stands between ``hs_`` and the ending: a request id, or an index.

    For a run that goes on where another stopped: leave out the prompts whose names are there.
    """
    root = Path(folder)
    if not root.is_dir():
        return {}
    names = sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name))
    return {path.name.removeprefix("hs_").removesuffix(".safetensors"): path for path in names}


def size_of_files(folder: Path) -> int:
    """Bytes of the complete files in ``folder``."""
    return sum(path.stat().st_size for path in complete_files(folder).values())
