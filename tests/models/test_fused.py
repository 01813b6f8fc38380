"""Fused decoder layers give the same bits as transformers' own, also through the packed forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specplug.models import fused
from specplug.models.fused import FusedLayer, fuse_layers
from specplug.models.packing import can_pack, pack_linears
from specplug.models.runner import TargetRunner
from specplug.testing.architectures import ragged_logits, tiny_model
from specplug.testing.models import tiny_llama

pytestmark = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.bfloat16), reason="this CPU or build of torch has no bfloat16 in oneDNN"
)


def layers_of(model: Any) -> list[Any]:
    return list(model.get_decoder().layers)


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (length,), generator=generator) for length in (9, 1, 23)]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_fused_model_has_the_same_logits(name: str) -> None:
    plain, model = (tiny_model(name).to(torch.bfloat16) for _ in range(2))
    assert fuse_layers(model) == len(layers_of(model)) > 0
    assert all(type(layer) is FusedLayer for layer in layers_of(model))
    for length in (1, 6, 40):
        ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            assert torch.equal(plain(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_packed_forward_has_the_same_logits(name: str) -> None:
    plain, model = (tiny_model(name).to(torch.bfloat16) for _ in range(2))
    fuse_layers(model)
    pack_linears(model)
    limits = {"max_num_seqs": 3, "max_model_len": 64, "max_query_tokens": 16}
    expected, got = (ragged_logits(TargetRunner(each, **limits), prompts()) for each in (plain, model))
    assert all(map(torch.equal, expected, got))


@pytest.mark.parametrize("name", ["gemma3", "gpt_neox"])
def test_other_layers_are_left_alone(name: str) -> None:
    model = tiny_model(name).to(torch.bfloat16)
    assert fuse_layers(model) == 0
    assert not any(isinstance(module, FusedLayer) for module in model.modules())


def test_float32_is_left_alone() -> None:
    assert fuse_layers(tiny_llama()) == 0


def test_layers_that_would_differ_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused.Turn, "__call__", lambda self, heads: heads * self.cos)
    assert fuse_layers(tiny_llama().to(torch.bfloat16)) == 0


@pytest.mark.parametrize(("activation", "num_fused"), [("silu", 3), ("relu", 3), ("gelu", 0)])
def test_activations_that_round_by_place_are_left_alone(activation: str, num_fused: int) -> None:
    assert fuse_layers(tiny_model("llama", hidden_act=activation).to(torch.bfloat16)) == num_fused


def test_hidden_states_can_be_tapped() -> None:
    plain, model = (tiny_llama().to(torch.bfloat16) for _ in range(2))
    fuse_layers(model)
    states: list[torch.Tensor] = []
    for each in (plain, model):
        handle = each.get_decoder().layers[0].register_forward_hook(lambda module, args, output: states.append(output))
        with torch.inference_mode():
            each(torch.arange(8)[None])
        handle.remove()
    assert torch.equal(*states)
