"""The built-in proposers behind the host loop, on toys."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from specplug import LLM, SamplingParams
from specplug.testing.toys import MarkovTarget, ScriptedTarget, TableTarget

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def decode(target: Any, prompts: list[list[int]], config: dict[str, Any] | None, **settings: Any) -> list[Any]:
    sampling = SamplingParams(**{**GREEDY, **settings.pop("sampling", {})})
    with LLM(target, speculative_config=config, strict=True, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    return [output.outputs[0] for output in outputs]


def ngram(k: int, shortest: int, longest: int, **keys: Any) -> dict[str, Any]:
    bounds = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    return {"method": "ngram", "num_speculative_tokens": k, **bounds, **keys}


def test_B59_runs_to_its_length_where_no_end_is_configured() -> None:
    target = ScriptedTarget([24, 22, 23, 24, 22], vocab_size=32, eos_token_id=None)
    (output,) = decode(target, [[21, 22, 23, 24, 22, 23]], ngram(3, 2, 2), sampling={"max_tokens": 5})
    assert list(output.token_ids) == [24, 22, 23, 24, 22]
    assert output.spec_decode_metrics.num_draft_tokens > 0


def test_B91_a_prompt_in_chunks_gives_the_plain_text() -> None:
    prompt = [1, 2, 1, 2, 1, 2, 1, 2, 1]
    chunks = {"max_num_seqs": 2, "max_num_batched_tokens": 4}
    plain = decode(MarkovTarget(**limits(chunks)), [prompt], None, **chunks, sampling={"max_tokens": 20})
    drafted = decode(MarkovTarget(**limits(chunks)), [prompt], ngram(3, 1, 2), **chunks, sampling={"max_tokens": 20})
    assert list(drafted[0].token_ids) == list(plain[0].token_ids)
    assert drafted[0].spec_decode_metrics.num_draft_tokens > 0


def limits(settings: dict[str, int]) -> dict[str, int]:
    return {"max_num_seqs": settings["max_num_seqs"]}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("backoff", [True, False])
def test_text_is_the_plain_text(temperature: float, backoff: bool) -> None:
    prompts = [[1, 2, 3], [4, 5, 4, 5, 4], [6]]
    sampling = {"max_tokens": 40, "temperature": temperature, "seed": 3}
    plain = decode(MarkovTarget(), prompts, None, sampling=sampling)
    drafted = decode(MarkovTarget(), prompts, ngram(4, 1, 3, ngram_backoff=backoff), sampling=sampling)
    assert [list(output.token_ids) for output in drafted] == [list(output.token_ids) for output in plain]
    assert sum(output.spec_decode_metrics.num_draft_tokens for output in drafted) > 0


class RepeatsLast:
    """vLLM's own example of a custom proposer."""

    def __init__(self, vllm_config: Any) -> None:
        self.k = vllm_config.speculative_config.num_speculative_tokens

    def propose(self, sampled_token_ids: Any, *_: Any, slot_mappings: Any) -> list[list[int]]:
        return [[sampled[-1]] * self.k if sampled else [] for sampled in sampled_token_ids]


def test_a_vllm_shaped_class_gives_the_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("specplug_toy_vllm")
    module.RepeatsLast = RepeatsLast  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "specplug_toy_vllm", module)
    config = {"method": "custom_class", "model": "specplug_toy_vllm.RepeatsLast", "num_speculative_tokens": 3}
    prompts = [[1, 2, 3], [4, 5, 4, 5, 4, 1, 1]]
    target = {"logits": lambda ids: [float(token == (ids[-1] if len(ids) % 4 else 3)) for token in range(16)]}
    plain, drafted = (
        decode(TableTarget(**target, vocab_size=16), prompts, chosen, sampling={"max_tokens": 12})
        for chosen in (None, config)
    )
    assert [list(output.token_ids) for output in drafted] == [list(output.token_ids) for output in plain]
    assert sum(output.spec_decode_metrics.num_draft_emitted_tokens for output in drafted) > 12
