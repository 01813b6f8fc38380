"""The formulas of one head, written out number by number, and fixed weights with known outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from specplug_mlp.build import load_head
from specplug_mlp.checkpoint import Checkpoint
from specplug_mlp.head import MlpHead
from specplug_mlp.sample import SAMPLE_CONFIG, sample_tensors

Save = Callable[..., Path]

GOLDENS = Path(__file__).parent / "goldens"


class Target:
    """As much of a target as a head is loaded for."""

    hidden_size = 32
    vocab_size = 64
    tokenizer = None
    dtype = torch.float32
    device = torch.device("cpu")


def written_out(tensors: dict[str, torch.Tensor], config: Any, state: list[float], token_ids: list[int]) -> list[Any]:
    """The logits of each stage for one request in plain Python, as the paper and the released code compute them."""

    def stored(name: str, stage: int) -> Any:
        if config["tie_weights"] and stage > (1 if name == "proj" else 0):
            stage = 1 if name == "proj" else 0
        return tensors[f"speculator.{name}.{stage}.weight"].double().tolist()

    def rms(values: list[float]) -> list[float]:
        scale = 1 / math.sqrt(sum(value * value for value in values) / len(values) + 1e-6)
        return [value * scale for value in values]

    def times(matrix: Any, values: list[float]) -> list[float]:
        return [sum(weight * value for weight, value in zip(row, values, strict=True)) for row in matrix]

    state_weight = 0.5 ** (0.5 / config["n_predict"])
    emb_weight = math.sqrt((1 - state_weight**2) * config["inner_dim"] / 2)
    if config["scale_input"]:
        state = [value / math.sqrt(2) for value in rms(state)]
    logits = []
    for stage, token_id in enumerate(token_ids):
        bias = tensors[f"speculator.ln.{0 if config['tie_weights'] else stage}.bias"].double().tolist()
        embedded = stored("emb", stage)[token_id]
        mixed = [
            p + emb_weight / state_weight * e
            for p, e in zip(times(stored("proj", stage), state), embedded, strict=True)
        ]
        normed = [n * w + b for n, w, b in zip(rms(mixed), stored("ln", stage), bias, strict=True)]
        state = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in normed]
        logits.append(times(stored("head", stage), state))
    return logits


def all_logits(head: MlpHead, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """``[stages, n, vocab]``, the tokens ``[stages, n]`` given."""
    states = head.start(states)
    logits = []
    for stage, ids in enumerate(token_ids):
        states = head(states, ids, stage)
        logits.append(head.logits(states, stage))
    return torch.stack(logits)


@pytest.mark.parametrize("scale_input", [True, False])
@pytest.mark.parametrize("tie_weights", [True, False])
def test_stages_are_the_published_formula(save: Save, tie_weights: bool, scale_input: bool) -> None:
    config = {**SAMPLE_CONFIG, "tie_weights": tie_weights, "scale_input": scale_input}
    tensors = sample_tensors(config)
    head, _ = load_head(Checkpoint.read(save(tensors=tensors, **config)), Target())
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(3, 32, generator=generator)
    token_ids = torch.randint(64, (4, 3), generator=generator)
    found = all_logits(head, states, token_ids)
    for row in range(3):
        expected = written_out(tensors, config, states[row].tolist(), token_ids[:, row].tolist())
        torch.testing.assert_close(found[:, row], torch.tensor(expected), rtol=1e-5, atol=1e-4)


def test_B142_a_projection_in_the_wrong_order_would_show(save: Save) -> None:
    """The control of the test above: other weights give other logits by far more than its tolerance."""
    tensors = sample_tensors(SAMPLE_CONFIG)
    swapped = {**tensors, "speculator.proj.1.weight": tensors["speculator.proj.2.weight"].clone()}
    one, _ = load_head(Checkpoint.read(save("one", tensors=tensors)), Target())
    two, _ = load_head(Checkpoint.read(save("two", tensors=swapped)), Target())
    token_ids = torch.zeros(4, 1, dtype=torch.int64)
    difference = (all_logits(one, torch.ones(1, 32), token_ids) - all_logits(two, torch.ones(1, 32), token_ids)).abs()
    assert difference[0].max() < 1e-4
    assert difference[1].max() > 0.1


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_logits_are_those_of_vllms_modules(name: str, save: Save) -> None:
    """Goldens written by ``parity/vllm_parity.py`` from vLLM 0.32's own modules."""
    golden = load_file(GOLDENS / f"{name}.safetensors")
    tensors = {key.removeprefix("weights."): value for key, value in golden.items() if key.startswith("weights.")}
    config = {"tie_weights": name == "tied", "scale_input": name == "tied", "inner_dim": 16, "n_predict": 3}
    head, _ = load_head(Checkpoint.read(save(tensors=tensors, **config)), Target())
    found = all_logits(head, golden["states"], golden["token_ids"])
    torch.testing.assert_close(found, golden["logits"], rtol=0, atol=1e-4)


def test_repeated_tied_tensors_are_understood(save: Save) -> None:
    """Files may hold the shared tensors once, or once per stage."""
    config = {**SAMPLE_CONFIG, "tie_weights": True}
    tensors = sample_tensors(config)
    repeated = dict(tensors)
    for stage in range(1, 4):
        for name in ("emb", "head", "ln"):
            repeated[f"speculator.{name}.{stage}.weight"] = tensors[f"speculator.{name}.0.weight"].clone()
        repeated[f"speculator.ln.{stage}.bias"] = tensors["speculator.ln.0.bias"].clone()
        repeated[f"speculator.proj.{stage}.weight"] = tensors["speculator.proj.1.weight"].clone()
    heads = [
        load_head(Checkpoint.read(save(str(number), tensors=each, tie_weights=True)), Target())[0]
        for number, each in enumerate((tensors, repeated))
    ]
    token_ids = torch.arange(4)[:, None]
    torch.testing.assert_close(*(all_logits(head, torch.ones(1, 32), token_ids) for head in heads), rtol=0, atol=1e-4)
