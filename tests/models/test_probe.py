"""What is refused at start, by attributes and by trial; what passes; and that the model is left as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import Phi3Config

from specplug.errors import ModelError
from specplug.models.probe import check_config, check_model, longest_exact_length, probe_model
from specplug.testing.architectures import REFUSED_ARCHITECTURES, SUPPORTED_ARCHITECTURES, tiny_model

REASONS = {
    "mamba2": "state|no key-value cache",
    "jamba": "recurrent or linear-attention state",
    "lfm2": "recurrent or linear-attention state",
    "recurrent_gemma": "recurrent or linear-attention state",
    "rwkv": "no key-value cache",
    "bloom": "alibi",
    "falcon": "alibi",
    "gpt_oss": "attention sinks",
    "gemma2": "soft-caps its attention logits",
    "llama4_text": "chunked",
}


def state_of(model: Any) -> tuple[str, bool, int]:
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    return model.config._attn_implementation, model.training, hooks


@pytest.mark.parametrize("name", REFUSED_ARCHITECTURES)
def test_B84_state_that_cannot_be_rolled_back_is_refused_by_name(name: str) -> None:
    model = tiny_model(name)
    before = state_of(model)
    with pytest.raises(ModelError, match=re.escape(f'model type "{name}"')) as caught:
        check_model(model)
        probe_model(model)
    assert re.search(REASONS[name], str(caught.value))
    assert state_of(model) == before


@pytest.mark.parametrize("name", REFUSED_ARCHITECTURES)
def test_the_trial_alone_refuses_them_too(name: str) -> None:
    model = tiny_model(name)
    before = state_of(model)
    with pytest.raises(ModelError, match=re.escape(f'model type "{name}"')):
        probe_model(model)
    assert state_of(model) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SUPPORTED_ARCHITECTURES)
def test_supported_models_pass(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name).to(dtype)
    model.train()
    before = state_of(model)
    check_model(model)
    probe_model(model)
    assert state_of(model) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_that_leak_into_each_other_are_noticed(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    model.model.layers[1].mlp.register_forward_hook(_mix_tokens)
    with pytest.raises(ModelError, match="gave other logits than a plain forward"):
        probe_model(model)


def _mix_tokens(_module: torch.nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
    return output + output.mean(1, keepdim=True)


def test_positions_that_are_not_those_given_are_noticed() -> None:
    model = tiny_model("llama")
    model.model.rotary_emb.register_forward_pre_hook(_count_positions, with_kwargs=True)
    with pytest.raises(ModelError, match="gave other logits than a plain forward"):
        probe_model(model)


def _count_positions(
    _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions = kwargs["position_ids"]
    return args, kwargs | {"position_ids": torch.arange(positions.shape[1])[None]}


def test_a_trial_that_raises_names_the_model_and_the_cause() -> None:
    model = tiny_model("llama")
    model.model.layers[2].register_forward_hook(_fail_on_one_row_of_many_tokens)
    with pytest.raises(ModelError, match=r'model type "llama".* RuntimeError: no such shape'):
        probe_model(model)


def _fail_on_one_row_of_many_tokens(_module: torch.nn.Module, _args: object, output: torch.Tensor) -> None:
    if output.shape[1] == 13:
        raise RuntimeError("no such shape")


def test_a_model_of_few_positions_is_not_tried() -> None:
    probe_model(tiny_model("gpt2", n_positions=12))


def test_the_trial_costs_six_forwards() -> None:
    model = tiny_model("llama")
    calls: list[int] = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    probe_model(model)
    assert len(calls) == 6


def test_encoder_decoders_are_refused() -> None:
    config = tiny_model("llama").config
    config.is_encoder_decoder = True
    with pytest.raises(ModelError, match="encoder-decoder"):
        check_config(config)


def test_shared_keys_and_values_are_refused() -> None:
    config = tiny_model("llama").config
    config.num_kv_shared_layers = 1
    with pytest.raises(ModelError, match="share the keys and values"):
        check_config(config)


def test_longrope_is_exact_up_to_its_original_length() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
        max_position_embeddings=4096,
        original_max_position_embeddings=1024,
        rope_parameters=rope | {"original_max_position_embeddings": 1024},
    )
    assert longest_exact_length(config) == 1024
    assert longest_exact_length(tiny_model("llama").config) is None
    assert longest_exact_length(tiny_model("gemma3").config) is None
