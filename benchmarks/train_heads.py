"""Train heads that draft from the target's hidden states, on a CPU: EAGLE-3, an MLP speculator, Medusa.

    python benchmarks/train_heads.py [--minutes 20] [--only eagle3|mlp|medusa] [--output FOLDER]

They learn from the target's greedy continuations and the states that ``extract_hidden_states`` wrote beside them
(shared with ``train_tiny_draft.py``), and know the 8192 tokens that the target expects most often. Each becomes a
folder in its published format, with a ``training.json`` beside: times, losses, and the acceptance on held-out
continuations.

A minute is one of two busy cores, counted in CPU time; the continuations take their share of it once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from train_tiny_draft import CORPUS_SHARE, arguments, prepare
from training.budget import CORES, Budget, write_report
from training.corpus import Corpus
from training.eagle3 import Eagle3
from training.head_data import DraftVocabulary, batches, batches_once, draft_vocabulary
from training.last_state import Medusa, Mlp
from training.loop import minimise
from transformers import AutoModelForCausalLM

DRAFT_VOCABULARY = 8192
NUM_TOKENS = 6
"""Guessed by the MLP speculator and by Medusa."""
UNROLLED = 3
"""Steps of EAGLE-3's training-time test; it drafts as many tokens as it is asked for."""
INNER_DIM = 256
LEARNING_RATES = {"eagle3": 1e-3, "mlp": 3e-3, "medusa": 1e-3}


def main() -> None:
    args = arguments(__doc__, minutes=20.0, choices=list(MAKERS))
    target: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    corpus, corpus_times = prepare(args, target)
    target.requires_grad_(False)
    vocabulary = draft_vocabulary(corpus, target.config.vocab_size, DRAFT_VOCABULARY)
    torch.manual_seed(0)
    for name in args.only or MAKERS:
        budget = Budget(args.minutes * (1 - CORPUS_SHARE))
        print(f"{name}: {budget.minutes:.1f} minutes of {CORES} cores", flush=True)
        head = MAKERS[name](target, corpus, vocabulary)
        found = train(head, corpus, vocabulary, budget, learning_rate=LEARNING_RATES[name])
        folder = Path(args.output) / name
        save(head, folder)
        write_report(folder, {"name": name, **found, "training": budget.times(), "continuations": corpus_times})


MAKERS: dict[str, Callable[[Any, Corpus, DraftVocabulary], Any]] = {
    "eagle3": lambda target, corpus, words: Eagle3(target, corpus.layers[:3], words, num_steps=UNROLLED),
    "mlp": lambda target, _corpus, words: Mlp(target, words, num_steps=NUM_TOKENS, inner_dim=INNER_DIM),
    "medusa": lambda target, _corpus, words: Medusa(target, words, num_steps=NUM_TOKENS),
}


def train(
    head: Any, corpus: Corpus, vocabulary: DraftVocabulary, budget: Budget, *, learning_rate: float
) -> dict[str, Any]:
    """Until the budget is used up; returns what was done and how good the head has become."""
    stream = batches(corpus.train, vocabulary, seed=1)

    def next_loss(_done: float) -> tuple[torch.Tensor, int]:
        batch = next(stream)
        with torch.autocast("cpu", torch.bfloat16):
            return head.loss(batch), batch.num_tokens

    found = minimise(head.parameters(), next_loss, budget, learning_rate=learning_rate)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    return {"parameters": parameters, **found, "held_out": held_out(head, corpus, vocabulary)}


@torch.inference_mode()
def held_out(head: Any, corpus: Corpus, vocabulary: DraftVocabulary) -> dict[str, Any]:
    """Acceptance on held-out continuations for greedy chains from every position: exact, since a draft token only
    counts where all before it were right, and then the tokens it read were the target's."""
    right = torch.cat([head.is_right(batch) for batch in batches_once(corpus.held_out, vocabulary)])
    accepted = right.cummin(-1).values.float().mean(0)
    lengths = [round(1 + float(accepted[:k].sum()), 3) for k in range(1, len(accepted) + 1)]
    return {
        "accepted_by_depth": [round(float(each), 4) for each in accepted],
        "mean_acceptance_length_by_k": lengths,
        "num_positions": len(right),
    }


def save(head: Any, folder: Path) -> None:
    """Config and bfloat16 weights; tables keep their integers."""
    config, tensors = head.checkpoint()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2) + "\n")
    stored = {
        name: tensor.detach().to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")


if __name__ == "__main__":
    main()
