"""The target's greedy continuations of the training prompts with its hidden states, made once and kept in a folder.

Decoding runs in specplug's host with the plugin ``extract_hidden_states``, which writes one safetensors file a
request: ``token_ids`` ``[tokens]`` and ``hidden_states`` ``[tokens, layers, hidden]``. What the target thinks at each
position, prompt included, follows from the last layer and lies beside as ``opinions.safetensors``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from specplug_hidden_states import complete_files
from training.budget import Budget
from training.texts import TrainingPrompt, training_prompts

from specplug import LLM, SamplingParams

__all__ = ["TOP_K", "Corpus", "Sequence", "make_corpus", "open_corpus"]

TOP_K = 8
"""So many of the target's tokens are kept for each position."""
MOST_PROMPTS = 6000
BATCH = 96
MAX_MODEL_LEN = 768
OPINIONS = "opinions.safetensors"
HELD_OUT = "-held-out"


@dataclass(frozen=True, slots=True)
class Sequence:
    """One prompt with its continuation, the newest token left out since no state has read it.

    Position t of ``top_ids`` (int64) and ``top_log_probs`` ``[tokens, TOP_K]`` is the target's opinion on token t + 1.
    """

    path: Path
    token_ids: torch.Tensor
    top_ids: torch.Tensor
    top_log_probs: torch.Tensor
    num_prompt_tokens: int
    is_held_out: bool

    @property
    def outputs(self) -> tuple[int, int]:
        """From where to where the next token is the target's."""
        return self.num_prompt_tokens - 1, len(self.token_ids)

    def hidden_states(self) -> torch.Tensor:
        """``[tokens, layers, hidden]``, read from the file."""
        with safe_open(self.path, framework="pt") as file:
            states: torch.Tensor = file.get_tensor("hidden_states")
        return states


@dataclass(frozen=True, slots=True)
class Corpus:
    """All sequences, in the order of the prompts. ``layers``: those that the files hold, the last one last."""

    train: list[Sequence]
    held_out: list[Sequence]
    layers: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.train)


def make_corpus(target: str, folder: Path, budget: Budget) -> int:
    """Continue prompts until the budget is used up, beginning where an earlier run stopped; returns new tokens."""
    done = complete_files(folder)
    config = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "extract_hidden_states_path": str(folder),
    }
    num_tokens = 0
    with LLM(target, speculative_config=config, max_num_seqs=BATCH, max_model_len=MAX_MODEL_LEN) as llm:
        prompts = training_prompts(llm.get_tokenizer(), MOST_PROMPTS)
        waiting = ((name, prompt) for name, prompt in _named(prompts, llm.get_tokenizer()) if name not in done)
        running = 0
        while True:
            while running < BATCH and budget.fraction < 1 and (entry := next(waiting, None)) is not None:
                llm.add_request(entry[0], entry[1].text, _params(entry[1]))
                running += 1
            if not running:
                return num_tokens
            for output in llm.step():
                if output.finished:
                    running -= 1
                    num_tokens += len(output.prompt_token_ids) + len(output.outputs[0].token_ids)


def _named(prompts: list[TrainingPrompt], tokenizer: Any) -> Iterator[tuple[str, TrainingPrompt]]:
    """Those that fit, each under its number; the held-out ones can be told by their names."""
    for number, prompt in enumerate(prompts):
        if len(tokenizer(prompt.text)["input_ids"]) + prompt.num_output_tokens <= MAX_MODEL_LEN:
            yield f"{number:05d}{HELD_OUT if prompt.is_held_out else ''}", prompt


def _params(prompt: TrainingPrompt) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=prompt.num_output_tokens, ignore_eos=True)


# --- reading --------------------------------------------------------------------------------------------------


def open_corpus(folder: Path, target: Any) -> Corpus:
    """Everything in ``folder``. Opinions that are missing are computed with the target's norm and head, and saved."""
    files = complete_files(folder)
    if not files:
        raise SystemExit(f"{folder} holds no continuations; give the training more minutes")
    opinions = load_file(folder / OPINIONS) if (folder / OPINIONS).is_file() else {}
    missing = {name: path for name, path in files.items() if f"{name}.ids" not in opinions}
    if missing:
        opinions |= _opinions(missing, target)
        save_file(opinions, folder / OPINIONS)
    sequences = [_read(name, path, opinions) for name, path in files.items()]
    return Corpus(
        [sequence for sequence in sequences if not sequence.is_held_out],
        [sequence for sequence in sequences if sequence.is_held_out],
        _metadata(next(iter(files.values())))[0],
    )


def _metadata(path: Path) -> tuple[tuple[int, ...], int]:
    """Layers, and the number of prompt tokens."""
    with safe_open(path, framework="pt") as file:
        found = file.metadata()
    return tuple(json.loads(found["layers"])), int(found["num_prompt_tokens"])


def _read(name: str, path: Path, opinions: Mapping[str, torch.Tensor]) -> Sequence:
    with safe_open(path, framework="pt") as file:
        token_ids = file.get_tensor("token_ids")
    return Sequence(
        path,
        token_ids,
        opinions[f"{name}.ids"].long(),
        opinions[f"{name}.log_probs"].float(),
        _metadata(path)[1],
        is_held_out=name.endswith(HELD_OUT),
    )


@torch.inference_mode()
def _opinions(files: Mapping[str, Path], target: Any) -> dict[str, torch.Tensor]:
    """The ``TOP_K`` likeliest next tokens at every position, from the states of the last layer."""
    found: dict[str, torch.Tensor] = {}
    norm, head = target.get_decoder().norm, target.get_output_embeddings()
    for name, path in files.items():
        with safe_open(path, framework="pt") as file:
            states = file.get_slice("hidden_states")[:, -1]
        logits = head(norm(states.to(head.weight.dtype))).float()
        top, ids = logits.topk(TOP_K, sorted=True)
        found[f"{name}.ids"] = ids.int()
        found[f"{name}.log_probs"] = (top - logits.logsumexp(-1, keepdim=True)).half()
    return found
