from __future__ import annotations

import json

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


def test_a_default_that_is_no_json_is_shown_as_text() -> None:
    from specplug.cli.plugins import _plain

    assert _plain(frozenset({1})) == "frozenset({1})"
    assert _plain([1, None]) == [1, None]
