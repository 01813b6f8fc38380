from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specplug.cli import app
from specplug.errors import ConfigError, ModelError, PluginLoadError, RequestError

runner = CliRunner()


def test_importing_and_helping_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "from specplug.cli import app\n"
        "try:\n    app(['generate', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("specplug ")


def test_an_unknown_option_is_a_usage_error() -> None:
    assert runner.invoke(app, ["generate", "--no-such-option"]).exit_code == 2


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (ConfigError(["one [x]", "two"]), 2),
        (RequestError("bad request"), 2),
        (ModelError("bad model"), 1),
        (PluginLoadError("bad plugin"), 1),
        (OSError("disk full"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_are_messages_with_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, fault: BaseException, code: int
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise fault

    monkeypatch.setattr("specplug.cli.options.gather", fail)
    result = runner.invoke(app, ["explain"])
    assert result.exit_code == code
    assert str(fault) in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output


def test_a_bug_is_not_dressed_up_as_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("specplug.cli.options.gather", fail)
    assert isinstance(runner.invoke(app, ["explain"]).exception, ZeroDivisionError)


def commands(model: str) -> list[list[str]]:
    return [
        ["explain", "-m", model],
        ["generate", "hi", "-m", model],
        ["demo", "--quick", "-m", model],
        ["doctor", "--target", model, "--draft", model],
    ]


def test_a_model_that_cannot_be_one_ends_every_command_alike(tmp_path: Path) -> None:
    head, empty, file = tmp_path / "head", tmp_path / "empty", tmp_path / "model.gguf"
    head.mkdir()
    empty.mkdir()
    file.touch()
    (head / "config.json").write_text('{"model_type": "medusa", "architectures": ["MedusaModel"]}')
    for model, message in [
        (tmp_path / "absent", "absent does not exist; give the folder of a Hugging Face causal LM"),
        (empty, "has no config.json"),
        (file, "is a file; give the folder"),
        (head, "is a head for the method medusa, not a causal LM; give a causal LM here. The head drafts for the"),
    ]:
        for command in commands(str(model)):
            result = runner.invoke(app, command)
            assert (command[0], result.exit_code, result.stdout) == (command[0], 2, "")
            assert message in result.stderr
            assert result.stderr.count("error:") == 1


def test_a_model_in_no_cache_ends_every_command_that_looks_for_it_alike() -> None:
    for command in commands("nobody/nothing")[1:]:
        result = runner.invoke(app, command)
        assert (command[0], result.exit_code) == (command[0], 1)
        assert 'fetch it once with "hf download nobody/nothing"' in result.stderr
