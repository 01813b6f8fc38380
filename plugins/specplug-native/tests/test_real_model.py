"""SmolLM2 in bfloat16: a batch that copies, with drafts and without."""

from __future__ import annotations

from typing import Any

import pytest
from specplug_native.library import load_library

from specplug import LLM, SamplingParams
from specplug.demo.models import SMOLLM2, smollm2_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(load_library() is None, reason="this processor has no AVX-512 with bfloat16"),
    pytest.mark.skipif(not SMOLLM2.is_installed(), reason=f"{SMOLLM2.name} is not installed: {SMOLLM2.install}"),
]

LINES = "".join(f"item {number}: {number * 37 % 101} pieces, shelf {number % 7}\n" for number in range(24))
TASKS = (
    "Repeat this list:\n",
    "Repeat this list, but call the shelves drawers:\n",
    "List the items in reverse order:\n",
    "Write a short poem about this list:\n",
    "Which shelf holds the most?\n",
)


def texts(config: dict[str, Any] | None, temperature: float) -> tuple[list[list[int]], int]:
    params = SamplingParams(temperature=temperature, max_tokens=64, ignore_eos=True, seed=3)
    prompts = [f"{task}{LINES[: 200 + 80 * number]}" for number, task in enumerate(TASKS)]
    arguments: dict[str, Any] = {"dtype": "bfloat16", "kernels": "native", "max_num_seqs": 4, "max_model_len": 1024}
    with LLM(str(smollm2_path()), speculative_config=config, strict=True, **arguments) as llm:
        outputs = llm.generate(prompts, params)
        return [list(output.outputs[0].token_ids) for output in outputs], llm.acceptance.aggregate().num_accepted_tokens


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_text_is_the_plain_text(temperature: float) -> None:
    plain, _ = texts(None, temperature)
    for num_tokens in (5, 24):
        config = {"method": "ngram", "num_speculative_tokens": num_tokens, "ngram_backoff": num_tokens > 5}
        drafted, num_accepted = texts(config, temperature)
        assert drafted == plain
        assert num_accepted >= 10
