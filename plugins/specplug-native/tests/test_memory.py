"""Memory in large pages."""

from __future__ import annotations

import mmap
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from specplug_native import kernels, memory
from specplug_native.library import load_library
from specplug_native.memory import LargePages
from specplug_native.weights import PackedLinear, packed_bytes


def test_tensors_lie_side_by_side_and_never_over_each_other() -> None:
    pages = LargePages(4096)
    shapes = [(3,), (5, 7), (1, 1, 1), (64, 9), (2, 2000), (1024,)]  # the last but one is larger than a chunk
    tensors = [pages.empty(shape, torch.bfloat16).fill_(number) for number, shape in enumerate(shapes)]
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == number).all())
    assert tensors[1].data_ptr() - tensors[0].data_ptr() == 64, "in one chunk"


def test_tensors_outlive_what_gave_them() -> None:
    tensor = LargePages(4096).empty((1000,), torch.float32).fill_(7.0)
    LargePages(4096).empty((1000,), torch.float32).fill_(8.0)
    assert bool((tensor == 7.0).all())


@pytest.mark.skipif(load_library() is None, reason="this processor has no AVX-512 with bfloat16")
def test_a_part_that_goes_gives_its_memory_back() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    weight = torch.ones(1 << 15, 1 << 10, dtype=torch.bfloat16)
    before = mapped()
    for _ in range(8):
        linear = kernels.linear(weight, None)
        assert mapped() - before >= weight.nbytes
        del linear
    assert mapped() - before < weight.nbytes


def test_the_memory_of_a_layer_is_taken_at_once() -> None:
    layers = [torch.nn.Linear(num_in, num_out, bias=False) for num_in, num_out in ((64, 97), (130, 5), (2, 64))]
    pages = LargePages(packed_bytes(layers))
    packed = [PackedLinear(layer.weight.detach().bfloat16(), None, pages) for layer in layers]
    places = [each.struct.packed for each in packed]
    sizes = [4 * 32 * 64 * 2, 32 * 130 * 2, 2 * 32 * 2 * 2]
    assert [stop - start for start, stop in pairwise(places)] == sizes[:2], "in one chunk, one after the other"


def test_a_system_without_large_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(mmap.mmap):
        def madvise(self, *_advice: int) -> None:
            raise OSError(22, "Invalid argument")

    names = {name: getattr(mmap, name) for name in ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_HUGEPAGE")}
    monkeypatch.setattr(memory, "mmap", SimpleNamespace(mmap=Small, **names))
    assert bool((LargePages(64).empty((2, 3), torch.int64).zero_() == 0).all())
