"""Where requests end, with blocks of accepted tokens crossing the end: rows B53, B54, B56-B59, B61, B62, B88, B109."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specplug import LLM, RequestError, RequestOutput, SamplingParams
from specplug.testing.models import toy_tokenizer
from specplug.testing.proposers import FixedProposer, OracleProposer
from specplug.testing.toys import ScriptedTarget

Decode = Callable[..., list[RequestOutput]]
STOP = 13


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **{"max_tokens": 16} | values)


def test_B53_eos_inside_an_accepted_block_ends_the_request(decode: Decode) -> None:
    [output] = decode(ScriptedTarget([1, 9, 2, 3]), [[5]], greedy(), FixedProposer([[9, 2, 3]]))
    assert output.outputs[0].token_ids == [1, 9]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None
    assert output.outputs[0].num_discarded_tokens == 2


def test_B53_nothing_after_eos_is_streamed(make_llm: Callable[..., LLM]) -> None:
    with make_llm(ScriptedTarget([1, 9, 2, 3]), FixedProposer([[9, 2, 3]])) as llm:
        chunks = list(llm.stream([[5]], greedy()))
    assert [token_id for chunk in chunks for token_id in chunk.outputs[0].token_ids] == [1, 9]
    assert [chunk.finished for chunk in chunks] == [False, True]


@pytest.mark.parametrize(
    ("script", "expected", "reason", "stop_reason"),
    [
        ([4, 6, 3, STOP, 2, 5, 1], [4, 6, 3, STOP], "stop", STOP),
        ([4, 6, 3, 2, 5, 1, STOP], [4, 6, 3, 2, 5, 1], "length", None),
        ([4, 6, 3, 2, 5, STOP, 1], [4, 6, 3, 2, 5, STOP], "stop", STOP),  # both at once: the stop wins
    ],
)
def test_B54_stop_is_checked_before_length(
    decode: Decode, script: list[int], expected: list[int], reason: str, stop_reason: int | None
) -> None:
    target = ScriptedTarget(script, eos_token_id=None)
    proposer = OracleProposer({(7,): script}, vocab_size=16)
    [output] = decode(target, [[7]], greedy(max_tokens=6, stop_token_ids=[STOP]), proposer, 8)
    assert output.outputs[0].token_ids == expected
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (reason, stop_reason)


TEXTS = ["<p>", "ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "</s>"]


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize(("keep", "text"), [(False, "abc"), (True, "abcde")])
def test_B56_text_and_ids_end_at_the_stop_string(decode: Decode, k: int, keep: bool, text: str) -> None:
    script = [1, 2, 3, 4, 5]
    target = ScriptedTarget(script, tokenizer=toy_tokenizer(TEXTS), vocab_size=10)
    params = greedy(stop="de", include_stop_str_in_output=keep)
    [output] = decode(target, [[0]], params, OracleProposer({(0,): script}, vocab_size=10), k)
    assert output.outputs[0].text == text
    assert output.outputs[0].token_ids == [1, 2, 3]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "de")


@pytest.mark.parametrize("k", [1, 3, 12])
def test_B57_stop_string_early_in_a_long_run(decode: Decode, k: int) -> None:
    script = [1, 2, *[5, 6] * 5]
    target = ScriptedTarget(script, tokenizer=toy_tokenizer(TEXTS), vocab_size=10)
    [output] = decode(target, [[0]], greedy(stop=["zz", "bcd"]), OracleProposer({(0,): script}, vocab_size=10), k)
    assert output.outputs[0].token_ids == [1, 2]
    assert output.outputs[0].text == "a"


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_B58_no_more_tokens_than_asked(decode: Decode, max_tokens: int) -> None:
    script = [1, 2, 3, 4, 5, 6, 7, 8]
    proposer = OracleProposer({(0,): script}, vocab_size=16)
    [output] = decode(ScriptedTarget(script), [[0]], greedy(max_tokens=max_tokens), proposer, 4)
    assert output.outputs[0].token_ids == script[:max_tokens]
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].num_discarded_tokens == 0  # the draft was clipped to what may still be emitted


def test_B58_max_tokens_0_is_refused() -> None:
    with pytest.raises(RequestError, match="max_tokens=0 must be a whole number of at least 1"):
        SamplingParams(max_tokens=0)


def test_B59_no_eos_configured(make_llm: Callable[..., LLM]) -> None:
    target = ScriptedTarget([24, 22, 23, 24, 22], vocab_size=32, eos_token_id=None)
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 2}
    with make_llm(target, speculative_config=config) as llm:
        [output] = llm.generate([[21, 22, 23, 24, 22, 23]], greedy(max_tokens=5))
        record = output.outputs[0].spec_decode_metrics
    assert output.outputs[0].token_ids == [24, 22, 23, 24, 22]
    assert record.num_draft_tokens > 0


def test_B61_eos_of_a_draft_does_not_end_the_target(decode: Decode) -> None:
    [output] = decode(ScriptedTarget([1, 8, 2, 9]), [[5]], greedy(), FixedProposer([[8, 2]]))
    assert output.outputs[0].token_ids == [1, 8, 2, 9]


def test_B62_rejected_eos_leaves_the_proposer_at_work(decode: Decode) -> None:
    [output] = decode(ScriptedTarget([1, 2, 9]), [[5]], greedy(), FixedProposer([[9], [9]]))
    assert output.outputs[0].token_ids == [1, 2, 9]
    assert output.outputs[0].spec_decode_metrics.num_draft_tokens == 2


def test_B88_max_model_len_ends_the_output(decode: Decode) -> None:
    script = [1, 2, 3, 4, 5, 6]
    target = ScriptedTarget(script, max_model_len=12)
    proposer = FixedProposer([[2, 3, 4, 5], [3, 4, 5, 6]], clip=False)
    [output] = decode(target, [[0] * 9], greedy(max_tokens=10), proposer, 4, strict=False)
    assert output.outputs[0].token_ids == [1, 2, 3]
    assert output.outputs[0].finish_reason == "length"


def test_stop_string_that_begins_in_an_earlier_step_is_not_streamed(make_llm: Callable[..., LLM]) -> None:
    script = [1, 2, 3, 4]
    target = ScriptedTarget(script, tokenizer=toy_tokenizer(TEXTS), vocab_size=10)
    with make_llm(target) as llm:
        chunks = [chunk.outputs[0].text for chunk in llm.stream([[0]], greedy(stop="de"))]
    assert "".join(chunks) == "abc"


def test_text_leaves_out_the_token_that_ended_the_request(decode: Decode) -> None:
    target = ScriptedTarget([1, 2, 3, 4], tokenizer=toy_tokenizer(TEXTS), vocab_size=10)
    [dropped] = decode(target, [[0]], greedy(stop_token_ids=[3]))
    [kept] = decode(target, [[0]], greedy(stop_token_ids=[3], include_stop_str_in_output=True))
    assert (dropped.outputs[0].text, kept.outputs[0].text) == ("abcd", "abcdef")
    assert dropped.outputs[0].token_ids == kept.outputs[0].token_ids == [1, 2, 3]


def test_ignore_eos_goes_on_but_stop_ids_still_act(decode: Decode) -> None:
    target = ScriptedTarget([1, 9, 2, 3, 4])
    [output] = decode(target, [[5]], greedy(ignore_eos=True, stop_token_ids=[3]), FixedProposer([[9, 2, 3]]))
    assert output.outputs[0].token_ids == [1, 9, 2, 3]
