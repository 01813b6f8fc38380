"""The compiled forward: as near to exact as transformers' own, and the same bits however a text is fed."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from specplug_native import kernels
from specplug_native.decoder import NativeDecoder
from specplug_native.library import load_library

from specplug.models.llama import LlamaModel
from specplug.models.runner import TargetRunner
from specplug.testing.architectures import VOCAB_SIZE, plain_logits, ragged_logits, tiny_model
from specplug.trees import Tree, chain_parents, tree_of

pytestmark = pytest.mark.skipif(load_library() is None, reason="this processor has no AVX-512 with bfloat16")

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 208, "head_dim": 32, "initializer_range": 0.1}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, wide heads": ("llama", {"head_dim": 96, "num_attention_heads": 8}),
    "llama, 3 queries a key": ("llama", {"hidden_size": 192, "num_attention_heads": 6}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {}),
    "mistral, windows of 40": ("mistral", {"sliding_window": 40}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"num_key_value_heads": 1}),
}
LIMITS = {"max_num_seqs": 4, "max_model_len": 256, "max_query_tokens": 70}


def bfloat16_model(name: str) -> Any:
    architecture, overrides = MODELS[name]
    model = tiny_model(architecture, **{**SIZES, **overrides})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases are zeros and norms ones in a new model
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    return model.to(torch.bfloat16)


def native_runner(model: Any, **limits: int) -> TargetRunner:
    decoder = kernels.decoder(LlamaModel.of(model, 256))  # type: ignore[arg-type]
    assert isinstance(decoder, NativeDecoder)
    return TargetRunner(model, decoder=decoder, **{**LIMITS, **limits})


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return bfloat16_model(request.param)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def texts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits.double() - exact.double()).norm() / exact.double().norm())


def test_it_is_as_near_to_exact_as_transformers(model: Any) -> None:
    sequences = texts(150, 9, 70, 1)
    exact = plain_logits(copy.deepcopy(model).float(), sequences)
    theirs = plain_logits(model, sequences)
    ours = ragged_logits(native_runner(model), sequences, chunks=(0, 1, 3, 65, 66))
    for own, other, wanted in zip(ours, theirs, exact, strict=True):
        assert error(own, wanted) < max(1.3 * error(other, wanted), 0.004)


@pytest.mark.parametrize(
    ("field", "factor"), [("scaling", 1.1), ("norm_eps", 1e4)], ids=["other scaling", "other epsilon"]
)
def test_a_wrong_forward_would_be_noticed(field: str, factor: float) -> None:
    model, sequences = bfloat16_model("llama"), texts(150)
    (exact,), (theirs,) = plain_logits(copy.deepcopy(model).float(), sequences), plain_logits(model, sequences)
    parts = LlamaModel.of(model, 256)
    assert parts is not None
    object.__setattr__(parts, field, getattr(parts, field) * factor)
    (ours,) = ragged_logits(TargetRunner(model, decoder=kernels.decoder(parts), **LIMITS), sequences)
    assert error(ours, exact) > 2 * error(theirs, exact)


def test_the_bits_do_not_depend_on_how_a_text_is_fed(model: Any) -> None:
    sequences = texts(150, 9, 130, 40)
    runner = native_runner(model)
    first = ragged_logits(runner, sequences, seed=0)
    for seed, chunks in ((1, (1,)), (2, (0, 2, 5)), (3, (0, 33, 66, 68))):
        while runner.cache.num_rows:
            runner.release(0)
        again = ragged_logits(runner, sequences, seed=seed, chunks=chunks)
        assert all(map(torch.equal, first, again))
    for sequence, expected in zip(sequences, first, strict=True):
        while runner.cache.num_rows:
            runner.release(0)
        (alone,) = ragged_logits(runner, [sequence], chunks=(1, 7), junk=(0,))
        assert torch.equal(alone, expected)


def test_the_bits_do_not_depend_on_the_threads(one_thread: None) -> None:
    model, sequences = bfloat16_model("llama"), texts(100, 9)
    runner = native_runner(model)
    alone = ragged_logits(runner, sequences)
    while runner.cache.num_rows:
        runner.release(0)
    torch.set_num_threads(3)
    assert all(map(torch.equal, alone, ragged_logits(runner, sequences)))


@pytest.mark.parametrize(("ids", "wanted"), [([1, VOCAB_SIZE], [0]), ([-1], [0]), ([1, 2], [2])])
def test_what_is_out_of_range_is_refused(ids: list[int], wanted: list[int]) -> None:
    runner = native_runner(bfloat16_model("llama"))
    runner.acquire(None)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="out of range"):
        runner.forward(torch.tensor(ids), [len(ids)], torch.tensor(wanted))
    assert runner.cache.lengths == [0]


@pytest.mark.parametrize("name", ["llama", "mistral, windows of 40"])
def test_a_path_of_a_tree_is_a_text(name: str) -> None:
    draw = random.Random(5)
    runner = native_runner(bfloat16_model(name))
    prompts = texts(60, 61, 33)
    trees: dict[int, Tree] = {}
    for row in range(len(prompts)):
        runner.acquire(None)  # type: ignore[arg-type]
        trees[row] = tree_of(tuple(draw.randrange(-1, node) for node in range(draw.randint(2, 12))))
    trees[1] = tree_of(chain_parents(7))
    runner.forward(torch.cat(prompts), list(map(len, prompts)), torch.tensor([0]))
    nodes = texts(*(1 + len(tree) for tree in trees.values()))
    counts = list(map(len, nodes))
    found = torch.split(runner.forward(torch.cat(nodes), counts, torch.arange(sum(counts)), trees).logits, counts)
    for row, tree in trees.items():
        for node in range(len(tree)):
            path = [0, *(1 + each for each in range(len(tree)) if tree.ancestry[node, each])]
            while runner.cache.num_rows:
                runner.release(0)
            (expected,) = ragged_logits(runner, [torch.cat((prompts[row], nodes[row][path]))], chunks=(16,), junk=(0,))
            assert error(found[row][1 + node], expected[-1]) < 0.01
            assert not tree.is_chain or torch.equal(found[row][1 + node], expected[-1])


def test_taps_are_the_layers_outputs(model: Any) -> None:
    (sequence,) = texts(50)
    with torch.inference_mode():
        exact = copy.deepcopy(model).float()(sequence[None], output_hidden_states=True).hidden_states
        theirs = model(sequence[None], output_hidden_states=True).hidden_states
    runner = native_runner(model)
    runner.tap([0, 1, 2])
    runner.acquire(None)  # type: ignore[arg-type]
    states = runner.forward(sequence, [50], torch.tensor([49])).hidden_states
    assert torch.equal(states[0], theirs[0][0])
    for layer in (1, 2):
        assert error(states[layer], exact[layer][0]) < max(1.3 * error(theirs[layer][0], exact[layer][0]), 0.004)


@pytest.mark.parametrize(
    ("name", "overrides", "dtype"),
    [
        ("llama", {}, torch.float32),
        ("llama", {"hidden_act": "gelu"}, torch.bfloat16),
        ("llama", {"head_dim": 16}, torch.bfloat16),
        ("llama", {"intermediate_size": 200}, torch.bfloat16),
        ("llama", {"head_dim": 288}, torch.bfloat16),
    ],
    ids=["float32", "gelu", "small heads", "odd width", "large heads"],
)
def test_what_it_cannot_run_is_left_alone(name: str, overrides: dict[str, Any], dtype: torch.dtype) -> None:
    model = tiny_model(name, **{**SIZES, **overrides}).to(dtype)
    sequences = texts(20)
    before = plain_logits(model, sequences)
    assert kernels.decoder(LlamaModel.of(model, 256)) is None  # type: ignore[arg-type]
    assert all(map(torch.equal, before, plain_logits(model, sequences)))


@pytest.mark.parametrize("name", ["gemma3", "gpt_neox"])
def test_other_models_are_not_of_the_shape(name: str) -> None:
    assert LlamaModel.of(tiny_model(name).to(torch.bfloat16), 256) is None


def test_the_layers_leave_the_model() -> None:
    model = bfloat16_model("llama")
    native_runner(model)
    assert sum(parameter.numel() for parameter in model.get_decoder().layers.parameters()) == 0
