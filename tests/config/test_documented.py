"""docs/configuration.md and the weight of the import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specplug.config import EngineArgs, SpeculativeConfig
from specplug.config.engine_terms import ENGINE_TERMS
from specplug.config.reference import reference_tables

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("heading", list(reference_tables()))
def test_table_is_up_to_date(heading: str) -> None:
    assert f"### {heading}\n\n{reference_tables()[heading]}\n" in PAGE


@pytest.mark.parametrize("name", [*SpeculativeConfig.model_fields, *EngineArgs.model_fields, *ENGINE_TERMS])
def test_every_key_is_documented(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_keys_that_nothing_serves_are_not_called_acting() -> None:
    for key in ("enable_adaptive_verification", "num_speculative_tokens_per_batch_size", "dspark_draft_topk"):
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{key}` |") and line.count("|") > 4)
        assert "| plugin: it acts where an installed plugin serves it, and specplug has none |" in row


def test_import_is_light() -> None:
    code = (
        "import sys, specplug.config as c; c.resolve_engine_args('m', {});"
        "heavy = {'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules); sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_reference_is_a_command() -> None:
    command = [sys.executable, "-m", "specplug.config.reference"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(line in PAGE for line in done.stdout.splitlines())
