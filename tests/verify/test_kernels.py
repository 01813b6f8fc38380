"""The Triton kernels without a GPU: against the reference in the interpreter, and compiled ahead of time."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: whether kernels are interpreted is settled when they are imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, env=environment, cwd=ROOT)


def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    found = run_module("specplug.testing.kernel_check", "--interpret")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "20 of 20 kernel cases equal the reference" in found.stdout


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_kernels_compile_without_spilling(target: str) -> None:
    found = run_module("specplug.verify.kernels.compile", target, "--dtypes", "fp32")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(target) == 11  # ten kernels, one of them also in its filtered form
