"""Packed linear layers give the same bits; only models that specplug loaded are changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specplug import LLM, SamplingParams
from specplug.models.packing import PackedLinear, can_pack, pack_linears
from specplug.testing.models import tiny_llama

needs_packing = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.bfloat16), reason="this CPU or build of torch has no bfloat16 in oneDNN"
)


def tiny_bfloat16(**overrides: Any) -> Any:
    return tiny_llama(**overrides).to(torch.bfloat16)


def packed_in(model: torch.nn.Module) -> list[PackedLinear]:
    return [layer for layer in model.modules() if isinstance(layer, PackedLinear)]


@needs_packing
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_has_the_same_logits(tied: bool) -> None:
    overrides = {"tie_word_embeddings": tied, "attention_bias": True}
    plain, packed = tiny_bfloat16(**overrides), tiny_bfloat16(**overrides)
    assert pack_linears(packed) == len(packed_in(packed)) == 15
    for length in (1, 6, 40):
        ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            assert torch.equal(plain(ids).logits, packed(ids).logits)


@needs_packing
def test_plain_weights_are_freed_except_the_heads() -> None:
    model = tiny_bfloat16()
    pack_linears(model)
    head = model.get_output_embeddings()
    assert isinstance(head, PackedLinear)
    assert head.weight is not None
    assert [layer.weight for layer in packed_in(model) if layer is not head] == [None] * 14


@needs_packing
def test_a_slice_of_a_larger_tensor_is_read_right() -> None:
    layer = torch.nn.Linear(32, 48, dtype=torch.bfloat16)
    packed = PackedLinear(layer)
    states = torch.randn(5, 2, 64).to(torch.bfloat16)[:, :, ::2]
    with torch.inference_mode():
        assert torch.equal(packed(states.contiguous()), packed(states))


def test_float32_is_left_alone() -> None:
    assert not can_pack(torch.device("cpu"), torch.float32)
    model = tiny_llama()
    assert pack_linears(model) == 0


@needs_packing
def test_loaded_models_are_packed_and_borrowed_ones_are_not(tmp_path: Path) -> None:
    model = tiny_bfloat16()
    model.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompt = {"prompt_token_ids": [1, 2, 3]}
    with LLM(str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True) as llm:
        assert packed_in(llm._target.model)
        [loaded] = llm.generate(prompt, params)
    with LLM(model) as llm:
        assert not packed_in(model)
        [borrowed] = llm.generate(prompt, params)
    assert loaded.outputs[0].token_ids == borrowed.outputs[0].token_ids
