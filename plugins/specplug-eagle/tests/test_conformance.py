"""specplug's conformance kit on both methods, over a real (tiny, random) target."""

from __future__ import annotations

from pathlib import Path

from specplug.models.runner import TargetRunner
from specplug.testing import ProposerConformance, Rig, tiny_llama

GOLDENS = Path(__file__).parent / "goldens"


def make_target() -> TargetRunner:
    model = tiny_llama(vocab_size=40, hidden_size=16, num_hidden_layers=4, max_position_embeddings=128)
    return TargetRunner(model, max_num_seqs=8, max_model_len=128, max_query_tokens=8)


RIG = Rig(
    make_target=make_target,
    prompts=((5, 6, 5, 6, 5), (7,), (3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 8, 2)),
    num_speculative_tokens=3,
    num_tokens=12,
)


class TestEagle(ProposerConformance):
    method = "eagle"
    options = {"model": str(GOLDENS / "eagle")}
    rig = RIG


class TestEagleProbabilistic(ProposerConformance):
    method = "eagle"
    options = {"model": str(GOLDENS / "eagle"), "draft_sample_method": "probabilistic"}
    rig = RIG


class TestEagle3(ProposerConformance):
    method = "eagle3"
    options = {"model": str(GOLDENS / "llama")}
    rig = RIG


class TestEagle3Probabilistic(ProposerConformance):
    method = "eagle3"
    options = {"model": str(GOLDENS / "qwen3"), "draft_sample_method": "probabilistic"}
    rig = RIG


class TestPEagle(ProposerConformance):
    method = "eagle3"
    options = {"model": str(GOLDENS / "peagle-llama"), "parallel_drafting": True}
    rig = RIG


class TestEagle3Tree(ProposerConformance):
    method = "eagle3"
    options = {"model": str(GOLDENS / "llama"), "eagle_tree_width": 3, "eagle_tree_depth": 3}
    rig = RIG
