"""The first screens of the methods' pages run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "methods"


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def test_ngram_page(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = python_blocks("ngram.md")
    exec(block, {})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "[5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6, 7]"
    assert "num_steps=" in second


def test_custom_class_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module, use = python_blocks("custom_class.md")
    (tmp_path / "my_proposer.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    exec(use, {})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "[5, 5, 5, 5, 5, 6]"
    assert "num_draft_tokens=" in second


def test_draft_model_page(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = python_blocks("draft_model.md")
    exec(block, {})
    assert capsys.readouterr().out.splitlines() == ["9"]
