from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specplug.cli import app
from specplug.errors import ModelError
from specplug.models.loading import find_folder

NGRAM = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":5}'

runner = CliRunner()


def test_origins_and_who_serves_it() -> None:
    result = runner.invoke(app, ["explain", "--speculative-config", NGRAM, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["method"], found["num_speculative_tokens"]) == ("ngram", 4)
    settings = {row["key"]: row for row in found["settings"]}
    assert settings["num_speculative_tokens"]["origin"] == "given"
    assert settings["prompt_lookup_min"]["origin"].startswith("inferred")
    served = {row["name"]: row["distribution"] for row in found["plugins"]}
    assert served["ngram"].startswith("specplug ")
    assert "acceptance" in served


def test_the_tables_say_the_same() -> None:
    shown = runner.invoke(app, ["explain", "-sc", NGRAM]).stdout
    for wanted in ("method: ngram, 4 speculative tokens", "prompt_lookup_max", "given", "acceptance", "note: "):
        assert wanted in shown


def test_without_speculation() -> None:
    assert "speculation: off" in runner.invoke(app, ["explain"]).stdout


def test_a_model_folder_must_be_there(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    result = runner.invoke(app, ["explain", "-m", str(absent), "-sc", NGRAM])
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
    with pytest.raises(ModelError) as raised:
        find_folder(absent, None)
    assert _words(str(raised.value)) in _words(result.stderr)


def _words(text: str) -> str:
    return "".join(text.split())  # however the terminal breaks lines


def test_one_message_names_key_reason_and_remedy() -> None:
    config = NGRAM.replace("}", ',"temperature":0.7}')
    result = runner.invoke(app, ["explain", "--speculative-config", config])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("error:") == 1
    for wanted in ("speculative_config.temperature", "belong to each request", "SamplingParams(temperature=0.7)"):
        assert wanted in result.stderr


def test_faults_of_engine_and_speculation_come_together(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_num_seqs: 0\nspeculative_config:\n  method: ngram\n  num_speculative_tokens: 0\n")
    result = runner.invoke(app, ["explain", "--config", str(file)])
    assert result.exit_code == 2
    assert "2 faults in the configuration" in result.stderr
    assert "max_num_seqs" in result.stderr
    assert "num_speculative_tokens=0" in result.stderr


def test_a_note_for_every_key_without_effect(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"gpu_memory_utilization: 0.5\nspeculative_config: {NGRAM}\n")
    shown = runner.invoke(app, ["explain", "--config", str(file)]).stdout
    assert "gpu_memory_utilization" in shown
