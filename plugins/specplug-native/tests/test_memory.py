"""Memory in large pages."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch
from specplug_native import memory
from specplug_native.memory import LargePages


def test_tensors_lie_side_by_side_and_never_over_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CHUNK", 4096)
    pages = LargePages()
    shapes = [(3,), (5, 7), (1, 1, 1), (64, 9), (2, 2000), (1024,)]  # the last but one is larger than a chunk
    tensors = [pages.empty(shape, torch.bfloat16).fill_(number) for number, shape in enumerate(shapes)]
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == number).all())
    assert tensors[1].data_ptr() - tensors[0].data_ptr() == 64, "in one chunk"


def test_tensors_outlive_what_gave_them() -> None:
    tensor = LargePages().empty((1000,), torch.float32).fill_(7.0)
    LargePages().empty((1000,), torch.float32).fill_(8.0)
    assert bool((tensor == 7.0).all())


def test_a_system_without_large_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(mmap.mmap):
        def madvise(self, *_advice: int) -> None:
            raise OSError(22, "Invalid argument")

    names = {name: getattr(mmap, name) for name in ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_HUGEPAGE")}
    monkeypatch.setattr(memory, "mmap", SimpleNamespace(mmap=Small, **names))
    assert bool((LargePages().empty((2, 3), torch.int64).zero_() == 0).all())
