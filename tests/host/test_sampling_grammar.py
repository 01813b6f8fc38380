"""Structured output and reasoning sections: rows B74, B75, B114 and what surrounds them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from specplug import LLM, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from specplug.host.grammar import Grammar, cut_drafts
from specplug.host.paths import draft_paths
from specplug.host.reasoning import ReasoningSection
from specplug.testing.models import toy_tokenizer
from specplug.testing.proposers import FixedProposer, OracleProposer, RandomProposer, SamplingProposer
from specplug.testing.toys import MarkovTarget, ScriptedTarget, TableTarget
from specplug.types import Dense, Draft, LawSpan

pytest.importorskip("xgrammar")

Decode = Callable[..., list[RequestOutput]]
TEXTS = ["<p>", "b", "c", "d", "e", "f", "g", "h", "i", "</s>"]
FAVOURS_5 = [0.0, 0.0, 0.3, 0.1, 0.0, 5.0, 0.0, 0.0, 0.0, 1.0]
"""Token 5 everywhere, then the end, then 2 before 3."""

THREE_TOKENS = 'root ::= "b" ("c" | "d")'
"""Token 1, then 2 or 3, then the end of sequence."""


def greedy(structure: StructuredOutputsParams | None = None, **values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "structured_outputs": structure} | values)


def toy(**settings: Any) -> TableTarget:
    return TableTarget(logits=FAVOURS_5, tokenizer=toy_tokenizer(TEXTS), **settings)


GRAMMAR = StructuredOutputsParams(grammar=THREE_TOKENS)


@pytest.mark.parametrize("drafts", [[], [[5, 2]], [[2, 5, 9], [9]], [[2, 9]], [[3, 9, 1]], [[9, 9, 9]]])
def test_B74_illegal_drafts_are_cut_and_the_request_goes_on(decode: Decode, drafts: list[list[int]]) -> None:
    [output] = decode(toy(), [[0]], greedy(GRAMMAR), FixedProposer(drafts))
    assert output.outputs[0].token_ids == [1, 2, 9]
    assert (output.outputs[0].finish_reason, output.outputs[0].error) == ("stop", None)


def test_B74_the_draft_is_cut_before_the_illegal_token(decode: Decode) -> None:
    [output] = decode(toy(), [[0]], greedy(GRAMMAR), FixedProposer([[2, 5, 9]]))
    record = output.outputs[0].spec_decode_metrics
    assert (record.num_draft_tokens, record.num_accepted_tokens) == (1, 1)
    [skipped] = decode(toy(), [[0]], greedy(GRAMMAR), FixedProposer([[5, 5]]))
    assert skipped.outputs[0].spec_decode_metrics.skipped["grammar"] == 1


def test_B75_nothing_is_asked_of_a_matcher_that_has_ended(decode: Decode) -> None:
    [output] = decode(toy(), [[0]], greedy(GRAMMAR), FixedProposer([[2, 9, 4, 4]]), 4)
    assert output.outputs[0].token_ids == [1, 2, 9]
    assert output.outputs[0].spec_decode_metrics.num_draft_tokens == 2  # later drafts ignored
    [going_on] = decode(toy(), [[0]], greedy(GRAMMAR, ignore_eos=True, max_tokens=6), FixedProposer([[2, 9, 4, 4]]), 4)
    assert going_on.outputs[0].token_ids == [1, 2, 9, 5, 5, 5]


class CountingMatcher:
    """Accepts ``script`` only, and notes what it is asked for; raises once it has ended."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = list(script)
        self.place = 0
        self.calls: list[str] = []

    def is_terminated(self) -> bool:
        return self.place == len(self.script)

    def accept_token(self, token_id: int) -> bool:
        self.calls.append(f"accept {token_id}")
        if self.is_terminated():
            raise RuntimeError("asked after the end")
        if self.script[self.place] != token_id:
            return False
        self.place += 1
        return True

    def rollback(self, count: int) -> None:
        self.place -= count

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        if self.is_terminated():
            raise RuntimeError("asked after the end")
        bitmask[row] = 1 << self.script[self.place]


def test_a_matcher_keeps_committed_tokens_only() -> None:
    matcher = CountingMatcher([1, 2, 3])
    grammar = Grammar(matcher)
    assert grammar.walk([1, 2, 9]) == (2, True)
    assert grammar.walk([1, 2, 3, 4, 4]) == (3, False)
    assert matcher.place == 0
    bitmask = torch.full((5, 1), -1, dtype=torch.int32)
    (path,) = draft_paths([1, 2, 3, 4], 0, None)
    assert grammar.fill(path, bitmask) == [0, 1, 2]
    assert bitmask[:, 0].tolist() == [2, 4, 8, -1, -1]
    assert grammar.read(torch.tensor([1, 2]).numpy()) is None
    assert matcher.place == 2
    fault = grammar.read(torch.tensor([1, 2, 7]).numpy())
    assert fault is not None
    assert "token 7" in fault


def test_a_drawn_token_stays_for_the_rule_to_reject() -> None:
    grammar = Grammar(CountingMatcher([1, 2, 3]))
    fixed = Draft.from_lists([[1, 5, 3], [1, 5]])
    assert cut_drafts([grammar, None], fixed).num_draft_tokens == (1, 2)
    drawn = Draft(fixed.draft_token_ids, fixed.num_draft_tokens, (LawSpan(0, 5, Dense(torch.zeros(5, 8))),))
    assert cut_drafts([grammar, None], drawn).num_draft_tokens == (2, 2)


def test_grammar_keeps_the_masked_distribution_with_drawn_drafts(decode: Decode) -> None:
    # "b" and then "c", "d" or "e": of .5/.3/.2 of f, c, d the grammar leaves .6/.4 of c, d
    probs = [0.0, 0.02, 0.27, 0.18, 0.0, 0.5, 0.0, 0.0, 0.0, 0.03]
    target = TableTarget(probs=probs, tokenizer=toy_tokenizer(TEXTS), max_num_seqs=64)
    params = [
        SamplingParams(seed=seed, max_tokens=202, structured_outputs=StructuredOutputsParams(regex="[cd]{201}"))
        for seed in range(100)
    ]
    proposer = SamplingProposer([0.0, 0.0, 0.1, 0.5, 0.0, 0.4, 0.0, 0.0, 0.0, 0.0])
    outputs = decode(target, [[0]] * 100, params, proposer, 3, laws=frozenset({"dense"}))
    drawn = [token_id for output in outputs for token_id in output.outputs[0].token_ids[:201]]
    assert len(drawn) > 20_000
    assert set(drawn) == {2, 3}
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)

    def chi_squared(share: float) -> float:
        expected = [share * len(drawn), (1 - share) * len(drawn)]
        return sum((drawn.count(t) - e) ** 2 / e for t, e in zip((2, 3), expected, strict=True))

    assert chi_squared(0.6) < 37.3  # 1e-9 with one degree of freedom
    assert chi_squared(0.57) > 37.3  # the negative control


KINDS = [
    (StructuredOutputsParams(regex="b[cd]+"), r"b[cd]+"),
    (StructuredOutputsParams(choice=["bcd", "ef", "gg"]), r"bcd|ef|gg"),
    (StructuredOutputsParams(grammar='root ::= "b" root | "c"'), r"b*c"),
]


@pytest.mark.parametrize(("structure", "pattern"), KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammar_outputs_match_and_equal_plain_ones(
    decode: Decode, structure: StructuredOutputsParams, pattern: str, temperature: float
) -> None:
    target = MarkovTarget(vocab_size=10, tokenizer=toy_tokenizer(TEXTS), scale=1.0)
    prompts = [[number % 9] for number in range(6)]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=24, structured_outputs=structure)
        for seed in range(6)
    ]
    plain = [output.outputs[0] for output in decode(target, prompts, params)]
    oracle = OracleProposer(
        {tuple(prompt): sample.token_ids for prompt, sample in zip(prompts, plain, strict=True)}, vocab_size=10
    )
    for proposer in (RandomProposer(10), oracle):
        drafted = [output.outputs[0] for output in decode(target, prompts, params, proposer, 4)]
        assert [sample.token_ids for sample in drafted] == [sample.token_ids for sample in plain]
    for sample in plain:
        assert sample.finish_reason in ("stop", "length")
        if sample.finish_reason == "stop":
            assert re.fullmatch(pattern, sample.text.removesuffix("</s>"))


JSON_TEXTS = [*'{}":,abc 01', "</s>", '"a"', '{"']


@pytest.mark.parametrize("as_text", [False, True])
def test_json_schema_grammar(decode: Decode, as_text: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
    structure = StructuredOutputsParams(json=json.dumps(schema) if as_text else schema, disable_any_whitespace=True)
    tokenizer = toy_tokenizer(JSON_TEXTS, eos_token_id=11)
    target = MarkovTarget(vocab_size=16, tokenizer=tokenizer, eos_token_id=11, scale=1.0)
    params = [SamplingParams(seed=seed, max_tokens=40, structured_outputs=structure) for seed in range(4)]
    outputs = decode(target, [[5]] * 4, params, RandomProposer(14), 4)
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop"
        assert json.loads(output.outputs[0].text) in ({"a": "b"}, {"a": "c"})


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (StructuredOutputsParams(regex="b("), r"structured_outputs.regex does not compile: Regex parsing error"),
        (StructuredOutputsParams(grammar="root ::= "), "structured_outputs.grammar does not compile: EBNF"),
        (StructuredOutputsParams(json={"type": "nope"}), "structured_outputs.json does not compile: Unsupported type"),
        (StructuredOutputsParams(json="{"), "structured_outputs.json does not compile: Expecting property name"),
    ],
)
def test_a_grammar_that_does_not_compile_is_that_requests_error(
    make_llm: Callable[..., LLM], structure: StructuredOutputsParams, message: str
) -> None:
    with make_llm(toy()) as llm:
        llm.add_request("good", [0], greedy(GRAMMAR), output_kind="final_only")
        llm.step()
        with pytest.raises(RequestError, match=message):
            llm.add_request("bad", [0], greedy(structure))
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
    assert [output.outputs[0].token_ids for output in outputs] == [[1, 2, 9]]


def test_a_grammar_needs_a_tokenizer_and_an_end(decode: Decode) -> None:
    with pytest.raises(RequestError, match="structured_outputs needs a tokenizer"):
        decode(TableTarget(logits=FAVOURS_5), [[0]], greedy(GRAMMAR))
    with pytest.raises(RequestError, match="needs a token that ends the output"):
        decode(toy(eos_token_id=None), [[0]], greedy(GRAMMAR))
    [output] = decode(toy(eos_token_id=None), [[0]], greedy(GRAMMAR, stop_token_ids=[8]))
    assert (output.outputs[0].token_ids, output.outputs[0].stop_reason) == ([1, 2, 8], 8)


def test_several_samples_have_a_matcher_each(decode: Decode) -> None:
    target = MarkovTarget(vocab_size=10, tokenizer=toy_tokenizer(TEXTS), scale=1.0)
    structure = StructuredOutputsParams(regex="[bcdefg]{6}")
    params = SamplingParams(n=4, seed=1, max_tokens=8, structured_outputs=structure)
    [output] = decode(target, [[0]], params, RandomProposer(10))
    assert all(re.fullmatch("[b-g]{6}", sample.text) for sample in output.outputs)
    assert len({sample.text for sample in output.outputs}) > 1


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("end", [[4, 7], "eh", [4]])
def test_the_grammar_begins_where_reasoning_ends_inside_a_block(decode: Decode, k: int, end: str | list[int]) -> None:
    script = [6, 4, 6, 4, 7] if end != [4] else [6, 6, 6, 4]
    expected = [*script, 1, 2, 9]
    target = ScriptedTarget([*script, 5, 2, 5], tokenizer=toy_tokenizer(TEXTS), vocab_size=10)
    params = greedy(GRAMMAR, reasoning_end=end, max_tokens=16)
    oracle = OracleProposer({(0,): expected}, vocab_size=10)
    for proposer in (None, oracle, OracleProposer({(0,): [*script, 5, 5, 5]}, vocab_size=10), RandomProposer(10)):
        [output] = decode(target, [[0]], params, proposer, k)
        sample = output.outputs[0]
        assert sample.token_ids[:-1] == [*script, 1, sample.token_ids[-2]]
        assert sample.token_ids[-2:] in ([2, 9], [3, 9])
        assert sample.num_reasoning_tokens == len(script)


def test_B114_reasoning_that_never_ends_counts_every_token(decode: Decode) -> None:
    target = ScriptedTarget([6, 7] * 10, eos_token_id=None)
    params = greedy(reasoning_end=[5], max_tokens=7)
    [output] = decode(target, [[0]], params, OracleProposer({(0,): [6, 7] * 10}, vocab_size=16), 4)
    assert output.outputs[0].num_reasoning_tokens == 7 == len(output.outputs[0].token_ids)


def test_reasoning_sections_end_across_blocks() -> None:
    for split in range(6):
        section = ReasoningSection([4, 4, 5])
        text = [1, 4, 4, 4, 5, 4, 4, 5]
        section.append(text[:split])
        if split < 5:
            assert section.num_tokens_before_end(text[split:]) == 5 - split
            assert section.num_tokens_before_end(text[split:4]) is None
        section.append(text[split:])
        assert section.num_tokens == 5
        assert section.num_tokens_so_far == 5
