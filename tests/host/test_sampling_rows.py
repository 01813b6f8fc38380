"""Every parameter at every drafted position: rows B32, B39-B44, B47, B48 and vLLM's constraint tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specplug import RequestError, RequestOutput, SamplingParams
from specplug.testing.models import tiny_llama, toy_tokenizer
from specplug.testing.proposers import FixedProposer, OracleProposer
from specplug.testing.toys import ScriptedTarget, TableTarget, ToyTarget

Decode = Callable[..., list[RequestOutput]]


def greedy(max_tokens: int = 4, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **values)


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def always(draft: Sequence[int]) -> FixedProposer:
    return FixedProposer([list(draft)] * 64)


class Following(ToyTarget):
    """Logits that are a function of the last token: ``table[last]``, all 0 after others."""

    def __init__(self, table: dict[int, list[float]], **settings: Any) -> None:
        super().__init__(vocab_size=len(next(iter(table.values()))), **settings)
        self.table = table

    def logits_after(self, prompt_length: int, token_ids: Sequence[int]) -> Sequence[float]:
        return self.table.get(token_ids[-1], [0.0] * self.vocab_size)


def preferring(vocab_size: int, order: Sequence[int]) -> list[float]:
    """Logits that fall along ``order``, 0 for the others."""
    return [10.0 - order.index(token_id) if token_id in order else 0.0 for token_id in range(vocab_size)]


def test_B32_a_quantised_target_gives_one_text_for_all_draft_lengths(decode: Decode) -> None:
    model, prompt = tiny_llama(), [5, 6] * 6
    with torch.no_grad():
        for weight in model.parameters():
            scale = weight.abs().max() / 127
            weight.copy_((weight / scale).round() * scale)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    plain = ids(decode(model, [prompt], params))
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    assert ids(decode(model, [prompt], params, speculative_config=ngram)) == plain
    oracle = OracleProposer({tuple(prompt): plain[0]}, vocab_size=64)
    assert ids(decode(model, [prompt], params, oracle, 4)) == plain


def chi_squared(token_ids: Sequence[Sequence[int]], probs: Sequence[float]) -> float:
    """Over the tokens with positive probability; infinite when another one occurs."""
    counts = torch.bincount(torch.tensor(token_ids).ravel(), minlength=len(probs)).double()
    expected = torch.tensor(probs, dtype=torch.float64) * counts.sum()
    if counts[expected == 0].any():
        return float("inf")
    return float(((counts - expected) ** 2 / expected)[expected > 0].sum())


def test_B39_min_p_acts_on_every_drafted_token(decode: Decode) -> None:
    target = TableTarget(probs=[0.6, 0.3, 0.1], eos_token_id=None, max_num_seqs=32)
    params = [SamplingParams(min_p=0.4, seed=seed, max_tokens=640) for seed in range(32)]
    drawn = ids(decode(target, [[0]] * 32, params, always([2, 2]), 2))  # 20480 tokens
    assert chi_squared(drawn, [2 / 3, 1 / 3, 0.0]) < 37.3  # 1e-9 with one degree of freedom
    assert chi_squared(drawn, [0.64, 0.36, 0.0]) > 37.3  # the negative control


def test_B40_logit_bias_acts_on_every_drafted_token(decode: Decode) -> None:
    params = greedy(logit_bias={0: -100.0})
    assert ids(decode(TableTarget(logits=[2.0, 1.0, 0.0]), [[0]], params, always([0, 0]))) == [[1, 1, 1, 1]]
    assert ids(decode(TableTarget(logits=[2.0, 1.0, 0.0]), [[0]], params, always([1, 1]))) == [[1, 1, 1, 1]]


def test_B41_frequency_penalty_counts_inside_the_block(decode: Decode) -> None:
    target = TableTarget(logits=[2.0, 1.5, 0.25])
    assert ids(decode(target, [[0]], greedy(5, frequency_penalty=1.0), always([0, 0, 0]))) == [[0, 1, 0, 1, 2]]


def test_B42_presence_penalty_counts_output_and_repetition_penalty_the_prompt_too(decode: Decode) -> None:
    target = TableTarget(logits=[2.0, 1.5, 0.0])
    assert ids(decode(target, [[0]], greedy(presence_penalty=1.0), always([0, 0, 0]))) == [[0, 1, 0, 0]]
    [repeated] = ids(decode(target, [[0]], greedy(repetition_penalty=2.0), always([0, 0, 0])))
    assert repeated[0] == 1
    [unseen] = ids(decode(target, [[2]], greedy(repetition_penalty=2.0), always([0, 0, 0])))
    assert unseen[:2] == [0, 1]


def test_repetition_penalty_multiplies_negative_logits(decode: Decode) -> None:
    target = TableTarget(logits=[-1.0, -1.5, -9.0])
    assert ids(decode(target, [[0]], greedy(repetition_penalty=2.0), always([0, 0, 0]))) == [[1, 0, 0, 0]]


def test_B43_bad_words_act_on_their_own_row_only(decode: Decode) -> None:
    table = {
        0: preferring(16, [5]),
        5: preferring(16, [6, 7]),
        6: preferring(16, [8]),
        7: preferring(16, [8]),
        8: preferring(16, [8]),
    }
    params = [greedy(3), greedy(3, bad_words=[[5, 6]])]
    first, second = ids(decode(Following(table), [[0], [0]], params, always([6, 8])))
    assert first == [5, 6, 8]
    assert second[:2] == [5, 7]
    only_later = ids(decode(Following(table), [[0]], greedy(4, bad_words=[[5, 6, 8]]), always([6, 8, 8])))
    assert only_later[0][:2] == [5, 6]
    assert only_later[0][2] != 8


def test_bad_words_look_at_the_output_alone(decode: Decode) -> None:
    table = {5: preferring(16, [6, 7]), 6: preferring(16, [6]), 7: preferring(16, [7])}
    assert ids(decode(Following(table), [[5]], greedy(1, bad_words=[[5, 6]]))) == [[6]]


def test_B44_min_tokens_allows_the_end_exactly_when_due(decode: Decode) -> None:
    table = {0: preferring(16, [1]), 1: preferring(16, [9, 4]), 4: preferring(16, [9, 4])}
    target = Following(table)
    for proposer in (always([1, 9, 2]), always([4, 4, 9]), always([9])):
        [output] = decode(target, [[0]], greedy(8, min_tokens=3), proposer)
        assert output.outputs[0].token_ids == [1, 4, 4, 9]
        assert output.outputs[0].finish_reason == "stop"


def test_min_tokens_holds_back_stop_ids_and_stop_strings(decode: Decode) -> None:
    script = [1, 2, 3, 1, 2, 3]
    texts = ["<p>", "ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "</s>"]
    target = ScriptedTarget(script, tokenizer=toy_tokenizer(texts), vocab_size=10)
    oracle = OracleProposer({(0,): script}, vocab_size=10)
    for min_tokens, text in ((2, "abc"), (3, "abcdefabc"), (4, "abcdefabc")):  # "de" is complete with the third token
        [output] = decode(target, [[0]], greedy(6, stop="de", min_tokens=min_tokens), oracle)
        assert output.outputs[0].text == text
    [held] = decode(target, [[0]], greedy(6, stop_token_ids=[2], min_tokens=4), oracle)
    assert held.outputs[0].token_ids[1] != 2  # ruled out until four tokens are there
    assert held.outputs[0].stop_reason == 2


def test_B47_allowed_ids_and_bad_words_leave_one_token(decode: Decode) -> None:
    target = TableTarget(logits=[0.0, 0.0, 0.0, 1.0, 0.5, 2.0])
    params = greedy(allowed_token_ids=[3, 4], bad_words=[[3]])
    assert ids(decode(target, [[0]], params, always([3, 5]))) == [[4, 4, 4, 4]]
    assert ids(decode(target, [[0]], params, always([4, 4]))) == [[4, 4, 4, 4]]


def test_B48_several_samples_are_independent_and_exact(decode: Decode) -> None:
    target = TableTarget(probs=[0.5, 0.3, 0.2], eos_token_id=None)
    params = SamplingParams(n=3, seed=1, max_tokens=40)
    [output] = decode(target, [[0]], params, always([0, 1]), 2)
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    singles = [SamplingParams(seed=seed, max_tokens=40) for seed in (1, 2, 3)]
    assert [sample.token_ids for sample in output.outputs] == ids(decode(target, [[0]] * 3, singles))
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
    assert all(sample.spec_decode_metrics.num_emitted_tokens == 40 for sample in output.outputs)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_samples_wait_for_free_rows(decode: Decode, max_num_seqs: int) -> None:
    target = TableTarget(probs=[0.5, 0.3, 0.2], eos_token_id=None, max_num_seqs=max_num_seqs)
    params = [SamplingParams(n=3, seed=5, max_tokens=6), SamplingParams(seed=5, max_tokens=6)]
    several, single = decode(target, [[0], [0]], params)
    assert [len(sample.token_ids) for sample in several.outputs] == [6, 6, 6]
    assert several.outputs[0].token_ids == single.outputs[0].token_ids


def peaks(vocab_size: int, wanted: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[list[float]]]:
    """Per prompt: 100 at the wanted id of each position, 99 at id 15, -100 elsewhere."""
    rows = {}
    for number, targets in enumerate(wanted):
        logits = [[-100.0] * vocab_size for _ in targets]
        for row, token_id in zip(logits, targets, strict=True):
            row[15], row[token_id] = 99.0, 100.0
        rows[(number,)] = logits
    return rows


class Peaked(ToyTarget):
    """Prompt [r] follows ``wanted[r]``, whatever is drafted."""

    def __init__(self, wanted: Sequence[Sequence[int]]) -> None:
        super().__init__(vocab_size=20, eos_token_id=None)
        self.rows = peaks(20, wanted)

    def logits_after(self, prompt_length: int, token_ids: Sequence[int]) -> Sequence[float]:
        rows = self.rows[tuple(token_ids[:1])]
        return rows[min(len(token_ids) - prompt_length, len(rows) - 1)]


def test_vllm_penalty_table(decode: Decode) -> None:
    # the first token of every row is what the table calls its output; the drafts follow
    wanted = [[2, 1, 1, 1, 1], [3, 7], [4, 1, 1, 1, 1]]
    params = [greedy(5, frequency_penalty=1.5), greedy(2, frequency_penalty=1.5), greedy(5, frequency_penalty=0.7)]
    proposer = FixedProposer({(0,): [[1, 1, 1]], (1,): [[]], (2,): [[1, 1, 1]]})
    first, second, third = ids(decode(Peaked(wanted), [[0], [1], [2]], params, proposer))
    assert first[1:3] == [1, 15]
    assert second[1:2] == [7]
    assert third[1:4] == [1, 1, 15]


def test_vllm_bad_words_table(decode: Decode) -> None:
    wanted = [[0, 1, 2, 3, 4], [0, 1, 15, 3, 4], [0, 1, 2, 3, 4]]
    params = [greedy(5, bad_words=[[2]]), greedy(5), greedy(5, bad_words=[[2]])]
    drafts = {(0,): [[1, 2, 3]], (1,): [[1, 15, 3]], (2,): [[1, 2, 3]]}
    first, second, third = ids(decode(Peaked(wanted), [[0], [1], [2]], params, FixedProposer(drafts)))
    assert first[1:3] == third[1:3] == [1, 15]
    assert second[1:] == [1, 15, 3, 4]


def test_vllm_forbidden_ids_table(decode: Decode) -> None:
    wanted = [[0, 1, 2, 10, 5], [0, 10, 5, 10, 5], [0, 7, 10, 12, 5]]
    forbidden = [set(range(row, row + 5)) for row in range(3)]
    params = [greedy(5, allowed_token_ids=[i for i in range(20) if i not in ban or i == 0]) for ban in forbidden]
    drafts = {(0,): [[1, 2, 10]], (1,): [[10, 5, 3]], (2,): [[7, 10, 12]]}
    first, second, third = ids(decode(Peaked(wanted), [[0], [1], [2]], params, FixedProposer(drafts)))
    assert first[1] == 15
    assert second[1:3] == [10, 15]  # id 5 is forbidden in row 1 (1 to 5)
    assert third[1:4] == [7, 10, 12]


def test_custom_logits_processors_see_the_draft_before_each_position(decode: Decode) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def no_doubles(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((prompt, output))
        logits = logits.clone()
        logits[(output or prompt)[-1]] = -torch.inf
        return logits

    target = TableTarget(logits=[2.0, 1.5, 0.0])
    params = greedy(5, logits_processors=[no_doubles])
    assert ids(decode(target, [[0]], params, always([0, 0, 0]))) == [[1, 0, 1, 0, 1]]
    assert ([0], [1, 0, 0]) in seen  # position 2 of the first block
    assert ids(decode(target, [[0]], params)) == [[1, 0, 1, 0, 1]]


def test_processors_of_two_arguments_get_the_output(decode: Decode) -> None:
    def even_only(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[1::2] = -torch.inf
        return logits

    target = TableTarget(logits=[0.0, 2.0, 1.0])
    assert ids(decode(target, [[0]], greedy(3, logits_processors=[even_only]), always([1, 1]))) == [[2, 2, 2]]


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda output, logits: logits[:1], r"<lambda> returned \[1\], not logits \[3\]"),
        (lambda output, logits: None, "<lambda> returned NoneType"),
        (lambda output, logits: logits[len(output) + 1 : 0].sum().item() / 0, "ZeroDivisionError"),
    ],
)
def test_a_failing_processor_ends_its_own_request_only(decode: Decode, processor: Any, message: str) -> None:
    target = TableTarget(logits=[2.0, 1.0, 0.0])
    params = [greedy(4, logits_processors=[processor]), greedy(4)]
    broken, healthy = decode(target, [[0], [0]], params, always([0, 0]))
    assert broken.outputs[0].finish_reason == "error"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(broken.outputs[0].error)
    assert healthy.outputs[0].token_ids == [0, 0, 0, 0]


def test_parameters_that_rule_out_every_token_end_that_request(decode: Decode) -> None:
    target = TableTarget(logits=[2.0, 1.0, 0.0])
    params = [greedy(allowed_token_ids=[1], bad_words=[[1]]), greedy()]
    nothing, healthy = decode(target, [[0], [0]], params, always([0]))
    assert nothing.outputs[0].finish_reason == "error"
    assert "rule out every token" in str(nothing.outputs[0].error)
    assert healthy.outputs[0].token_ids == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {3: 1.0}}, "logit_bias names token id 3; the target has ids 0 to 2"),
        ({"allowed_token_ids": [0, 7]}, "allowed_token_ids names token id 7"),
        ({"stop_token_ids": [7]}, "stop_token_ids names token id 7"),
        ({"bad_words": [[7]]}, r"bad_words=\[7\] must be token ids of the target, 0 to 2"),
        ({"bad_words": ["x"]}, "bad_words='x' needs a tokenizer"),
        ({"reasoning_end": "x"}, "reasoning_end='x' needs a tokenizer"),
    ],
)
def test_ids_that_the_target_does_not_have_are_refused(decode: Decode, params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        decode(TableTarget(logits=[2.0, 1.0, 0.0]), [[0]], greedy(**params))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"presence_penalty": 2.5}, r"presence_penalty=2.5 must be in \[-2, 2\]"),
        ({"frequency_penalty": float("nan")}, r"frequency_penalty=nan must be in \[-2, 2\]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be a number from 1e-10 to"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens=5 must be at most max_tokens=3"),
        ({"n": 0}, "n=0 must be a whole number from 1 to 16384"),
        ({"n": 2, "temperature": 0.0}, "n=2 must be 1 with temperature=0.0"),
        ({"seed": 2**64}, r"seed=18446744073709551616 must be a whole number from 0 to 2\*\*64 - 1"),
        ({"logprobs": -2}, "logprobs=-2 must be a whole number of at least 0, -1 for all tokens"),
        ({"logit_bias": {1: float("inf")}}, "must map token ids to numbers from"),
        ({"logit_bias": {1: 1e308}}, "must map token ids to numbers from"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty=1e-300 must be a number from 1e-10 to"),
        ({"temperature": 10**400}, r"must be a number from 0 \(greedy\) to 1e\+10"),
        ({"temperature": 10**5000}, "temperature=a number too long to print"),
        ({"skip_special_tokens": None}, "skip_special_tokens=None must be True or False"),
        ({"detokenize": "no"}, "detokenize='no' must be True or False"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be True or False"),
        ({"seed": True}, "seed=True must be a whole number"),
        ({"seed": np.bool_(True)}, "must be a whole number"),
        ({"temperature": np.float32("nan")}, "must be a number from 0"),
        ({"allowed_token_ids": []}, "must be a list of at least one token id"),
        ({"bad_words": "word"}, "must be a list of non-empty texts or lists of token ids"),
        ({"logits_processors": [1]}, "must be a list of callables"),
        ({"logprobs_mode": "raw"}, "must be one of raw_logprobs, processed_logprobs"),
        ({"stop": "x", "detokenize": False}, "needs the text"),
        ({"structured_outputs": "json"}, "must be a StructuredOutputsParams"),
    ],
)
def test_sampling_parameters_out_of_range_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int8(3), seed=np.uint64(2**64 - 1), max_tokens=np.int32(4)
    )
    assert params == SamplingParams(temperature=0.5, top_k=3, seed=2**64 - 1, max_tokens=4)
    assert type(params.seed) is int
    assert type(params.temperature) is float


def test_no_extra_args_are_vllms_default() -> None:
    assert SamplingParams(extra_args=None) == SamplingParams()  # type: ignore[arg-type]


def test_several_samples_and_a_stream_exclude_each_other(make_llm: Callable[..., Any]) -> None:
    with make_llm(TableTarget(probs=[0.5, 0.3, 0.2])) as llm:
        llm.add_request("good", [0], greedy(3), output_kind="final_only")
        with pytest.raises(RequestError, match="n=2 must be 1 with a stream"):
            llm.stream([0], SamplingParams(n=2))
        with pytest.raises(RequestError, match="n=2 must be 1 with a stream"):
            llm.add_request("bad", [0], SamplingParams(n=2), output_kind="delta")
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
    assert [output.request_id for output in outputs] == ["good"]


def test_several_samples_step_by_step(make_llm: Callable[..., Any]) -> None:
    with make_llm(TableTarget(probs=[0.5, 0.3, 0.2], max_num_seqs=2)) as llm:
        llm.add_request("r", [0], SamplingParams(n=3, seed=1, max_tokens=4))
        with pytest.raises(RequestError, match="request id 'r' is in use"):
            llm.add_request("r", [0], greedy())
        first = llm.step()
        assert [len(output.outputs) for output in first] == [2]
        assert not first[0].finished
        assert llm.abort("r") is None  # two samples run, the third still waited
        [last] = llm.step()
        assert last.finished
        assert [sample.finish_reason for sample in last.outputs] == ["abort"] * 3
        assert not llm.has_unfinished_requests()
        llm.add_request("r", [0], greedy(1), output_kind="final_only")
        assert [output.outputs[0].token_ids for output in llm.step()] == [[0]]
