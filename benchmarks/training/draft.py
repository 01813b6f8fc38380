"""Small Llama models, trained to guess what the target writes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from training.budget import Budget
from training.loop import minimise
from training.losses import Candidates, sampled_cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["Example", "Held", "acceptance", "hard_example", "new_draft", "principal_embeddings", "train"]

TOKENS_PER_STEP = 4096
NUM_RANDOM = 2048
LEARNING_RATE = 3e-3
LEAST_OWN = 0.3
"""Share of the target's text in the batches at the start."""


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids ``[n]`` and, for each position, what may follow: ``label_ids`` and ``label_probs`` ``[n, labels]``;
    probabilities of zero leave a position out. ``judged``: from where to where the next token is the target's."""

    token_ids: torch.Tensor
    label_ids: torch.Tensor
    label_probs: torch.Tensor
    judged: tuple[int, int] = (0, 0)


def hard_example(token_ids: torch.Tensor) -> Example:
    """Each token is the label of the one before."""
    labels = token_ids.roll(-1).unsqueeze(1)
    probs = torch.ones(len(token_ids), 1)
    probs[-1] = 0.0
    return Example(token_ids, labels, probs)


def new_draft(config: LlamaConfig, embeddings: torch.Tensor) -> LlamaForCausalLM:
    """A draft with tied embeddings that start as given, ``[vocab, hidden]``."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embeddings)
    return model


def principal_embeddings(embeddings: torch.Tensor, size: int) -> torch.Tensor:
    """The target's embeddings ``[vocab, hidden]`` in their ``size`` directions of largest variance; where it has fewer
    directions, random ones beside. Scaled so that logits of a normalised state have a variance of about 1."""
    centred = embeddings.detach().float()
    centred = centred - centred.mean(0)
    _, directions = torch.linalg.eigh(centred.T @ centred)  # ascending
    found = centred @ directions[:, -size:]
    missing = torch.randn(len(found), size - found.shape[1], generator=torch.Generator().manual_seed(0))
    joined = torch.cat((found, missing * found.std()), 1)
    return joined / (joined.std() * size**0.5)


def train(
    model: LlamaForCausalLM, natural: Sequence[Example], own: Sequence[Example], budget: Budget
) -> dict[str, Any]:
    """Until the budget is used up: at first mostly natural text, at last only the target's. Returns what was done."""
    streams = [_batches(natural, seed=1), _batches(own, seed=2)]
    chance = random.Random(3)

    def next_loss(done: float) -> tuple[torch.Tensor, int]:
        batch = next(streams[int(not natural or chance.random() < LEAST_OWN + done)])
        return _loss(model, batch), int((batch.label_probs.sum(-1) > 0).sum())

    model.train()
    found = minimise(model.parameters(), next_loss, budget, learning_rate=LEARNING_RATE)
    model.eval()
    return found


def _loss(model: LlamaForCausalLM, batch: Example) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        states = model.model(batch.token_ids).last_hidden_state
        is_labelled = batch.label_probs.sum(-1) > 0
        label_ids, label_probs = batch.label_ids[is_labelled], batch.label_probs[is_labelled]
        candidates = Candidates(label_ids, label_probs, model.config.vocab_size, NUM_RANDOM)
        return sampled_cross_entropy(states[is_labelled], model.get_output_embeddings().weight, candidates)


def _batches(examples: Sequence[Example], seed: int) -> Iterator[Example]:
    """Endless batches of about ``TOKENS_PER_STEP`` tokens, of examples of similar length, padded at the end."""
    chance = random.Random(seed)
    while True:
        order = sorted(examples, key=lambda example: len(example.token_ids) + chance.random() * 16)
        groups: list[list[Example]] = [[]]
        for example in order:
            if (len(groups[-1]) + 1) * len(example.token_ids) > TOKENS_PER_STEP and groups[-1]:
                groups.append([])
            groups[-1].append(example)
        chance.shuffle(groups)
        yield from map(_stack, groups)


def _stack(examples: Sequence[Example]) -> Example:
    def padded(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

    return Example(
        padded([example.token_ids for example in examples]),
        padded([example.label_ids for example in examples]),
        padded([example.label_probs for example in examples]),
    )


# --- how well it guesses --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """On held-out continuations: how often the draft's likeliest token is the target's next one, and the mean
    acceptance length that follows for greedy drafts of 3 and 5 tokens from every position."""

    agreement: float
    mean_acceptance_length_3: float
    mean_acceptance_length_5: float
    num_positions: int


@torch.inference_mode()
def acceptance(model: LlamaForCausalLM, examples: Sequence[Example]) -> Held:
    """Exact for greedy chains: a draft is only right where all before it were, and then the contexts are the same."""
    lengths: dict[int, list[float]] = {1: [], 3: [], 5: []}
    for example in examples:
        judged = slice(*example.judged)
        logits = model(example.token_ids.unsqueeze(0)).logits[0, judged]
        runs = run_lengths((logits.argmax(-1) == example.label_ids[judged, 0]).tolist())
        for k, found in lengths.items():
            found += [min(run, k) for run in runs]
    means = {k: sum(found) / max(1, len(found)) for k, found in lengths.items()}
    return Held(round(means[1], 4), round(1 + means[3], 4), round(1 + means[5], 4), len(lengths[1]))


def run_lengths(is_equal: Sequence[bool]) -> list[int]:
    """For each position how many true ones follow without a break, itself included."""
    runs: list[int] = []
    for equal in reversed(is_equal):
        runs.append(runs[-1] + 1 if equal and runs else int(equal))
    return runs[::-1]
