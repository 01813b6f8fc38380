"""Trees of drafts beside chains of as many tokens, on the demo model.

    python benchmarks/trees.py [PART ...] [--trained FOLDER] [--pairs 4] [--tokens 32]

Parts: ``length`` (Medusa's static and EAGLE-3's dynamic tree against their chains at equal verified tokens: tokens per
step, which is counted, speed in turn, and what moving the accepted nodes' entries took of all forwards; greedy, batch
1, HumanEval, edit and chat prompts), ``cost`` (what a tree costs the target: a forward with a tree's mask beside one of
a chain of as many tokens on the same text, and one move of the longest path, which few steps need; at most 3 %).

The heads are those of ``benchmarks/train_heads.py``. Rows go to ``results/trees_<part>.csv``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from common import circumstances, paired_ratio, wait_until_idle
from heads import KINDS, Rig, add_options
from host import Bench, Parts, Row, run_parts

NODES = {"medusa": (4, 6), "eagle3": (6, 12)}
"""Verified tokens. A chain of Medusa's has at most a token of each of its six heads."""
COST_NODES = (8, 16, 32)
COST_CONTEXT = 256
COST_ROUNDS = 40


def length(bench: Bench) -> Iterator[Row]:
    """More tokens per step from a tree than from a chain that costs the target as much."""
    rig = Rig(bench)
    for name in (name for name in rig.methods if name in NODES):
        for kind in KINDS:
            for num_nodes in NODES[name]:
                yield _beside_chain(rig, name, kind, num_nodes)


def _tree(name: str, num_nodes: int) -> dict[str, Any]:
    return {"medusa_tree": num_nodes} if name == "medusa" else {"eagle_tree_width": 4, "eagle_tree_depth": 5}


def _beside_chain(rig: Rig, name: str, kind: str, num_nodes: int) -> Row:
    chain = rig.config(name, num_nodes)
    tree = chain | _tree(name, num_nodes)
    load = wait_until_idle()
    runs = [(rig.run(tree, kind), rig.run(chain, kind)) for _ in range(rig.bench.args.pairs)]
    ratio = paired_ratio([one.tokens_per_s for one, _ in runs], [other.tokens_per_s for _, other in runs])
    first, second = runs[0]
    print(
        f"  {name}, {kind}, {num_nodes} tokens: tree {first.tokens_per_step:.3f}, chain {second.tokens_per_step:.3f} "
        f"tokens per step; speed {ratio}; moving accepted nodes {first.moving:.4f} of its forwards",
        flush=True,
    )
    return {
        "kind": kind,
        "method": name,
        "verified_tokens": num_nodes,
        "tree_tokens_per_step": f"{first.tokens_per_step:.3f}",
        "chain_tokens_per_step": f"{second.tokens_per_step:.3f}",
        "moving_of_forwards": f"{first.moving:.4f}",
        "ratio_median": f"{ratio.median:.3f}",
        "ratio_low": f"{ratio.low:.3f}",
        "ratio_high": f"{ratio.high:.3f}",
        "pairs": ratio.num_pairs,
        **circumstances(load, **rig.bench.versions),
    }


def cost(bench: Bench) -> Iterator[Row]:
    """The same tokens read as a tree and as a chain, in turn."""
    from specplug_medusa.tree import likeliest_tree

    rig = Rig(bench)
    with rig.llm(None):  # the target is driven by hand; the session only holds it
        for num_nodes in COST_NODES:
            load = wait_until_idle()
            parents = likeliest_tree(num_nodes, 6).parents
            forwards, compactions = _alternate(rig.target, parents)
            ratio = paired_ratio([tree for tree, _ in forwards], [chain for _, chain in forwards])
            step = statistics.median(chain for _, chain in forwards)
            moving = statistics.median(compactions) / step
            print(f"  {num_nodes} nodes: forward {ratio} of a chain's, compaction {moving:.4f} of it", flush=True)
            yield {
                "nodes": num_nodes,
                "context": COST_CONTEXT,
                "chain_forward_ms": f"{1000 * step:.3f}",
                "compaction_ms": f"{1000 * statistics.median(compactions):.4f}",
                "compaction_of_forward": f"{moving:.4f}",
                "at_most": 1.03,
                "ratio_median": f"{ratio.median:.4f}",
                "ratio_low": f"{ratio.low:.4f}",
                "ratio_high": f"{ratio.high:.4f}",
                "ratio_and_compaction_high": f"{ratio.high + moving:.4f}",
                "pairs": ratio.num_pairs,
                **circumstances(load, **bench.versions),
            }


def _alternate(target: Any, parents: Sequence[int]) -> tuple[list[tuple[float, float]], list[float]]:
    """Seconds of forwards as a tree and as a chain, and of moving the tree's longest path to its front."""
    import torch

    from specplug import SamplingParams
    from specplug.trees import tree_of
    from specplug.types import Request, TokenIds

    tree = tree_of(tuple(parents))
    path = max((tree.path(node) for node in range(len(tree))), key=len)
    row = target.acquire(Request("cost", TokenIds(np.ones(COST_CONTEXT, dtype=np.int32)), SamplingParams(), seed=0))
    text = torch.randint(1000, (COST_CONTEXT,), generator=torch.Generator().manual_seed(0))
    step = torch.randint(1000, (1 + len(tree),), generator=torch.Generator().manual_seed(1))
    every = torch.arange(len(step))
    forwards: list[tuple[float, float]] = []
    compactions: list[float] = []
    with torch.inference_mode():
        target.forward(text, [len(text)], torch.tensor([len(text) - 1]))
        for number in range(COST_ROUNDS):
            seconds = {}
            for trees in ({row: tree}, None) if number % 2 else (None, {row: tree}):
                target.forward(step, [len(step)], every, **({"trees": trees} if trees else {}))
                seconds[trees is not None] = target.forward_s
                if trees:
                    compactions.append(_compaction_s(target, row, path))
                target.rollback(row, COST_CONTEXT)
            forwards.append((seconds[True], seconds[False]))
    target.release(row)
    return forwards, compactions


def _compaction_s(target: Any, row: int, path: Sequence[int]) -> float:
    first = COST_CONTEXT + 1
    moves = [(first + node, first + depth) for depth, node in enumerate(path) if node != depth]
    start = time.perf_counter()
    target.compact([row] * len(moves), [source for source, _ in moves], [place for _, place in moves])
    return time.perf_counter() - start


PARTS: Parts = {"length": length, "cost": cost}

if __name__ == "__main__":
    run_parts("trees", __doc__, PARTS, tokens=32, pairs=4, options=add_options)
