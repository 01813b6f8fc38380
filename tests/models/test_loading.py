"""From engine arguments to a target: what is refused before weights load, and how limits come about."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specplug.config import resolve_engine_args
from specplug.errors import ConfigError, ModelError
from specplug.models import loading
from specplug.models.loading import check_folder, load_target
from specplug.models.runner import TargetRunner
from specplug.testing import ScriptedTarget, tiny_llama, toy_tokenizer
from specplug.testing.architectures import tiny_model

TEXTS = [chr(ord("!") + number) for number in range(64)]


@dataclass(frozen=True)
class Engine:
    model: Any
    tokenizer: Any = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    device: str = "cpu"
    kernels: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    max_num_seqs: int = 4
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    model_fields_set: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
    toy_tokenizer(TEXTS).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError(f"a connection was tried: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def load(engine: Engine) -> TargetRunner:
    target = load_target(engine)
    assert isinstance(target, TargetRunner)
    return target


def test_a_folder(saved: Path) -> None:
    runner = load(Engine(str(saved)))
    assert (runner.dtype, runner.vocab_size, runner.tokenizer_vocab_size) == (torch.bfloat16, 64, 64)
    assert (runner.max_model_len, runner.max_query_tokens, runner.max_num_seqs) == (64, 64, 4)
    assert not runner.model.training
    runner.acquire(None)  # type: ignore[arg-type]
    assert runner.forward(torch.tensor([1, 2]), [2], torch.tensor([1])).logits.isfinite().all()
    runner.close()


def test_dtype_and_no_tokenizer(saved: Path) -> None:
    runner = load(Engine(saved, dtype="float32", skip_tokenizer_init=True))
    assert runner.dtype == torch.float32
    assert runner.tokenizer is None
    assert runner.tokenizer_vocab_size is None


def test_a_loaded_model_is_borrowed() -> None:
    model = tiny_llama()
    tokenizer = toy_tokenizer(TEXTS)
    runner = load(Engine(model, tokenizer))
    assert runner.model is model
    assert runner.tokenizer is tokenizer
    runner.close()
    assert model.config._attn_implementation == "sdpa"


def test_a_target_is_taken_as_it_is() -> None:
    target = ScriptedTarget([1, 2, 3])
    assert load_target(Engine(target)) is target


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_model_len": 5}, r"max_model_len=5 was given with a target object, which brings its own \(1024\)"),
        ({"max_num_seqs": 1}, r"max_num_seqs=1 was given .* brings its own \(64\); leave max_num_seqs out"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' was given with a target object, which brings its own"),
        ({"device": "meta"}, "device='meta' was given with a target object, which brings its own"),
        ({"tokenizer": "x"}, "tokenizer='x' was given with a target object, which brings its own"),
        ({"revision": "main"}, "revision='main' was given with a target object, which is loaded already"),
        ({"max_num_batched_tokens": 5}, "max_num_batched_tokens=5 is below the target's max_num_seqs=64"),
    ],
)
def test_arguments_that_a_target_object_contradicts(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_target(resolve_engine_args(ScriptedTarget([1]), arguments)[0])


def test_arguments_that_a_target_object_fulfils() -> None:
    target = ScriptedTarget([1])
    same = {"max_model_len": 1024, "max_num_seqs": 64, "dtype": "float32", "device": "cpu", "seed": 3}
    assert load_target(resolve_engine_args(target, {**same, "skip_tokenizer_init": True})[0]) is target
    with pytest.raises(ConfigError, match="3 faults in the configuration"):
        load_target(resolve_engine_args(target, {"max_model_len": 1, "max_num_seqs": 1, "revision": "x"})[0])


def test_something_else_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model=int cannot be a target; give a folder"):
        load_target(Engine(3))


@pytest.mark.parametrize(("name", "asked"), [("dtype", "bfloat16"), ("device", "meta")])
def test_a_loaded_model_keeps_its_dtype_and_device(name: str, asked: str) -> None:
    engine = replace(Engine(tiny_llama(), device="auto"), **{name: asked})
    with pytest.raises(ConfigError, match=rf'{name}="{asked}" was given with a loaded model whose {name} is'):
        load_target(engine)
    load_target(Engine(tiny_llama(), dtype="float32", device="cpu"))


def test_a_loaded_model_that_cannot_be_driven() -> None:
    with pytest.raises(ModelError, match='model type "gpt_oss"'):
        load_target(Engine(tiny_model("gpt_oss")))


# --- folders ------------------------------------------------------------------------------------------------------


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r'model folder ".*absent" does not exist'):
        load_target(Engine(tmp_path / "absent"))


def test_a_hub_id_that_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r'"nobody/nothing" is neither a folder nor in the local .* downloads nothing'):
        load_target(Engine("nobody/nothing"))


def test_a_file(saved: Path) -> None:
    with pytest.raises(ModelError, match="is a file; give the folder"):
        load_target(Engine(saved / "model.safetensors"))


def test_a_folder_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.os, "access", lambda path, mode: False)  # a test may run as root
    with pytest.raises(ModelError, match="cannot be read: permission denied"):
        check_folder(folder)


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_target(Engine(folder))


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_config_that_is_not_json(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json.* (cannot be read|holds no JSON object)"):
        load_target(Engine(folder))


def test_a_config_with_values_that_cannot_be(folder: Path) -> None:
    edit_config(folder, hidden_size="wide")
    with pytest.raises(ModelError, match=r"config\.json.* is not a usable config"):
        load_target(Engine(folder))


def test_code_from_the_checkpoint_is_not_run(folder: Path) -> None:
    edit_config(folder, model_type="homemade", auto_map={"AutoConfig": "configuration.Homemade"})
    (folder / "configuration.py").write_text("raise SystemExit('was run')")
    with pytest.raises(ModelError, match=r'"homemade"\) needs code from its checkpoint \(trust_remote_code\)'):
        load_target(Engine(folder))


def test_a_model_type_that_transformers_does_not_know(folder: Path) -> None:
    edit_config(folder, model_type="from_the_future")
    with pytest.raises(ModelError, match='"from_the_future", which the installed transformers does not know'):
        load_target(Engine(folder))


def test_a_model_that_is_no_causal_lm(folder: Path) -> None:
    edit_config(folder, model_type="vit")
    with pytest.raises(ModelError, match=r'model type "vit" of .* is not a causal LM'):
        load_target(Engine(folder))


def test_B84_a_recurrent_folder_is_refused_before_weights_load(folder: Path) -> None:
    config = tiny_model("lfm2").config
    config.save_pretrained(folder)
    with pytest.raises(ModelError, match=r'model type "lfm2" .*cannot be rolled back'):
        load_target(Engine(folder))


def test_pickled_weights_are_named_with_the_way_to_convert_them(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickled weights only \(pytorch_model\.bin\).*save_pretrained\(NEW_FOLDER\)"):
        load_target(Engine(folder))


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        load_target(Engine(folder))


def test_a_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelError, match=r"incomplete: model-00002-of-00002\.safetensors missing"):
        load_target(Engine(folder))


def test_damaged_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match=r"the weights of .* cannot be loaded"):
        load_target(Engine(folder))


def test_weights_with_tensors_missing(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"incomplete: \d+ tensors are missing, first model\.layers\.2"):
        load_target(Engine(folder))


# --- limits -------------------------------------------------------------------------------------------------------


def test_max_model_len(saved: Path) -> None:
    assert load(Engine(saved, max_model_len=20)).max_model_len == 20
    with pytest.raises(ConfigError, match=r"max_model_len=65 is more than the 64 positions of the model"):
        load_target(Engine(saved, max_model_len=65))


def test_the_default_of_max_model_len_is_capped() -> None:
    model = tiny_llama(max_position_embeddings=131072)
    assert load(Engine(model)).max_model_len == 32768
    assert load(Engine(model, max_model_len=100000)).max_model_len == 100000


def test_prompt_chunks_are_cut_to_half_a_window() -> None:
    model = tiny_llama(sliding_window=512, max_position_embeddings=4096)
    runner = load(Engine(model))
    assert runner.max_query_tokens == 256
    assert runner.cache.ragged_layers[0].kind.size == 512 + 256 - 1
    assert load(Engine(model, max_num_batched_tokens=32)).max_query_tokens == 32
    assert load(Engine(tiny_llama(max_position_embeddings=4096))).max_query_tokens == 2048


@pytest.mark.parametrize(("device", "match"), [("gpu", "is not a device"), ("cuda:99", "CUDA devices")])
def test_a_device_that_is_not_there(saved: Path, device: str, match: str) -> None:
    with pytest.raises(ConfigError, match=f'device="{device}".*{match}'):
        load_target(Engine(saved, device=device))


# --- tokenizers ---------------------------------------------------------------------------------------------------


def test_no_tokenizer_files(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"no tokenizer can be loaded .*skip_tokenizer_init=True"):
        load_target(Engine(folder))
    assert load(Engine(folder, skip_tokenizer_init=True)).tokenizer is None


def test_a_tokenizer_that_makes_ids_the_model_does_not_have(saved: Path) -> None:
    wider = toy_tokenizer([*TEXTS, "é", "ü"])
    with pytest.raises(ModelError, match="makes ids up to 65, the model has 64"):
        load_target(Engine(saved, wider))
    with pytest.raises(ModelError, match="makes ids up to 65, the model has 64"):
        load_target(Engine(tiny_llama(), wider))


def test_a_smaller_tokenizer_fits_a_padded_vocabulary(saved: Path) -> None:
    runner = load(Engine(saved, toy_tokenizer(TEXTS[:50])))
    assert (runner.vocab_size, runner.tokenizer_vocab_size) == (64, 50)


def test_an_added_token_beyond_the_model_is_taken_unless_it_ends_texts(saved: Path) -> None:
    tokenizer = toy_tokenizer(TEXTS)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    assert load(Engine(saved, tokenizer)).tokenizer_vocab_size == 65
    tokenizer.eos_token = "<image>"
    with pytest.raises(ModelError, match="makes ids up to 64, the model has 64"):
        load_target(Engine(saved, tokenizer))
