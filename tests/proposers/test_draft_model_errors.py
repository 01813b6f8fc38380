"""What is said when a draft model cannot be: row B94 and bad input, before weights load where that can be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from specplug import LLM, ConfigError, ModelError, SamplingParams
from specplug.config import resolve_speculative_config
from specplug.config.engine import EngineArgs
from specplug.hooks import process_manager
from specplug.proposers.draft_vocabulary import check_same_vocabulary
from specplug.testing.models import tiny_llama, toy_tokenizer

TEXTS = [f"<{number}>" for number in range(60)]
SWAPPED = [*TEXTS[:3], TEXTS[4], TEXTS[3], *TEXTS[5:]]


def saved(path: Path, texts: list[str] | None = None, **how: Any) -> str:
    tiny_llama(**how).save_pretrained(path)
    if texts is not None:
        toy_tokenizer(texts).save_pretrained(path)
    return str(path)


def draft_model(folder: str, **keys: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": folder, "num_speculative_tokens": 2, **keys}


def early_fault(config: dict[str, Any]) -> str:
    """The text of the error that comes before any model is opened."""
    with pytest.raises(ConfigError) as caught:
        resolve_speculative_config(config, process_manager().methods, engine=EngineArgs(model="target"))
    return str(caught.value)


def late_fault(target: Any, config: dict[str, Any], **engine: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        LLM(target, speculative_config=config, **engine)
    return str(caught.value)


def test_B94_same_size_other_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = saved(tmp_path / "t", TEXTS, vocab_size=60), saved(tmp_path / "d", SWAPPED, vocab_size=60)
    import specplug.proposers.draft_loading as loading

    monkeypatch.setattr(loading, "load_target", None)  # the draft's weights are not opened
    text = late_fault(target, draft_model(draft))
    assert "the first difference is at id 3" in text
    assert '"<3>" in the target and "<4>" in the draft' in text
    assert "use_heterogeneous_vocab=true" in text


def test_vocabularies_that_agree_where_they_meet_are_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        check_same_vocabulary(toy_tokenizer(TEXTS), toy_tokenizer(TEXTS))
        assert not caplog.records
        check_same_vocabulary(toy_tokenizer(TEXTS), toy_tokenizer(TEXTS[:58]))
    assert "58 ids, the target's 60; they agree on all 58" in caplog.records[0].getMessage()
    with pytest.raises(ConfigError, match="id 59"):
        check_same_vocabulary(toy_tokenizer(TEXTS), toy_tokenizer([*TEXTS[:59], "else"]))


def test_without_two_tokenizers_the_sizes_must_agree(tmp_path: Path) -> None:
    target, draft = saved(tmp_path / "t", TEXTS), saved(tmp_path / "d", vocab_size=62)
    text = late_fault(target, draft_model(draft))
    assert "62 token ids, the target 64" in text
    assert "tokenizer files" in text
    with LLM(target, speculative_config=draft_model(saved(tmp_path / "same"))) as llm:
        llm.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=4))


def test_wrong_folders_are_told_before_anything_loads(tmp_path: Path) -> None:
    assert "does not exist" in early_fault(draft_model(str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in early_fault(draft_model(str(tmp_path / "empty")))
    folder = Path(saved(tmp_path / "pickled"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "no *.safetensors file" in early_fault(draft_model(str(folder)))
    assert "is a file" in early_fault(draft_model(str(folder / "config.json")))


def test_an_eagle_head_is_no_draft_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}')
    text = early_fault(draft_model(str(tmp_path)))
    assert "declares an EAGLE-3 head" in text
    assert 'Set method="eagle3"' in text


def test_no_folder_and_other_keys(tmp_path: Path) -> None:
    assert "needs model, the folder of its draft model" in early_fault(
        {"method": "draft_model", "num_speculative_tokens": 2}
    )
    folder = saved(tmp_path / "d")
    assert "may be 1" in early_fault(draft_model(folder, draft_tensor_parallel_size=2))
    assert "does not belong here" in early_fault(draft_model(folder, tensor_parallel_size=2))  # row B02
    text = early_fault(draft_model(folder, draft_sample_method="probabilistic", rejection_sample_method="match"))
    assert 'draft_sample_method="greedy"' in text
    assert "use at most 64" in early_fault(draft_model(folder, max_model_len=65))


def test_a_folder_that_cannot_be_driven_names_the_setting(tmp_path: Path) -> None:
    from specplug.testing.architectures import tiny_model

    tiny_model("mamba2").save_pretrained(tmp_path)
    text = late_fault(tiny_llama(vocab_size=97), draft_model(str(tmp_path)))
    assert text.startswith(f'speculative_config.model="{tmp_path}" cannot be the draft')
    assert "mamba2" in text


def test_device_and_dtype_faults_name_the_drafts_own_keys(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    text = late_fault(tiny_llama(), draft_model(folder, draft_model_device="cuda:7"))
    assert 'draft_model_device="cuda:7"' in text
    assert "CUDA devices" in text
    assert 'draft_model_device="gpu" is not a device' in late_fault(
        tiny_llama(), draft_model(folder, draft_model_device="gpu")
    )
    text = late_fault(tiny_llama(), draft_model(folder, draft_model_dtype="float7"))
    assert "cannot be the draft" in text
    assert issubclass(ModelError, ValueError)
