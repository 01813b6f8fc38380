"""Installed kernels, by what their packages say of themselves: nothing is imported."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, TypeAlias

from pydantic import AfterValidator

from specplug.config.keys import show

__all__ = ["AUTO", "GROUP", "TORCH", "KernelsName", "installed_kernels", "kernels_fault"]

GROUP = "specplug.kernels"
"""Of the entry points that name a :class:`specplug.models.kernels.Kernels`."""
AUTO, TORCH = "auto", "torch"


def installed_kernels() -> dict[str, EntryPoint]:
    """By name, in the order in which "auto" asks them."""
    return {each.name: each for each in sorted(entry_points(group=GROUP))}


def kernels_fault(name: str) -> str | None:
    """What is wrong with a name of kernels; None for one that can be asked."""
    names = (AUTO, TORCH, *installed_kernels())
    if name in names:
        return None
    return f"no kernels of that name are installed; write one of: {', '.join(map(show, names))}"


def _installed(name: str) -> str:
    if (fault := kernels_fault(name)) is not None:
        raise ValueError(fault)
    return name


KernelsName: TypeAlias = Annotated[str, AfterValidator(_installed)]
"""A setting that names kernels; those that are not installed are refused."""
