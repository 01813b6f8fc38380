"""Log-probabilities of accepted, recovered, bonus and prompt tokens: rows B69, B70, B71, B73 and B56's part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from specplug import LLM, RequestOutput, SamplingParams
from specplug.testing.models import tiny_llama, toy_tokenizer
from specplug.testing.proposers import FixedProposer, OracleProposer, RandomProposer
from specplug.testing.toys import MarkovTarget, ScriptedTarget, TableTarget

Decode = Callable[..., list[RequestOutput]]
PROBS = [0.5, 0.3, 0.2]
TEXTS = ["<p>", "ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "</s>"]


def own(output: RequestOutput) -> list[float]:
    """The log-probabilities of the output's own tokens."""
    sample = output.outputs[0]
    assert sample.logprobs is not None
    return [entry[token_id].logprob for entry, token_id in zip(sample.logprobs, sample.token_ids, strict=True)]


def test_B69_every_token_reports_its_own_logprob(decode: Decode) -> None:
    target = TableTarget(probs=PROBS, eos_token_id=None)
    params = SamplingParams(seed=2, max_tokens=40, logprobs=1)
    [output] = decode(target, [[0]], params, FixedProposer([[0, 1]] * 40), 2)
    assert set(output.outputs[0].token_ids) == {0, 1, 2}
    for token_id, logprob in zip(output.outputs[0].token_ids, own(output), strict=True):
        assert logprob == pytest.approx(math.log(PROBS[token_id]), abs=1e-5)
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(own(output)))
    for entry in output.outputs[0].logprobs or []:
        assert {token_id: found.rank for token_id, found in entry.items()}.items() <= {0: 1, 1: 2, 2: 3}.items()
        assert 0 in entry  # the likeliest one


def test_B70_rows_of_the_verify_batch_stay_aligned(decode: Decode) -> None:
    target = MarkovTarget(vocab_size=16, eos_token_id=None)
    prompts = [[1, 2], [7, 3]]
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2)
    plain = decode(target, prompts, params)
    keys = [tuple(prompt) for prompt in prompts]
    texts = {key: output.outputs[0].token_ids for key, output in zip(keys, plain, strict=True)}
    proposer = OracleProposer(texts, vocab_size=16, num_right={keys[0]: 3, keys[1]: 1})
    for drafted, alone in zip(decode(target, prompts, params, proposer, 3), plain, strict=True):
        assert drafted.outputs[0].token_ids == alone.outputs[0].token_ids
        assert own(drafted) == pytest.approx(own(alone), abs=1e-4)


def test_B71_every_token_has_its_alternatives(decode: Decode) -> None:
    model, prompt = tiny_llama(), [3, 1, 4]
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2, ignore_eos=True)
    [plain] = decode(model, [prompt], params)
    oracle = OracleProposer({tuple(prompt): plain.outputs[0].token_ids}, vocab_size=64)
    [drafted] = decode(model, [prompt], params, oracle)
    entries, expected = drafted.outputs[0].logprobs, plain.outputs[0].logprobs
    assert entries is not None and expected is not None
    assert len(entries) == 16
    for entry, alone, token_id in zip(entries, expected, drafted.outputs[0].token_ids, strict=True):
        assert len(entry) == 2  # greedy: the token itself is the likeliest
        assert list(entry) == list(alone)
        assert next(iter(entry)) == token_id
        assert [found.rank for found in entry.values()] == [1, 2]
        assert [found.logprob for found in entry.values()] == pytest.approx(
            [found.logprob for found in alone.values()], abs=1e-4
        )


@pytest.mark.parametrize("max_query_tokens", [64, 2, 3])
def test_B73_prompt_logprobs_equal_plain_ones(decode: Decode, max_query_tokens: int) -> None:
    prompt = [1, 5, 2, 7]
    params = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=1, logprobs=0)
    target = MarkovTarget(vocab_size=16, max_query_tokens=max_query_tokens, eos_token_id=None)
    others = [SamplingParams(temperature=0.0, max_tokens=6)] * 2
    prompts = [[3, 4, 5, 6, 7, 8, 9], prompt, [2]]
    output = decode(target, prompts, [others[0], params, others[1]], RandomProposer(16), 2)[1]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 4
    assert output.prompt_logprobs[0] is None
    for position in range(1, 4):
        entry = output.prompt_logprobs[position]
        assert entry is not None
        logits = torch.tensor(target.logits_after(4, prompt[:position]))
        expected = torch.log_softmax(logits, 0)
        assert next(iter(entry)) == prompt[position]
        assert entry[prompt[position]].logprob == pytest.approx(float(expected[prompt[position]]), abs=1e-5)
        assert entry[int(expected.argmax())].logprob == pytest.approx(float(expected.max()), abs=1e-5)
    assert output.outputs[0].token_ids == target.continuation(prompt, 6)
    assert len(own(output)) == 6


def test_B56_logprobs_end_with_the_ids_at_a_stop_string(decode: Decode) -> None:
    script = [1, 2, 3, 4]
    target = ScriptedTarget(script, tokenizer=toy_tokenizer(TEXTS), vocab_size=10)
    params = SamplingParams(temperature=0.0, max_tokens=8, stop="de", logprobs=1)
    [output] = decode(target, [[0]], params, OracleProposer({(0,): script}, vocab_size=10), 3)
    sample = output.outputs[0]
    assert (sample.text, sample.token_ids) == ("abc", [1, 2, 3])
    assert sample.logprobs is not None
    assert [next(iter(entry.values())).decoded_token for entry in sample.logprobs] == ["ab", "cd", "ef"]


@pytest.mark.parametrize("drafts", [[], [[0, 0, 0]] * 40, [[1, 0, 0]] * 40])
def test_processed_logprobs_are_those_of_the_law_that_was_drawn_from(decode: Decode, drafts: list[list[int]]) -> None:
    target = TableTarget(probs=PROBS, eos_token_id=None)
    params = SamplingParams(
        seed=2, max_tokens=20, logprobs=-1, logprobs_mode="processed_logprobs", temperature=0.5, top_k=2
    )
    [output] = decode(target, [[0]], params, FixedProposer(drafts))
    squares = [0.25, 0.09]
    for entry in output.outputs[0].logprobs or []:
        assert entry[0].logprob == pytest.approx(math.log(squares[0] / sum(squares)), abs=1e-5)
        assert entry[1].logprob == pytest.approx(math.log(squares[1] / sum(squares)), abs=1e-5)
        assert entry[2].logprob == -math.inf
    assert len(output.outputs[0].logprobs or []) == 20


def test_raw_logprobs_are_the_models_whatever_the_parameters(decode: Decode) -> None:
    target = TableTarget(probs=PROBS, eos_token_id=None)
    params = SamplingParams(
        seed=2, max_tokens=20, logprobs=0, temperature=0.5, logit_bias={2: 3.0}, repetition_penalty=1.5
    )
    [output] = decode(target, [[0]], params, RandomProposer(3))
    for token_id, logprob in zip(output.outputs[0].token_ids, own(output), strict=True):
        assert logprob == pytest.approx(math.log(PROBS[token_id]), abs=1e-5)


def test_streamed_logprobs_come_with_their_ids(make_llm: Callable[..., LLM]) -> None:
    script = [1, 2, 3, 4, 5, 6]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0)
    with make_llm(ScriptedTarget(script), OracleProposer({(0,): script}, vocab_size=16)) as llm:
        chunks = list(llm.stream([0], params))
    entries: list[Any] = []
    for chunk in chunks:
        sample = chunk.outputs[0]
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.token_ids)
        entries += sample.logprobs
    assert [next(iter(entry)) for entry in entries] == script


def test_logprobs_are_absent_unless_asked_for(decode: Decode) -> None:
    params: Sequence[SamplingParams] = [
        SamplingParams(temperature=0.0, max_tokens=2),
        SamplingParams(temperature=0.0, max_tokens=2, logprobs=0),
    ]
    without, with_own = decode(ScriptedTarget([1, 2]), [[0], [0]], params)
    assert without.outputs[0].logprobs is None
    assert without.outputs[0].cumulative_logprob is None
    assert without.prompt_logprobs is None
    assert with_own.outputs[0].logprobs is not None
