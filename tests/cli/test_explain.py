from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from specplug.cli import app

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


def test_the_demo_model_is_a_default_and_a_named_one_given(tiny_model: Path) -> None:
    origins = []
    for arguments in ([], ["-m", str(tiny_model)]):
        found = json.loads(runner.invoke(app, ["explain", "--json", *arguments]).stdout)
        origins.append({row["key"]: row["origin"] for row in found["engine"]}["model"])
    assert origins == ["default", "given"]


def test_a_long_path_is_shown_whole(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / ("long" * 30) / ("longer" * 30)
    folder.parent.mkdir()
    folder.symlink_to(tiny_model)
    shown = runner.invoke(app, ["explain", "-m", str(folder)]).stdout
    assert "…" not in shown
    rows = shown[shown.index("model") :].splitlines()
    assert str(folder) in "".join(row[25:].lstrip().split(" ")[0] for row in rows)


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


def test_kernels_that_are_not_installed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("kernels: nativ\n")
    for arguments in (["--config", str(tmp_path / "config.yaml")], ["--kernels", "nativ"]):
        result = runner.invoke(app, ["explain", *arguments])
        assert result.exit_code == 2
        assert 'kernels="nativ": no kernels of that name are installed; write one of: "auto", "torch"' in result.stderr
