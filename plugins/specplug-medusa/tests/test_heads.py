"""The formula of one head, written out number by number, and logits that vLLM's own module computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from specplug_medusa.build import load_heads
from specplug_medusa.checkpoint import Checkpoint
from specplug_medusa.sample import ORIGINAL_CONFIG, SAMPLE_CONFIG, original_names, sample_tensors, write_sample

from specplug.testing import tiny_llama

Save = Callable[..., Path]
GOLDENS = Path(__file__).parent / "goldens"


class Target:
    """As much of a target as heads are loaded for."""

    hidden_size, vocab_size, tokenizer = 32, 64, None
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        self.model = tiny_llama()


def all_logits(folder: Path, states: torch.Tensor, num_heads: int = 4) -> tuple[torch.Tensor, Any]:
    """``[heads, n, vocab]``, and the space of the ids."""
    heads, space = load_heads(Checkpoint.read(folder), Target(), num_heads)
    with torch.no_grad():
        features = heads(states)
        return torch.stack([heads.logits(features[:, head], head) for head in range(num_heads)]), space


def written_out(tensors: dict[str, torch.Tensor], num_layers: int, head: int, state: list[float]) -> list[float]:
    """One head's logits in plain Python: residual blocks of SiLU, then the output head."""

    def times(name: str, values: list[float]) -> list[float]:
        bias = tensors.get(f"{name}.bias")
        rows = tensors[f"{name}.weight"].double().tolist()
        shifts = [0.0] * len(rows) if bias is None else bias.double().tolist()
        return [
            sum(weight * value for weight, value in zip(row, values, strict=True)) + shift
            for row, shift in zip(rows, shifts, strict=True)
        ]

    for layer in range(num_layers):
        projected = times(f"blocks.{head}.layers.{layer}", state)
        state = [x + y / (1 + math.exp(-y)) for x, y in zip(state, projected, strict=True)]
    return times(f"lm_heads.{head}", state)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_heads_are_the_published_formula(save: Save, num_layers: int, has_bias: bool) -> None:
    tensors = sample_tensors({**SAMPLE_CONFIG, "num_hidden_layers": num_layers}, has_bias=has_bias)
    tensors = {name: value * 0.2 for name, value in tensors.items()}
    states = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    found, _ = all_logits(save(tensors=tensors, num_hidden_layers=num_layers), states)
    for head in range(4):
        for row in range(3):
            expected = written_out(tensors, num_layers, head, states[row].tolist())
            torch.testing.assert_close(found[head, row], torch.tensor(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "deep", "shared", "truncated", "original"])
def test_logits_are_those_of_vllms_module(kind: str, save: Save) -> None:
    """Goldens written by ``parity/vllm_parity.py`` from vLLM 0.32's own module and loader."""
    golden = load_file(GOLDENS / f"{kind}.safetensors")
    tensors = {key.removeprefix("weights."): value for key, value in golden.items() if key.startswith("weights.")}
    config: dict[str, Any] = {
        "plain": {"num_heads": 3},
        "deep": {"num_heads": 3, "num_hidden_layers": 2, "medusa_fc_bias": True, "logit_scale": 0.5},
        "shared": {"num_heads": 3, "original_lm_head": True},
        "truncated": {"num_heads": 3, "original_lm_head": True, "truncated_vocab_size": 16},
        "original": {"base": ORIGINAL_CONFIG, "medusa_num_heads": 3},
    }[kind]
    found, space = all_logits(save(tensors=tensors, **config), golden["states"], 3)
    expected = golden["logits"]
    if kind == "truncated":  # vLLM scatters into the target's vocabulary; here rows stand for ids
        ids = space.to_target_ids(torch.arange(16))
        assert expected.isfinite().sum(-1).unique().tolist() == [16]
        expected = expected[..., ids]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("prefix", ["", "medusa_heads.", "medusa_head."])
@pytest.mark.parametrize("is_original", [True, False])
def test_both_layouts_are_the_same_heads(save: Save, prefix: str, is_original: bool) -> None:
    tensors = sample_tensors({**SAMPLE_CONFIG, "num_hidden_layers": 2}, has_bias=True)
    states = torch.ones(1, 32)
    expected, _ = all_logits(save("plain", tensors=tensors, num_hidden_layers=2), states)
    if is_original:
        tensors = original_names(tensors, 2)
    base = {**ORIGINAL_CONFIG, "medusa_num_layers": 2} if is_original else {**SAMPLE_CONFIG, "num_hidden_layers": 2}
    folder = save("other", tensors={prefix + name: value for name, value in tensors.items()}, base=base)
    torch.testing.assert_close(all_logits(folder, states)[0], expected, rtol=0, atol=1e-3)


def test_the_targets_own_output_head(save: Save) -> None:
    """``original_lm_head`` without one in the checkpoint: the target's, whole or the rows of the token map."""
    tensors, states = sample_tensors(SAMPLE_CONFIG, num_outputs=0), torch.ones(2, 32)
    whole, _ = all_logits(save("whole", tensors=tensors, original_lm_head=True), states)
    own = {**tensors, "lm_head.weight": Target().model.lm_head.weight.detach().clone()}
    torch.testing.assert_close(all_logits(save("own", tensors=own, original_lm_head=True), states)[0], whole)
    token_map = torch.tensor([9, 4, 33])
    some = {**tensors, "token_map": token_map}
    found, space = all_logits(save("some", tensors=some, original_lm_head=True, truncated_vocab_size=3), states)
    torch.testing.assert_close(found, whole[..., token_map], rtol=0, atol=1e-3)
    assert space.to_target_ids(torch.arange(3)).tolist() == [9, 4, 33]


def test_fewer_heads_are_loaded_than_there_are(tmp_path: Path) -> None:
    folder = write_sample(tmp_path)
    states = torch.ones(1, 32)
    torch.testing.assert_close(all_logits(folder, states, 2)[0], all_logits(folder, states, 4)[0][:2])
