"""Kernels of other packages: who is asked, who is believed, and what is said of those that cannot be."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from specplug.config import resolve_engine_args
from specplug.config.kernels import GROUP
from specplug.errors import ConfigError, ModelError
from specplug.models.kernels import find_decoder
from specplug.models.llama import LlamaModel
from specplug.proposers.draft_model import DraftModelOptions
from specplug.testing.architectures import tiny_model

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Entry points by name -> what ``decoder`` does; None for a package that cannot be imported."""

    def install(**decoders: Callable[[LlamaModel], Any] | None) -> None:
        module = SimpleNamespace()
        for name, decoder in decoders.items():
            if decoder is not None:
                setattr(module, name, SimpleNamespace(name=name, decoder=decoder))
        monkeypatch.setitem(sys.modules, "made_up_kernels", module)
        points = tuple(EntryPoint(name, f"made_up_kernels:{name}", GROUP) for name in decoders)
        monkeypatch.setattr("specplug.config.kernels.entry_points", lambda group: points)

    return install


def find(name: str, model: Any = None) -> Any:
    return find_decoder(name, tiny_model("llama") if model is None else model, 64)


def test_auto_asks_one_after_the_other(install: Install) -> None:
    install(b=lambda parts: "b's", a=lambda parts: None, c=lambda parts: "c's")
    assert find("auto") == "b's"
    assert find("c") == "c's"
    assert find("torch") is None


def test_without_any_torch_runs_the_model(install: Install) -> None:
    install()
    assert find("auto") is None


def test_a_name_that_is_not_installed(install: Install) -> None:
    install(b=lambda parts: None)
    says = 'no kernels of that name are installed; write one of: "auto", "torch", "b"'
    with pytest.raises(ConfigError, match=f'kernels="fast": {says}'):
        find("fast")
    with pytest.raises(ConfigError, match=f'kernels="fast": {says}'):
        resolve_engine_args("/no/model", {"kernels": "fast"})
    with pytest.raises(ValidationError, match=says):
        DraftModelOptions(draft_model_kernels="fast")


def test_one_asked_for_that_declines(install: Install) -> None:
    install(b=lambda parts: None)
    with pytest.raises(
        ConfigError, match=r'kernels="b" cannot run this model \(LlamaForCausalLM, torch.float32, cpu\)'
    ):
        find("b")


def test_a_model_of_another_shape_is_not_offered(install: Install) -> None:
    install(b=lambda parts: pytest.fail("offered"))
    assert find("auto", tiny_model("gpt_neox")) is None


def test_a_package_that_cannot_be_imported(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install(a=None, b=lambda parts: "b's")
    with caplog.at_level(logging.WARNING, "specplug"):
        assert find("auto") == "b's"
    assert 'kernels "a" (unknown) cannot be imported' in caplog.text
    with pytest.raises(ModelError, match=r'kernels "a" .unknown. cannot be imported'):
        find("a")


def test_one_that_fails_half_way(install: Install) -> None:
    def fail(parts: LlamaModel) -> None:
        next(parts.take_layers())
        raise MemoryError("no room")

    install(b=fail)
    with pytest.raises(ModelError, match='failed to take the model: MemoryError: no room; write kernels="torch"'):
        find("auto")


def test_layers_that_are_taken_leave_the_model() -> None:
    model = tiny_model("llama")
    parts = LlamaModel.of(model, 64)
    assert parts is not None
    weights = [layer.query.weight for layer in parts.layers()]
    taken = list(parts.take_layers())
    assert all(torch.equal(layer.query.weight, weight) for layer, weight in zip(taken, weights, strict=True))
    assert not list(model.get_decoder().layers.parameters())
