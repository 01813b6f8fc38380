"""The two packaged real models: every row as its own greedy ``generate``, also past Gemma's window of 512."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specplug.demo.models import GEMMA3, SMOLLM2, gemma3_path, smollm2_path
from specplug.models.probe import check_model, probe_model
from specplug.models.runner import TargetRunner

pytestmark = pytest.mark.slow

TEXT = "The harbour wakes before the town does. Boats come in low with the tide, and the ice trucks are waiting. "
NUM_NEW_TOKENS = 12


def load(find: Callable[[], Path]) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = SMOLLM2 if find is smollm2_path else GEMMA3
    if not package.is_installed():
        pytest.skip(f"{package.name} is not installed: {package.install}")
    folder = find()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def greedy_with_rejections(runner: TargetRunner, prompts: list[torch.Tensor], chunk: int) -> list[list[int]]:
    """Decode every prompt side by side; behind each token come three junk tokens that are rolled back."""
    for _ in prompts:
        runner.acquire(None)  # type: ignore[arg-type]
    texts = [prompt.tolist() for prompt in prompts]
    while any(len(text) < len(prompt) + NUM_NEW_TOKENS for text, prompt in zip(texts, prompts, strict=True)):
        lengths = list(runner.cache.lengths)
        pieces = [text[length : length + chunk] for text, length in zip(texts, lengths, strict=True)]
        is_last = [length + len(piece) == len(text) for text, length, piece in zip(texts, lengths, pieces, strict=True)]
        inputs = [[*piece, 7, 8, 9] if last else piece for piece, last in zip(pieces, is_last, strict=True)]
        ends = torch.tensor([len(piece) for piece in inputs]).cumsum(0)
        picked = torch.tensor(
            [int(end) - 1 - (3 if last else 0) for end, last in zip(ends, is_last, strict=True)], dtype=torch.int64
        )
        flat = torch.tensor([token_id for piece in inputs for token_id in piece])
        logits = runner.forward(flat, [len(piece) for piece in inputs], picked).logits
        for row, last in enumerate(is_last):
            runner.rollback(row, lengths[row] + len(pieces[row]))
            if last:
                texts[row].append(int(logits[row].argmax()))
    return [text[len(prompt) : len(prompt) + NUM_NEW_TOKENS] for text, prompt in zip(texts, prompts, strict=True)]


def plain_greedy(model: Any, prompt: torch.Tensor) -> list[int]:
    output = model.generate(
        prompt[None], max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=NUM_NEW_TOKENS, do_sample=False, eos_token_id=-1
    )
    new: list[int] = output[0, len(prompt) :].tolist()
    return new


@pytest.mark.parametrize(
    ("find", "lengths"),
    [(smollm2_path, (7, 33, 120, 260)), (gemma3_path, (7, 505, 700))],
    ids=["smollm2", "gemma3_past_its_window"],
)
def test_rows_equal_their_own_greedy_generate(find: Callable[[], Path], lengths: tuple[int, ...]) -> None:
    model, tokenizer = load(find)
    check_model(model)
    probe_model(model)
    ids = torch.tensor(tokenizer(TEXT * 40).input_ids)
    prompts = [ids[:length] for length in lengths]
    expected = [plain_greedy(model, prompt) for prompt in prompts]
    runner = TargetRunner(model, tokenizer, max_num_seqs=4, max_model_len=1024, max_query_tokens=256)
    assert greedy_with_rejections(runner, prompts, 253) == expected
    runner.close()
