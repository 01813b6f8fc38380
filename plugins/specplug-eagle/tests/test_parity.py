"""Against code that we did not write: EAGLE-3 and P-EAGLE of the speculators package, EAGLE of vLLM.

The scripts in ``parity/`` wrote the goldens; where a package is installed, fresh models are compared with it too.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
GOLDENS = HERE / "goldens"
VARIANTS = ["llama", "llama-31", "llama-full", "qwen3", "peagle-llama", "peagle-qwen3"]
NUM_DRAFT_TOKENS = 4
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def ours() -> Iterator[ModuleType]:
    yield _module("ours")


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / "parity" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(ours: ModuleType, folder: Path, cases: dict[str, torch.Tensor]) -> float:
    """The largest error of any logit; drafts must be equal."""
    config = json.loads((folder / "config.json").read_text())
    kind = config.get("speculators_model_type")
    proposer = ours.load(
        folder,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        method="eagle3" if kind else "eagle",
        parallel_drafting=kind == "peagle",
    )
    if kind is None:  # the states are what vLLM hands over, normalised already
        proposer.head._norm = [lambda states: states]
    largest = 0.0
    for number in range(sum(name.startswith("token_ids.") for name in cases)):
        case = {name: cases[f"{name}.{number}"] for name in ("token_ids", "states", "draft_ids", "logits")}
        draft_ids, logits = ours.draft(proposer, case["token_ids"], case["states"], NUM_DRAFT_TOKENS)
        assert draft_ids.tolist() == case["draft_ids"].tolist()
        largest = max(largest, float((logits - case["logits"]).abs().max()))
    return largest


@pytest.mark.parametrize("variant", [*VARIANTS, "eagle"])
def test_goldens(variant: str, ours: ModuleType) -> None:
    cases = load_file(GOLDENS / f"{variant}.safetensors")
    assert compare(ours, GOLDENS / variant, cases) <= TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_fresh_models_of_speculators(variant: str, ours: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("speculators", reason="the speculators package is not installed: goldens only")
    reference = _module("speculators_reference")
    for seed in (1, 2):
        folder = reference.write(tmp_path / str(seed), variant, seed)
        assert compare(ours, folder, load_file(folder.with_suffix(".safetensors"))) <= TOLERANCE


def test_fresh_models_of_vllm(ours: ModuleType, tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: goldens only")
    reference = _module("vllm_reference")
    for seed in (1, 2):
        folder = reference.write(tmp_path / str(seed), seed)
        assert compare(ours, folder, load_file(folder.with_suffix(".safetensors"))) <= TOLERANCE


def test_the_comparison_sees_a_wrong_head(ours: ModuleType, tmp_path: Path) -> None:
    """Negative control: the residual taken after the norm instead of before it."""
    config = json.loads((GOLDENS / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "norm_before_residual": False}))
    (tmp_path / "model.safetensors").write_bytes((GOLDENS / "llama" / "model.safetensors").read_bytes())
    cases = load_file(GOLDENS / "llama.safetensors")
    proposer = ours.load(tmp_path, num_draft_tokens=NUM_DRAFT_TOKENS)
    _, logits = ours.draft(proposer, cases["token_ids.2"], cases["states.2"], NUM_DRAFT_TOKENS)
    assert float((logits[0] - cases["logits.2"][0]).abs().max()) > 100 * TOLERANCE
