"""Trees of draft tokens through the packed forward: every path as if it were the row's text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specplug.models.cache import RaggedCache
from specplug.models.runner import TargetRunner
from specplug.models.step_plan import LayerKind, StepPlan, plan_step
from specplug.testing.architectures import SUPPORTED_ARCHITECTURES, VOCAB_SIZE, plain_logits, tiny_model
from specplug.trees import Tree, chain_parents, tree_of

MakeRunner = Callable[..., TargetRunner]
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}
CPU = torch.device("cpu")


@pytest.fixture
def make_runner() -> Iterator[MakeRunner]:
    runners: list[TargetRunner] = []

    def make(model: Any, **limits: int) -> TargetRunner:
        sizes = {"max_num_seqs": 4, "max_model_len": 128, "max_query_tokens": 16} | limits
        runners.append(TargetRunner(model, **sizes))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def random_tree(draw: random.Random, num_nodes: int) -> Tree:
    return tree_of(tuple(draw.randrange(-1, node) for node in range(num_nodes)))


class Rows:
    """Texts that grow in a runner by prompt chunks, chains and trees, each verified by a random walk."""

    def __init__(self, runner: TargetRunner, num_rows: int, seed: int) -> None:
        self.runner = runner
        self.draw = random.Random(seed)
        self.texts: list[list[int]] = [[] for _ in range(num_rows)]
        self.expected: list[tuple[list[int], torch.Tensor]] = []
        """What was fed on each path, and the logits that came back for its end."""
        for _ in self.texts:
            runner.acquire(None)  # type: ignore[arg-type]

    def ids(self, count: int) -> list[int]:
        return [self.draw.randrange(VOCAB_SIZE) for _ in range(count)]

    def step(self, max_nodes: int) -> None:
        """Append 0 to 3 tokens that stand to each row, and on some of them a tree; keep a random path of it."""
        new = [self.ids(self.draw.choice((0, 1, 1, 3)) if text else 2) for text in self.texts]
        trees = {
            row: random_tree(self.draw, self.draw.randint(1, max_nodes))
            for row, ids in enumerate(new)
            if ids and self.draw.random() < 0.7
        }
        nodes = [self.ids(len(trees[row])) if row in trees else [] for row in range(len(new))]
        fed = [ids + of_row for ids, of_row in zip(new, nodes, strict=True)]
        if not any(fed):
            return
        flat = torch.tensor([token for ids in fed for token in ids])
        counts = [len(ids) for ids in fed]
        logits = self.runner.forward(flat, counts, torch.arange(len(flat)), trees).logits.split(counts)
        moves: list[tuple[int, int, int]] = []
        lengths = []
        for row, ids in enumerate(new):
            self.texts[row] += ids
            self._expect(self.texts[row], len(ids), logits[row][: len(ids)])
            path = self._walk(row, trees.get(row), nodes[row], logits[row][len(ids) :])
            first = len(self.texts[row])
            moves += [(row, first + node, first + depth) for depth, node in enumerate(path) if node != depth]
            self.texts[row] += [nodes[row][node] for node in path]
            lengths.append(len(self.texts[row]))
        self.runner.compact(*([list(each) for each in zip(*moves, strict=True)] if moves else ([], [], [])))
        for row, length in enumerate(lengths):
            self.runner.rollback(row, length)

    def _expect(self, text: list[int], count: int, logits: torch.Tensor) -> None:
        for number in range(count):
            self.expected.append((text[: len(text) - count + number + 1], logits[number].clone()))

    def _walk(self, row: int, tree: Tree | None, nodes: list[int], logits: torch.Tensor) -> tuple[int, ...]:
        if tree is None:
            return ()
        for node in range(len(tree)):
            text = self.texts[row] + [nodes[each] for each in tree.path(node)]
            self.expected.append((text, logits[node].clone()))
        return tree.path(self.draw.randrange(-1, len(tree)))


@pytest.mark.parametrize("name", SUPPORTED_ARCHITECTURES)
def test_ragged_trees_and_chains_with_compaction_equal_each_path_alone(name: str, make_runner: MakeRunner) -> None:
    """Past the window (8 tokens) of gemma3 and mistral, and past the end of their rings."""
    model = tiny_model(name)
    rows = Rows(make_runner(model, max_query_tokens=12), 3, seed=3)
    while min(map(len, rows.texts)) < 40 and max(map(len, rows.texts)) < 100:
        rows.step(max_nodes=9)
    plain = plain_logits(model, [torch.tensor(text) for text, _ in rows.expected])
    for (_, ours), logits in zip(rows.expected, plain, strict=True):
        torch.testing.assert_close(ours, logits[-1], **TOLERANCE)


def test_a_tree_deeper_than_the_window(make_runner: MakeRunner) -> None:
    model = tiny_model("mistral")
    rows = Rows(make_runner(model, max_query_tokens=40), 1, seed=5)
    parents = (-1, -1, *range(22))  # two paths of 12 and 12 nodes, interleaved
    tree = tree_of(tuple(-1 if node < 2 else node - 2 for node in range(len(parents))))
    assert tree.max_depth == 12
    text, nodes = rows.ids(10), rows.ids(len(tree))
    logits = rows.runner.forward(torch.tensor(text + nodes), [10 + len(tree)], torch.arange(34), {0: tree}).logits
    for node in range(len(tree)):
        path = [nodes[each] for each in tree.path(node)]
        (alone,) = plain_logits(model, [torch.tensor(text + path)])
        torch.testing.assert_close(logits[10 + node], alone[-1], **TOLERANCE)


def test_a_batch_of_trees_equals_each_alone(make_runner: MakeRunner) -> None:
    model, draw = tiny_model("llama"), random.Random(0)
    trees = {row: random_tree(draw, size) for row, size in enumerate((1, 7, 4))}
    texts = [[draw.randrange(VOCAB_SIZE) for _ in range(9 + len(tree))] for tree in trees.values()]
    together = make_runner(model)
    for _ in texts:
        together.acquire(None)  # type: ignore[arg-type]
    flat = torch.tensor([token for text in texts for token in text])
    counts = [len(text) for text in texts]
    found = together.forward(flat, counts, torch.arange(len(flat)), trees).logits.split(counts)
    for row, text in enumerate(texts):
        alone = make_runner(model)
        alone.acquire(None)  # type: ignore[arg-type]
        logits = alone.forward(torch.tensor(text), [len(text)], torch.arange(len(text)), {0: trees[row]}).logits
        torch.testing.assert_close(found[row], logits, **TOLERANCE)


def written(plan: StepPlan, kind: LayerKind) -> torch.Tensor:
    """``[rows, slots]``: which of the step's tokens goes there, -1 for none."""
    buffer = torch.full((3, 1, 64, 1), -1.0)
    plan.kinds[kind].places.write(buffer, torch.arange(plan.position_ids.numel()).view(-1, 1, 1).float())
    return buffer[:, 0, :, 0]


@pytest.mark.parametrize("window", [None, 5])
def test_a_tree_of_width_1_is_planned_as_the_chain(window: int | None) -> None:
    kind = LayerKind(window, 64 if window is None else 12)
    lengths, counts = [7, 20, 3], [4, 3, 2]
    chain = plan_step(lengths, counts, [kind], CPU)
    trees = {0: tree_of(chain_parents(3)), 1: tree_of(chain_parents(2)), 2: tree_of(chain_parents(1))}
    tree = plan_step(lengths, counts, [kind], CPU, trees)
    assert torch.equal(chain.position_ids, tree.position_ids)
    assert torch.equal(written(chain, kind), written(tree, kind))
    for one, other in zip(chain.kinds[kind].segments, tree.kinds[kind].segments, strict=True):
        assert one.hidden is not None and other.hidden is not None
        assert torch.equal(one.hidden, other.hidden)


def test_without_a_tree_nothing_more_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains keep their cost: the same integers go to the device, and nothing is written into a mask."""
    monkeypatch.setattr(torch.Tensor, "index_fill_", None)
    kind = LayerKind(None, 64)
    for trees in (None, {}):
        plan = plan_step([7, 20], [4, 3], [kind], CPU, trees)
        assert plan.position_ids.tolist() == [[7, 8, 9, 10, 20, 21, 22]]


def test_siblings_share_a_position_and_take_slots_of_their_own() -> None:
    kind = LayerKind(None, 64)
    plan = plan_step([5], [5], [kind], CPU, {0: tree_of((-1, -1, 0, 1))})
    assert plan.position_ids.tolist() == [[5, 6, 6, 7, 7]]
    assert written(plan, kind)[0, 4:11].tolist() == [-1, 0, 1, 2, 3, 4, -1]
    (segment,) = plan.kinds[kind].segments
    assert segment.hidden is not None
    assert (~segment.hidden[0, :, 5:]).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]
    assert not segment.hidden[0, :, :5].any()


# --- compaction ---------------------------------------------------------------------------------------------


def filled(windows: list[int | None], counts: list[int]) -> RaggedCache:
    """Every entry of every layer holds its row's number times 100 plus its position."""
    cache = RaggedCache(windows, max_num_seqs=3, max_model_len=64, max_query_tokens=8, device=CPU)
    for _ in counts:
        cache.acquire()
    left = list(counts)
    while any(left):
        now = [min(count, 8) for count in left]
        left = [count - part for count, part in zip(left, now, strict=True)]
        step = cache.begin(now)
        rows = torch.arange(len(now)).repeat_interleave(torch.tensor(now))
        values = step.position_ids[0] + 100.0 * rows
        states = values[None, None, :, None].expand(1, 2, -1, 4)
        for index in range(len(cache)):
            cache.update(states, -states, index)
            step.take_layer()
        cache.end()
        cache.finish(now)
    return cache


@pytest.mark.parametrize("window", [None, 4])
def test_compaction_moves_the_named_entries_of_every_layer_and_no_other(window: int | None) -> None:
    cache = filled([window, None], [20, 5, 18])
    before = [[buffer.clone() for buffer in layer.buffers()] for layer in cache.ragged_layers]
    cache.compact([0, 0, 2], [17, 19, 16], [16, 17, 15])
    for layer, old in zip(cache.ragged_layers, before, strict=True):
        size = layer.kind.size
        for buffer, was in zip(layer.buffers(), old, strict=True):
            expected = was.clone()
            for row, source, target in ((0, 17, 16), (0, 19, 17), (2, 16, 15)):
                expected[row, :, target % size] = was[row, :, source % size]
            assert torch.equal(buffer, expected)
            assert not torch.equal(buffer, was)
    assert cache.lengths == [20, 5, 18]
    cache.compact([], [], [])


@pytest.mark.parametrize(("source", "target"), [(3, 3), (2, 3), (5, 1), (3, -1)])
def test_moves_that_cannot_be_are_refused(source: int, target: int) -> None:
    cache = filled([None], [5])
    with pytest.raises(ValueError, match="row 0 holds 5 tokens"):
        cache.compact([0], [source], [target])


def test_a_tree_needs_a_token_to_stand_on() -> None:
    cache = filled([None], [0, 3])
    with pytest.raises(ValueError, match="row 0: a tree of 2 nodes does not fit"):
        cache.begin([2, 0], {0: tree_of((-1, -1))})
    with pytest.raises(ValueError, match="row 1: a tree of 2 nodes does not fit"):
        cache.begin([0, 1], {1: tree_of((-1, -1))})
    cache.begin([0, 2], {1: tree_of((-1, -1))})
