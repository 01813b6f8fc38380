"""speculators' own reader takes the files. ``SPECPLUG_SPECULATORS_PYTHON`` names the interpreter that has it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specplug import LLM, SamplingParams
from specplug.testing import tiny_llama

PYTHON = os.environ.get("SPECPLUG_SPECULATORS_PYTHON", "")
READER = Path(__file__).parent / "read_with_speculators.py"


def extract(folder: Path) -> None:
    config = {"method": "extract_hidden_states", "extract_hidden_states_path": str(folder)}
    model = tiny_llama(num_hidden_layers=8).bfloat16()
    with LLM(model, speculative_config=config, strict=True) as llm:
        llm.generate([[5, 6, 7, 8], [1, 2, 3]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))


@pytest.mark.skipif(not PYTHON, reason="SPECPLUG_SPECULATORS_PYTHON names no interpreter with speculators")
def test_speculators_reads_the_files(tmp_path: Path) -> None:
    extract(tmp_path)
    ended = subprocess.run(
        [PYTHON, str(READER), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split() == ["0", "1"]


def test_names_keys_shapes_and_dtypes_are_those_that_speculators_reads(tmp_path: Path) -> None:
    """Facts of speculators 0.9: three layers for the head and the last one, ids that equal int64 ids of a dataset."""
    extract(tmp_path)
    data = load_file(tmp_path / "hs_0.safetensors")
    assert set(data) == {"hidden_states", "token_ids"}
    assert data["hidden_states"].shape[1:] == (4, 32)
    assert data["token_ids"].dtype == torch.int64
    assert data["hidden_states"].isfinite().all()
    assert len(data["token_ids"]) == len(data["hidden_states"])
