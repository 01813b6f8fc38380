"""On the real model in fp32: sampled text with drafts is the plain text, token for token."""

from __future__ import annotations

from typing import Any

import pytest

from specplug import LLM, SamplingParams
from specplug.demo.models import smollm2_path
from specplug.errors import ModelError

pytestmark = pytest.mark.slow

PROMPTS = [
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return",
    "Repeat: the cat sat on the mat. the cat sat on the mat. the cat sat on",
    "The three largest rivers of Europe are",
]


def decode(config: dict[str, Any] | None, extra_args: dict[str, Any]) -> list[Any]:
    try:
        folder = str(smollm2_path())
    except ModelError as error:
        pytest.skip(str(error))
    settings: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 40, "ignore_eos": True}
    params = [SamplingParams(seed=7 + n, extra_args=extra_args, **settings) for n in range(3)]
    with LLM(folder, dtype="float32", speculative_config=config, max_num_seqs=4, max_model_len=256, strict=True) as llm:
        return [output.outputs[0] for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_sampled_text_is_the_plain_text(rule: str) -> None:
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
        "ngram_backoff": False,
        "rejection_sample_method": rule,
    }
    drafted = decode(ngram, {})
    # coupled draws with noise of its own, so its plain text is that of requests which turn drafting off
    plain = decode(None, {}) if rule == "match" else decode(ngram, {"specplug": {"enabled": False}})
    assert [list(one.token_ids) for one in drafted] == [list(other.token_ids) for other in plain]
    assert sum(other.spec_decode_metrics.num_draft_tokens for other in plain) == 0
    assert sum(one.spec_decode_metrics.num_accepted_tokens for one in drafted) > 0
