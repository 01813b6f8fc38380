"""Trees over Medusa heads: their shapes, their tokens, exact texts with them, and what is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from specplug_medusa.build import build_proposer, load_heads
from specplug_medusa.checkpoint import Checkpoint
from specplug_medusa.options import MedusaOptions
from specplug_medusa.sample import SAMPLE_CONFIG, sample_tensors, write_sample
from specplug_medusa.tree import HeadTree, likeliest_tree

from specplug import (
    LLM,
    Batch,
    Capabilities,
    ConfigError,
    Draft,
    MethodSpec,
    PluginConfig,
    PluginContext,
    SamplingParams,
    hookimpl,
)
from specplug.hooks import ProcessManager
from specplug.models.runner import TargetRunner
from specplug.testing import ProposerConformance, Rig, tiny_llama
from specplug.testing.proposers import MethodPlugin

Save = Callable[..., Path]

PROMPTS = [[5, 6] * 5, [1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 3]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PATHS = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 2], [2]]


class Spy:
    def __init__(self) -> None:
        self.drafts: list[tuple[list[int], list[int], list[int]]] = []

    @hookimpl(wrapper=True)
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Any:
        draft: Draft | None = yield
        if draft is not None:
            ids = draft.draft_token_ids.tolist()
            trees = draft.trees()
            for row, count in enumerate(draft.num_draft_tokens):
                taken, tree = [ids.pop(0) for _ in range(count)], trees[row]
                parents = list(range(-1, count - 1)) if tree is None else list(tree.parents)
                self.drafts.append((batch.token_ids[row].tolist(), taken, parents))
        return draft


def decode(
    folder: Path | None, *, model: Any = None, params: Any = GREEDY, **keys: Any
) -> tuple[list[list[int]], Spy, Any]:
    spy, manager = Spy(), ProcessManager()
    manager.register(MethodPlugin(MethodSpec("spy", "wrapper", lambda config, context: spy)), name="spy")
    config = {"method": "medusa", "model": str(folder), **keys} if folder else None
    model = tiny_llama() if model is None else model
    with LLM(model, speculative_config=config, plugins=["spy"], manager=manager, strict=True, seed=0) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
        metrics = llm.acceptance
    return [list(output.outputs[0].token_ids) for output in outputs], spy, metrics


class Loaded:
    hidden_size, vocab_size, tokenizer = 32, 64, None
    dtype, device = torch.float32, torch.device("cpu")
    model = None


def expected_nodes(model: Any, folder: Path, text: Sequence[int], paths: Sequence[Sequence[int]]) -> list[int]:
    """The token of each path's last rank, from transformers' own hidden states."""
    heads, space = load_heads(Checkpoint.read(folder), Loaded(), 4)
    with torch.no_grad():
        hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
        features = heads(hidden[0, -2:-1])
        ordered = [
            space.restrict(heads.logits(features[:, head], head))[0].argsort(descending=True) for head in range(4)
        ]
    return [int(space.to_target_ids(ordered[len(path) - 1][path[-1]])) for path in paths]


def test_the_likeliest_tree_grows_where_chances_are_best() -> None:
    tree = likeliest_tree(6, 4)
    assert tree.paths[:2] == ((0,), (0, 0))
    assert set(likeliest_tree(5, 4).paths) < set(tree.paths)
    assert len(likeliest_tree(64, 5)) == 64
    assert max(map(len, likeliest_tree(64, 2).paths)) == 2
    assert likeliest_tree(3, 1).paths == ((0,), (1,), (2,))


def test_parents_and_widths() -> None:
    tree = HeadTree(tuple(map(tuple, PATHS)))
    assert tree.parents == (-1, -1, 0, 0, 1, 2, -1)
    assert tree.widths(7) == [3, 2, 3]
    assert tree.widths(4) == [2, 2]


@pytest.mark.parametrize(
    "keys", [{"medusa_tree": PATHS}, {"medusa_tree": 9}, {"medusa_tree": PATHS, "num_speculative_tokens": 4}]
)
def test_nodes_hold_the_tokens_of_their_ranks(save: Save, keys: dict[str, Any]) -> None:
    folder, model = save(), tiny_llama()
    plain, _, _ = decode(None)
    text, spy, _ = decode(folder, **keys)
    assert text == plain
    tree = likeliest_tree(9, 4) if keys["medusa_tree"] == 9 else HeadTree(tuple(map(tuple, PATHS)))
    most = keys.get("num_speculative_tokens", len(tree))
    assert {len(nodes) for _, nodes, _ in spy.drafts} >= {most, 1}  # a limit cuts the last nodes off
    for before, nodes, parents in spy.drafts:
        assert nodes == expected_nodes(model, folder, before, tree.paths[: len(nodes)])
        assert parents == list(tree.parents[: len(nodes)])


def test_texts_are_seed_exact(save: Save) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=24, ignore_eos=True)
    assert decode(save(), params=params, medusa_tree=12)[0] == decode(None, params=params)[0]


def test_a_token_map_and_shared_heads_draft_trees(save: Save) -> None:
    tensors = sample_tensors({**SAMPLE_CONFIG, "truncated_vocab_size": 5}, num_outputs=1)
    tensors["token_map"] = torch.tensor([3, 60, 19, 7, 41])
    folder = save(tensors=tensors, original_lm_head=True, truncated_vocab_size=5)
    text, spy, _ = decode(folder, medusa_tree=PATHS)
    assert text == decode(None)[0]
    assert {token for _, nodes, _ in spy.drafts for token in nodes} <= {3, 60, 19, 7, 41}


def second_best_model() -> Any:
    """A tiny model that goes round: token t is followed by t + 1, whatever came before."""
    model = tiny_llama(hidden_size=64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(64))
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight = torch.nn.Parameter(torch.eye(64).roll(1, 0))
    return model


def second_best_heads() -> dict[str, torch.Tensor]:
    """Heads whose second likeliest token is the right one."""
    tensors = sample_tensors({**SAMPLE_CONFIG, "hidden_size": 64})
    for head in range(4):
        tensors[f"blocks.{head}.layers.0.weight"].zero_()
        right = torch.eye(64).roll(head + 2, 0)
        tensors[f"lm_heads.{head}.weight"] = (right + 2 * right.roll(9, 0)).contiguous()
    return tensors


def test_a_tree_accepts_what_a_chain_misses(save: Save) -> None:
    folder = save(tensors=second_best_heads(), hidden_size=64)
    plain, _, _ = decode(None, model=second_best_model())
    chain, _, chained = decode(folder, model=second_best_model())
    tree, _, branched = decode(folder, model=second_best_model(), medusa_tree=[[0], [1], [1, 0], [1, 1], [1, 1, 1]])
    assert plain == chain == tree
    assert chained.aggregate().num_accepted_tokens == 0
    assert branched.aggregate().num_accepted_tokens / branched.aggregate().num_drafts > 2.5


def test_each_request_is_drafted_for_as_alone(save: Save) -> None:
    folder = save()
    _, together, _ = decode(folder, medusa_tree=PATHS)
    with LLM(tiny_llama(), speculative_config={"method": "medusa", "model": str(folder), "medusa_tree": PATHS}) as llm:
        alone = [list(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids) for prompt in PROMPTS]
    assert alone == decode(folder, medusa_tree=PATHS)[0]
    assert together.drafts


def fault(save: Save, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        decode(save(), **keys)
    return str(caught.value)


def test_trees_that_cannot_be(save: Save) -> None:
    assert "[0, 1] needs [0] before it" in fault(save, medusa_tree=[[1], [0, 1], [0]])
    assert "names [1] twice" in fault(save, medusa_tree=[[1], [1]])
    assert "[-1] is no path" in fault(save, medusa_tree=[[-1]])
    assert "has 5 tokens, and there are 4 heads" in fault(save, medusa_tree=[[0] * depth for depth in range(1, 6)])
    assert "must be a number of nodes, 1 or more" in fault(save, medusa_tree=0, num_speculative_tokens=3)
    assert "draws; leave one out" in fault(save, medusa_tree=3, draft_sample_method="probabilistic")
    assert "medusa_tree" in fault(save, medusa_tree=True, num_speculative_tokens=3)


def make_target() -> TargetRunner:
    return TargetRunner(tiny_llama(), max_num_seqs=8, max_model_len=64, max_query_tokens=8)


class TestConformance(ProposerConformance):
    rig = Rig(make_target=make_target, num_tokens=24, num_speculative_tokens=7, capabilities=Capabilities(tree=True))

    def make_proposer(self, context: PluginContext) -> object:
        with tempfile.TemporaryDirectory() as folder:
            options = MedusaOptions(model=str(write_sample(Path(folder))), medusa_tree=PATHS)
            return build_proposer(PluginConfig("medusa", context.session.num_speculative_tokens, options), context)
