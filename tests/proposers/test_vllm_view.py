from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specplug.errors import SpecplugError
from specplug.methods import NoOptions, PluginConfig, PluginContext
from specplug.proposers.vllm_view import VllmConfigView
from specplug.types import Session


def view(target: Any = None, **settings: Any) -> VllmConfigView:
    session = Session(
        vocab_size=64, max_num_seqs=8, max_model_len=128, num_speculative_tokens=5, device="cpu", dtype="bfloat16"
    )

    def refuse(*_: Any) -> Any:
        raise SpecplugError("not used")

    config = PluginConfig("custom_class", 5, NoOptions(), settings, {"mine": {"alpha": 1}})
    return VllmConfigView(config, PluginContext(session, target or SimpleNamespace(model=None), refuse, refuse))


def test_what_a_proposer_may_read() -> None:
    config = object()
    seen = view(SimpleNamespace(model=SimpleNamespace(config=config)), model="a.B", prompt_lookup_max=None)
    assert seen.speculative_config.num_speculative_tokens == 5
    assert seen.speculative_config.method == "custom_class"
    assert seen.speculative_config.model == "a.B"
    assert seen.speculative_config.prompt_lookup_max is None
    assert seen.model_config.max_model_len == 128
    assert seen.model_config.get_vocab_size() == 64
    assert seen.model_config.dtype is torch.bfloat16
    assert seen.model_config.hf_config is config
    assert seen.scheduler_config.max_num_seqs == 8
    assert seen.device_config.device == torch.device("cpu")
    assert seen.additional_config["mine"] == {"alpha": 1}


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("cache_config", ["vllm_config.model_config", "vllm_config.additional_config"]),
        ("model_config.head_size", ["vllm_config.model_config.max_model_len", "vllm_config.model_config.dtype"]),
        ("model_config.hf_config", ["vllm_config.model_config.get_vocab_size"]),
        ("speculative_config.temperature", ["vllm_config.speculative_config.num_speculative_tokens"]),
        ("scheduler_config.max_num_batched_tokens", ["vllm_config.scheduler_config.max_num_seqs"]),
    ],
)
def test_anything_else_raises_naming_what_there_is(path: str, named: list[str]) -> None:
    seen: Any = view()
    *parents, last = path.split(".")
    for parent in parents:
        seen = getattr(seen, parent)
    with pytest.raises(AttributeError) as caught:
        getattr(seen, last)
    assert f"vllm_config.{path} is not available" in str(caught.value)
    assert all(name in str(caught.value) for name in named)
    assert getattr(seen, last, "fallback") == "fallback"


def test_private_look_ups_and_copies_do_not_recurse() -> None:
    seen = view()
    assert not hasattr(seen, "__deepcopy__")
    assert copy.copy(seen).model_config.max_model_len == 128


def test_additional_config_is_read_only() -> None:
    with pytest.raises(TypeError):
        view().additional_config["other"] = 1
