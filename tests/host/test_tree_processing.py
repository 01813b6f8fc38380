"""Every logit row of a tree is processed as the same row of its own path, were that a chain."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specplug import SamplingParams, StructuredOutputsParams
from specplug.host.grammar import GrammarCompiler, apply_masks, cut_drafts
from specplug.host.paths import draft_paths
from specplug.host.processing import Block, build_processing, process_logits
from specplug.testing.models import toy_tokenizer
from specplug.trees import ROOT, Tree, tree_of
from specplug.types import Draft

VOCAB = 8
TEXTS = ["<p>", "ab", "c", "d", "ba", "a", "b", "</s>"]


def random_tree(draw: random.Random) -> Tree:
    num_nodes = draw.randint(2, 9)
    return tree_of(tuple(draw.randrange(-1, node) for node in range(num_nodes)))


def no_doubles(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    logits[output[-1]] -= 3.0
    logits[len(output) % VOCAB] += 1.0
    return logits


EACH: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.75, "repetition_penalty": 1.5},
    "bad words": {"bad_words": [[a, b] for a in range(VOCAB) for b in range(a)] + [[1, 2, 3], [4, 4, 4], [6]]},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [2]},
    "allowed": {"allowed_token_ids": [1, 2, 5]},
    "bias": {"logit_bias": {1: 2.5, 3: -4.0}},
    "custom": {"logits_processors": [no_doubles]},
}
EACH["all"] = {name: value for values in EACH.values() for name, value in values.items()}


def processed(
    values: dict[str, Any], text: Sequence[int], drafts: Sequence[int], tree: Tree | None, logits: torch.Tensor
) -> torch.Tensor:
    """The rows of one request that stands behind another's rows in the batch."""
    params = SamplingParams(**values)
    processing = build_processing(
        params, vocab_size=VOCAB, tokenizer=None, ending_ids=[7, 2], device=torch.device("cpu")
    )
    assert processing is not None
    batch = torch.cat([torch.zeros(3, VOCAB), logits])
    ids = np.array(text, dtype=np.int32)
    blocks = [
        Block(processing, ids, 2, path.rows, np.array(path.draft_ids, dtype=np.int64), path.first)
        for path in draft_paths(drafts, 3, tree)
    ]
    assert process_logits(batch, blocks) == {}
    assert not batch[:3].any(), "rows of others are not touched"
    return batch[3:]


@pytest.mark.parametrize("values", EACH.values(), ids=list(EACH))
def test_processing_of_a_tree_is_that_of_its_paths(values: dict[str, Any]) -> None:
    draw = random.Random(0)
    num_edited = 0
    for _ in range(40):
        tree = random_tree(draw)
        text, drafts = ([draw.randrange(VOCAB) for _ in range(size)] for size in (4, len(tree)))
        logits = torch.randn(len(tree) + 1, VOCAB)
        found = processed(values, text, drafts, tree, logits)
        for node in range(ROOT, len(tree)):
            path = tree.path(node)
            rows = [0, *(each + 1 for each in path)]
            alone = processed(values, text, [drafts[each] for each in path], None, logits[rows])
            assert torch.equal(found[node + 1], alone[-1]), (tree.parents, node)
        num_edited += int((found != logits).any(1).sum())
    assert num_edited > 40


pytest.importorskip("xgrammar")


def test_grammar_masks_and_pruning_of_a_tree_are_those_of_its_paths() -> None:
    draw = random.Random(1)
    compiler = GrammarCompiler(toy_tokenizer(TEXTS, eos_token_id=7), VOCAB)
    structure = StructuredOutputsParams(regex="(ab|c)(ba|d|ab)*c?")
    num_pruned = 0
    for _ in range(40):
        tree = random_tree(draw)
        drafts = [draw.choice([1, 2, 3, 4, 5, 6]) for _ in range(len(tree))]
        grammar = compiler.compile(structure, [7], None)
        num_legal = [grammar.walk([drafts[each] for each in tree.path(node)])[0] for node in range(len(tree))]
        kept = [node for node in range(len(tree)) if num_legal[node] == tree.depths[node]]
        cut = cut_drafts([grammar], Draft.from_trees([drafts], [tree.parents]))
        assert cut.draft_token_ids.tolist() == [drafts[node] for node in kept]
        num_pruned += len(tree) - len(kept)
        masked = torch.zeros(3 + len(tree) + 1, VOCAB)
        apply_masks(masked, [(grammar, path) for path in draft_paths(drafts, 3, tree)])
        assert not masked[:3].any()
        for node in [ROOT, *kept]:
            path = tree.path(node)
            alone = torch.zeros(len(path) + 1, VOCAB)
            apply_masks(alone, [(grammar, each) for each in draft_paths([drafts[n] for n in path], 0, None)])
            assert torch.equal(masked[3 + node + 1], alone[-1]), (tree.parents, node)
            assert alone[-1].isinf().any()
    assert num_pruned > 40
