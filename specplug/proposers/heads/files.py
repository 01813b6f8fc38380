"""Safetensors checkpoints of heads: what a folder holds, without reading weights; and the weights, one by one.

Importing this module imports no torch, so that configurations can be checked before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specplug.config.weight_header import read_weight_header
from specplug.errors import ModelError

if TYPE_CHECKING:
    import torch

__all__ = ["StoredTensor", "read_tensor", "stored_tensors"]

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it: "F32", "BF16", "I64", "BOOL", ..."""


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name -> tensor of all ``*.safetensors`` files in ``folder``; only their headers are read.

    Raises ModelError where there are none (for pickles, with how to convert them) or one cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(_without_safetensors(folder))
    return {tensor.name: tensor for file in files for tensor in _header(file)}


def _without_safetensors(folder: Path) -> str:
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if not pickles:
        return f'"{folder}" holds no weights: no *.safetensors file'
    return (
        f'"{folder}" holds pickled weights only ({pickles[0]}), and unpickling may run code; convert them once, in '
        'that folder: python -c "import torch, safetensors.torch as s; '
        "s.save_file({k: v.contiguous().clone() for k, v in "
        f"torch.load('{pickles[0]}', weights_only=True).items()}}, 'model.safetensors')\""
    )


def _header(file: Path) -> list[StoredTensor]:
    try:
        entries = read_weight_header(file)
        return [StoredTensor(file, name, tuple(each["shape"]), each["dtype"]) for name, each in entries.items()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f'"{file}" is not a readable safetensors file: {error}') from error


def read_tensor(tensor: StoredTensor) -> torch.Tensor:
    """The tensor itself, on the CPU, as it is stored. Raises ModelError for a damaged file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(tensor.file, framework="pt") as file:
            read: torch.Tensor = file.get_tensor(tensor.name)
    except (OSError, SafetensorError) as error:
        raise ModelError(f'"{tensor.file}": "{tensor.name}" cannot be read: {error}') from error
    return read
