"""Which folders are MLP speculators: published sizes and names, and every fault said before weights load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from specplug_mlp.checkpoint import Checkpoint, SpeculatorConfig, expected_tensors
from specplug_mlp.sample import SAMPLE_CONFIG, sample_tensors

from specplug import LLM, ConfigError, ModelError
from specplug.testing import MarkovTarget, tiny_llama

Save = Callable[..., Path]

TIED = {"tie_weights": True, "scale_input": True}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "llama2-13b": ({"emb_dim": 5120, "inner_dim": 4096, "vocab_size": 32000, "n_predict": 3}, 3),
    "llama3-8b": ({"emb_dim": 4096, "inner_dim": 3072, "vocab_size": 128256, "n_predict": 4}, 4),
    "llama3-70b": (
        {
            "emb_dim": 8192,
            "inner_dim": 3584,
            "vocab_size": 128256,
            "n_predict": 4,
            "tie_weights": True,
            "scale_input": True,
        },
        4,
    ),
    "granite-20b-code": ({"emb_dim": 6144, "inner_dim": 4096, "vocab_size": 49152, "n_predict": 4}, 4),
    "granite-34b-code": (
        {
            "emb_dim": 6144,
            "inner_dim": 6144,
            "vocab_size": 49152,
            "n_predict": 5,
            "tie_weights": True,
            "scale_input": True,
        },
        5,
    ),
    "llama2-7b": ({}, 3),
}
"""Configs of released speculators; what equals the published default is left out, as their files do."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_of_published_speculators(name: str) -> None:
    values, num_stages = PUBLISHED[name]
    config = SpeculatorConfig.parse({"model_type": "mlp_speculator", **values})
    shapes = expected_tensors(config, config.n_predict)
    inner, vocab = values.get("inner_dim", 4096), values.get("vocab_size", 32000)
    assert len(shapes) == 5 * num_stages
    assert shapes["proj.0.weight"] == (inner, values.get("emb_dim", 4096))
    for stage in range(num_stages):
        assert shapes[f"emb.{stage}.weight"] == shapes[f"head.{stage}.weight"] == (vocab, inner)
        assert shapes[f"ln.{stage}.weight"] == shapes[f"ln.{stage}.bias"] == (inner,)
        assert stage == 0 or shapes[f"proj.{stage}.weight"] == (inner, inner)


def fault(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        Checkpoint.read(folder)
    return str(caught.value)


def test_faults_name_the_tensors(save: Save) -> None:
    tensors = sample_tensors(SAMPLE_CONFIG)
    missing = {name: value for name, value in tensors.items() if "head.3" not in name}
    assert "tensors are missing: head.3.weight" in fault(save("a", tensors=missing))
    wrong = {**tensors, "speculator.proj.1.weight": torch.zeros(24, 32)}
    assert '"proj.1.weight" has the shape [24, 32], and its config says [24, 24]' in fault(save("b", tensors=wrong))
    unknown = {**tensors, "speculator.gate.weight": torch.zeros(1)}
    assert "an MLP speculator has no tensors like these: gate.weight" in fault(save("c", tensors=unknown))
    assert "tensors are missing: emb.4.weight, head.4.weight" in fault(save("d", tensors=tensors, n_predict=5))


def test_another_layout_is_unknown(save: Save) -> None:
    other = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert 'model_type "llama" is no MLP speculator; supported is the published layout' in fault(save(**other))


def test_tied_single_stages_cannot_be(save: Save) -> None:
    assert "ties nothing" in fault(save(n_predict=1, tie_weights=True))


@pytest.mark.parametrize("value", ["3", 0, 2.0, True])
def test_sizes_are_whole_numbers(save: Save, value: Any) -> None:
    tensors = sample_tensors(SAMPLE_CONFIG)
    assert f"n_predict={value!r} in its config.json must be a whole number" in fault(
        save(tensors=tensors, n_predict=value)
    )


def test_pickles_are_refused_with_the_conversion(save: Save) -> None:
    folder = save()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    text = fault(folder)
    assert "pickled weights only (pytorch_model.bin)" in text
    assert "weights_only=True" in text
    assert "safetensors" in text


def test_a_truncated_vocabulary_needs_its_map(save: Save) -> None:
    config = {**SAMPLE_CONFIG, "truncated_vocab_size": 16}
    tensors = sample_tensors(config)
    assert "the tensor token_map that says which ids is missing" in fault(
        save(tensors=tensors, truncated_vocab_size=16)
    )


def open_llm(folder: Path, target: Any = None, k: int | None = 3) -> LLM:
    config: dict[str, Any] = {"method": "mlp_speculator", "model": str(folder)}
    if k is not None:
        config["num_speculative_tokens"] = k
    return LLM(tiny_llama() if target is None else target, speculative_config=config, strict=True)


def test_B16_more_tokens_than_stages(save: Save) -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=5 exceeds the speculator's 4.*use at most 4"):
        open_llm(save(), k=5)


def test_the_number_of_tokens_is_the_speculators_own(save: Save) -> None:
    folder = save()
    with open_llm(folder, k=None) as llm:
        assert llm.config.num_speculative_tokens == 4
    with LLM(tiny_llama(), speculative_config={"model": str(folder)}) as llm:
        assert llm.config.method == "mlp_speculator"


def test_a_speculator_of_another_target(save: Save) -> None:
    with pytest.raises(ModelError, match=r"states of width 48 \(emb_dim\), the target's are 32 wide"):
        open_llm(save("wide", emb_dim=48))
    with pytest.raises(ModelError, match="it knows 40 token ids, the target has 64"):
        open_llm(save("few", vocab_size=40))
    with pytest.raises(ModelError, match="reads hidden states of a real model"):
        open_llm(save("toy"), target=MarkovTarget())
    tensors = {**sample_tensors({**SAMPLE_CONFIG, "truncated_vocab_size": 2}), "token_map": torch.tensor([3, 64])}
    with pytest.raises(ModelError, match="token_map names ids outside the target's 64"):
        open_llm(save("map", tensors=tensors, truncated_vocab_size=2), k=1)


def test_faults_of_a_folder_come_before_weights_load(save: Save) -> None:
    """The target here would fail to load, and is not reached."""
    with pytest.raises(ConfigError, match="ties nothing"):
        open_llm(save(n_predict=1, tie_weights=True), target="no such model", k=1)
