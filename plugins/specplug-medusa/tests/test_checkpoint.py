"""Which folders hold Medusa heads: published names and sizes, and every fault said before weights load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from specplug_medusa.checkpoint import Checkpoint, expected_tensors, plain_name
from specplug_medusa.sample import ORIGINAL_CONFIG, SAMPLE_CONFIG, original_names, sample_tensors

from specplug import LLM, ConfigError, ModelError
from specplug.testing import MarkovTarget, tiny_llama

Save = Callable[..., Path]


def fault(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        Checkpoint.read(folder)
    return str(caught.value)


def test_names_of_the_original_release() -> None:
    """Five heads of one block: ``medusa_lm_head`` of the Vicuna heads."""
    names = [f"{head}.{part}" for head in range(5) for part in ("0.linear.weight", "0.linear.bias", "1.weight")]
    assert [plain_name(name) for name in names[:3]] == [
        "blocks.0.layers.0.weight",
        "blocks.0.layers.0.bias",
        "lm_heads.0.weight",
    ]
    assert len({plain_name(name) for name in names}) == 15
    assert plain_name("medusa_head.4.1.weight") == "lm_heads.4.weight"
    assert plain_name("blocks.2.layers.0.weight") == "blocks.2.layers.0.weight"


def test_sizes_come_from_the_tensors_where_the_config_is_silent(save: Save) -> None:
    tensors = sample_tensors({**SAMPLE_CONFIG, "num_heads": 5, "hidden_size": 48, "vocab_size": 40}, has_bias=True)
    config = Checkpoint.read(save(tensors=original_names(tensors, 1), base={"medusa_num_heads": 5})).config
    assert (config.num_heads, config.num_layers, config.hidden_size) == (5, 1, 48)
    assert (config.vocab_size, config.draft_vocab_size, config.has_bias) == (40, 40, True)
    assert len(expected_tensors(config, 5)) == 10


def test_a_config_may_name_fewer_heads_than_are_there(save: Save) -> None:
    folder = save(tensors=original_names(sample_tensors(SAMPLE_CONFIG), 1), base={"medusa_num_heads": 2})
    assert Checkpoint.read(folder).config.num_heads == 2


def test_faults_name_the_tensors(save: Save) -> None:
    tensors = sample_tensors(SAMPLE_CONFIG)
    missing = {name: value for name, value in tensors.items() if name != "lm_heads.2.weight"}
    assert "tensors are missing: lm_heads.2.weight" in fault(save("a", tensors=missing))
    wrong = {**tensors, "blocks.1.layers.0.weight": torch.zeros(32, 16)}
    assert '"blocks.1.layers.0.weight" has the shape [32, 16]' in fault(save("b", tensors=wrong))
    unknown = {**tensors, "gate.weight": torch.zeros(1)}
    assert "a Medusa checkpoint has no tensors like these: gate.weight" in fault(save("c", tensors=unknown))
    text = fault(save("d", tensors=tensors, num_heads=5))
    assert "tensors are missing: blocks.4.layers.0.weight, lm_heads.4.weight" in text


def test_other_layouts_are_unknown(save: Save) -> None:
    assert 'model_type "llama" is no Medusa checkpoint' in fault(save("a", model_type="llama"))
    other = {"heads.0.fc.weight": torch.zeros(32, 32)}
    assert "no Medusa head is in its tensors (heads.0.fc.weight)" in fault(save("b", tensors=other))


def test_a_truncated_vocabulary_needs_its_map(save: Save) -> None:
    tensors = sample_tensors({**SAMPLE_CONFIG, "truncated_vocab_size": 16})
    text = fault(save(tensors=tensors, truncated_vocab_size=16))
    assert "the tensor token_map that says which is missing" in text


def test_pickles_are_refused_with_the_conversion(save: Save) -> None:
    folder = save()
    (folder / "medusa_lm_head.safetensors").unlink()
    (folder / "medusa_lm_head.pt").write_bytes(b"never read")
    text = fault(folder)
    assert "pickled weights only (medusa_lm_head.pt)" in text
    assert "weights_only=True" in text


def open_llm(folder: Path, target: Any = None, k: int | None = 3) -> LLM:
    config: dict[str, Any] = {"method": "medusa", "model": str(folder)}
    if k is not None:
        config["num_speculative_tokens"] = k
    return LLM(tiny_llama() if target is None else target, speculative_config=config, strict=True)


@pytest.mark.parametrize("base", [SAMPLE_CONFIG, ORIGINAL_CONFIG])
def test_more_tokens_than_heads(save: Save, base: Any) -> None:
    tensors = sample_tensors(SAMPLE_CONFIG)
    with pytest.raises(ConfigError, match="num_speculative_tokens=5 exceeds the Medusa heads' 4"):
        open_llm(save(tensors=tensors, base=base), k=5)


def test_the_number_of_tokens_is_the_number_of_heads(save: Save) -> None:
    with open_llm(save(), k=None) as llm:
        assert llm.config.num_speculative_tokens == 4


def test_heads_of_another_target(save: Save) -> None:
    tensors = sample_tensors({**SAMPLE_CONFIG, "hidden_size": 48})
    with pytest.raises(ModelError, match="states of width 48, the target's are 32 wide"):
        open_llm(save("wide", tensors=tensors, hidden_size=48))
    with pytest.raises(ModelError, match="reads hidden states of a real model"):
        open_llm(save("toy"), target=MarkovTarget())
    tensors = {**sample_tensors({**SAMPLE_CONFIG, "truncated_vocab_size": 2}), "token_map": torch.tensor([3, 64])}
    with pytest.raises(ModelError, match="token_map names ids outside the target's 64"):
        open_llm(save("map", tensors=tensors, truncated_vocab_size=2), k=1)


def test_faults_of_a_folder_come_before_weights_load(save: Save) -> None:
    """The target here would fail to load, and is not reached."""
    with pytest.raises(ConfigError, match="no Medusa checkpoint"):
        open_llm(save(model_type="llama"), target="no such model", k=1)


@pytest.mark.parametrize("k", [1, None])
def test_a_folder_that_is_not_there_comes_before_weights_load(tmp_path: Path, k: int | None) -> None:
    with pytest.raises(
        ConfigError, match=r'^speculative_config.model="[^"]*nowhere": folder \S*nowhere does not exist'
    ):
        open_llm(tmp_path / "nowhere", target="no such model", k=k)
