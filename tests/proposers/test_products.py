"""A head's linear layers run on what its target runs on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from specplug.models.packing import PackedLinear, can_pack
from specplug.proposers.heads.products import make_linears_fast, target_output

CPU = torch.device("cpu")


def head() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4, bias=False))


class Doubling:
    """Kernels whose products are twice what they should be, for an even number of inputs of at least ten."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return (lambda states: 2 * states @ weight.T) if weight.shape[1] >= 10 else None


def test_kernels_of_the_target_take_the_layers_they_can() -> None:
    module = head()
    states = torch.randn(3, 8)
    expected = 2 * module(states)
    make_linears_fast(module, SimpleNamespace(kernels=Doubling(), device=CPU, dtype=torch.float32))
    assert torch.allclose(module(states), expected)
    assert [type(layer) is torch.nn.Linear for layer in module] == [True, False, False]


def test_without_kernels_torch_packs_what_it_can() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        module = head().to(dtype)
        make_linears_fast(module, SimpleNamespace(kernels=None, device=CPU, dtype=dtype))
        is_packed = [type(layer) is PackedLinear for layer in module]
        assert any(is_packed) is (can_pack(CPU, dtype))


def test_the_targets_output_is_run_as_the_target_runs_it() -> None:
    output = torch.nn.Linear(8, 16)
    model = SimpleNamespace(get_output_embeddings=lambda: output)
    states = torch.randn(3, 8)
    assert torch.equal(target_output(SimpleNamespace(model=model))(states), output(states))
    assert target_output(SimpleNamespace(model=model, project=lambda states: "own"))(states) == "own"
