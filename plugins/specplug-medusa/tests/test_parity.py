"""vLLM's own modules, run again. ``SPECPLUG_VLLM_PYTHON`` names the interpreter that has vLLM."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

PYTHON = os.environ.get("SPECPLUG_VLLM_PYTHON", "")
HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="SPECPLUG_VLLM_PYTHON names no interpreter with vLLM")
def test_goldens_are_what_vllm_computes(tmp_path: Path) -> None:
    command = [PYTHON, str(HERE / "parity" / "vllm_parity.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    for golden in (HERE / "goldens").glob("*.safetensors"):
        stored, fresh = load_file(golden), load_file(tmp_path / golden.name)
        assert stored.keys() == fresh.keys()
        for name, value in stored.items():
            torch.testing.assert_close(fresh[name], value, rtol=0, atol=1e-5)
