"""EAGLE-2's tree against the rule as the paper writes it, with every path run as a chain of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from specplug_eagle import Eagle3Options

from specplug import LLM, SamplingParams
from specplug.models.runner import TargetRunner
from specplug.testing import HookDriver, InstalledMethod, Rig, tiny_llama

GOLDENS = Path(__file__).parent / "goldens"
PROMPT = (3, 1, 4, 1, 5, 2, 6, 5)
Path_ = tuple[int, ...]


def model() -> Any:
    return tiny_llama(
        vocab_size=40, hidden_size=16, num_hidden_layers=4, max_position_embeddings=128, eos_token_id=None
    )


def make_target() -> TargetRunner:
    return TargetRunner(model(), max_num_seqs=8, max_model_len=128, max_query_tokens=64)


def driver(num_nodes: int, **options: Any) -> HookDriver:
    make = InstalledMethod("eagle3", {"model": str(GOLDENS / "llama"), **options})
    made = HookDriver(make, Rig(make_target=make_target, num_speculative_tokens=num_nodes))
    made.start("other", PROMPT[::-1])
    made.start("r", PROMPT)
    made.prefill()
    return made


def log_probs(proposer: Any, path: Path_) -> dict[int, float]:
    """After the text and ``path``, read token by token as a chain: target id -> log-probability."""
    reader, space = proposer._reader, proposer._space
    (name,) = reader.in_order(["r"])
    outputs = reader.read([name], None, [1])
    for token_id in path:
        outputs = reader.append(torch.tensor([token_id]), outputs, [name])
    scores = proposer.head.logits(outputs).float().log_softmax(-1)[0]
    ids = space.to_target_ids(torch.arange(len(scores))).tolist()
    return dict(zip(ids, scores.tolist(), strict=True))


def reference(proposer: Any, *, depth: int, width: int, count: int) -> dict[Path_, float]:
    """The drafted paths and their values."""
    scored: dict[Path_, float] = {}
    frontier: dict[Path_, float] = {(): 0.0}
    for _ in range(depth):
        children: dict[Path_, float] = {}
        for path, value in frontier.items():
            best = sorted(log_probs(proposer, path).items(), key=lambda item: -item[1])[:width]
            children |= {(*path, token_id): value + score for token_id, score in best}
        scored |= children
        frontier = dict(sorted(children.items(), key=lambda item: -item[1])[:width])
    return dict(sorted(scored.items(), key=lambda item: -item[1])[:count])


@pytest.mark.parametrize(("depth", "width", "count"), [(1, 4, 3), (2, 3, 8), (4, 3, 12), (3, 5, 40)])
def test_the_tree_is_that_of_the_paper(depth: int, width: int, count: int) -> None:
    made = driver(count, eagle_tree_depth=depth, eagle_tree_width=width)
    with torch.inference_mode():
        expected = reference(made.proposer, depth=depth, width=width, count=count)
    step = made.step()
    assert step.draft is not None and step.draft.confidence is not None
    row = step.batch.request_ids.index("r")
    first = sum(step.draft.num_draft_tokens[:row])
    tokens = step.drafts["r"]
    parents = step.draft.parents[first : first + len(tokens)] if step.draft.parents else range(-1, len(tokens) - 1)
    paths: list[Path_] = []
    for token_id, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    assert paths == list(expected)
    for path, confidence in zip(paths, step.draft.confidence[first:].tolist(), strict=False):
        own = expected[path] - expected.get(path[:-1], 0.0)
        assert confidence == pytest.approx(torch.tensor(own).exp().item(), abs=1e-4)


def test_a_smaller_limit_keeps_the_best_nodes() -> None:
    full = driver(12, eagle_tree_depth=3, eagle_tree_width=4).step().drafts["r"]
    assert driver(12, eagle_tree_depth=3, eagle_tree_width=4).step(limit=5).drafts["r"] == full[:5]


def test_a_tree_takes_fewer_steps_than_a_chain() -> None:
    steps = []
    for extra in ({}, {"eagle_tree_width": 8, "eagle_tree_depth": 3}):
        config = {"model": str(GOLDENS / "llama"), "num_speculative_tokens": 30 if extra else 3, **extra}
        params = SamplingParams(temperature=0.0, max_tokens=60)
        with LLM(model(), speculative_config=config, max_model_len=128, strict=True) as llm:
            outputs = llm.generate([{"prompt_token_ids": list(PROMPT)}, {"prompt_token_ids": [7]}], params)
        steps.append(sum(output.outputs[0].spec_decode_metrics.num_steps for output in outputs))
    assert steps[1] < steps[0]


def test_trees_are_neither_sampled_nor_parallel() -> None:
    folder = str(GOLDENS / "peagle-llama")
    with pytest.raises(ValidationError, match="eagle_tree_width drafts trees, which parallel_drafting cannot"):
        Eagle3Options(model=folder, parallel_drafting=True, eagle_tree_width=4)
    with pytest.raises(ValidationError, match=r'draft_sample_method="probabilistic" cannot'):
        Eagle3Options(model=folder, draft_sample_method="probabilistic", eagle_tree_width=4)
