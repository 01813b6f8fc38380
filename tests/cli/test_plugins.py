from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specplug.cli import app
from specplug.hooks import ProcessManager

runner = CliRunner()


def test_json_lists_what_is_installed() -> None:
    found = {entry["name"]: entry for entry in json.loads(runner.invoke(app, ["plugins", "--json"]).stdout)}
    assert {"acceptance", "custom_class", "ngram"} <= set(found)
    ngram = found["ngram"]
    assert (ngram["kind"], ngram["distribution"]) == ("proposer", "specplug")
    assert "specplug_propose" in ngram["hooks"]
    assert "prompt_lookup_max" in {option["name"] for option in ngram["options"]}
    for key in ("version", "status", "reason", "summary"):
        assert key in ngram


def test_the_table_shows_blocked_plugins_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specplug.hooks.process_manager", lambda: ProcessManager(block=["ngram"]))
    shown = runner.invoke(app, ["plugins"]).stdout
    (line,) = [line for line in shown.splitlines() if line.split()[:1] == ["ngram"]]
    assert "blocked" in line
    assert "custom_class" in shown


def install_kernels(folder: Path, distribution: str, name: str, module: str) -> None:
    info = folder / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[specplug.kernels]\n{name} = {module}:kernels\n")


def test_installed_kernels_are_named_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_kernels(tmp_path, "tensor-kernels", "tensor[core]", "no_such_module")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    done = runner.invoke(app, ["plugins"])
    assert done.exit_code == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(" kernels: ")]
    assert "tensor[core] (tensor-kernels 1.2)" in line
    assert "no_such_module" not in sys.modules
    listed = json.loads(runner.invoke(app, ["plugins", "--json"]).stdout)
    assert "tensor[core]" not in {each["name"] for each in listed}, "a list of plugins it stays"


def test_without_kernels_there_is_no_line_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specplug.config.kernels.GROUP", "specplug.no_such_group")
    assert "kernels:" not in runner.invoke(app, ["plugins"]).stdout


def test_a_default_that_is_no_json_is_shown_as_text() -> None:
    from specplug.cli.plugins import _plain

    assert _plain(frozenset({1})) == "frozenset({1})"
    assert _plain([1, None]) == [1, None]
