"""Random combinations of all parameters: the text of plain decoding, whatever is drafted and whoever is in the batch.

Greedy texts are also held against a decoder written here from the parameters' definitions, one token at a time.
Run the long form with ``scripts/test -m slow -k sampling_property --hypothesis-show-statistics``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from specplug import LLM, Draft, RequestOutput, SamplingParams, StructuredOutputsParams, hookimpl
from specplug.hooks import ProcessManager
from specplug.testing.models import tiny_llama, toy_tokenizer
from specplug.testing.proposers import AdversarialProposer, OracleProposer, RandomProposer, as_method
from specplug.testing.toys import MarkovTarget, ToyTarget
from specplug.testing.tree_proposers import OracleTreeProposer, RandomTreeProposer
from specplug.types import Batch

pytest.importorskip("xgrammar")

TEXTS = ["<p>", "ab", "c", "d", "ba", "e", "f", "g", "h", "</s>", "a", "b", " "]
VOCAB, EOS = len(TEXTS), 9
CHOICES = ["abcab", "baba", "e", "cdcd", "ff", "abba"]
NUM_FAST, NUM_SLOW = 70, 2000
Case: TypeAlias = tuple[list[list[int]], list[SamplingParams], int, int]


def no_doubles(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A custom processor that looks at the output."""
    logits = logits.clone()
    if output:
        logits[output[-1]] -= 3.0
    return logits


IDS = st.integers(0, VOCAB - 1)
OPTIONAL: dict[str, SearchStrategy[Any]] = {
    "presence_penalty": st.sampled_from([-1.5, 0.5, 2.0]),
    "frequency_penalty": st.sampled_from([-1.0, 0.75, 2.0]),
    "repetition_penalty": st.sampled_from([0.75, 1.25, 2.0]),
    "logit_bias": st.dictionaries(IDS, st.sampled_from([-100.0, -2.5, 1.5, 4.0]), max_size=4),
    "allowed_token_ids": st.lists(IDS, min_size=3, max_size=VOCAB, unique=True),
    "bad_words": st.lists(
        st.one_of(st.lists(IDS, min_size=1, max_size=3), st.sampled_from(["ab", "ba", "efg"])), max_size=4
    ),
    "stop": st.lists(st.sampled_from(["bab", "ca", "ef", "ab", "hh"]), max_size=2),
    "stop_token_ids": st.lists(IDS, max_size=2),
    "min_tokens": st.integers(0, 8),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "logits_processors": st.just([no_doubles]),
    "structured_outputs": st.just(StructuredOutputsParams(choice=CHOICES)),
    "reasoning_end": st.lists(IDS, min_size=1, max_size=2),
    "logprobs": st.integers(-1, 3),
    "prompt_logprobs": st.integers(0, 2),
    "logprobs_mode": st.sampled_from(["raw_logprobs", "processed_logprobs"]),
    "top_k": st.integers(1, VOCAB),
    "top_p": st.sampled_from([0.3, 0.8, 0.95]),
    "min_p": st.sampled_from([0.05, 0.3]),
    "extra_args": st.sampled_from([{"specplug": {"enabled": False}}, {"specplug": {"num_speculative_tokens": 1}}]),
}


@st.composite
def sampling(draw: st.DrawFn, temperatures: Sequence[float], without: Sequence[str]) -> SamplingParams:
    optional = {name: strategy for name, strategy in OPTIONAL.items() if name not in without}
    values = draw(st.fixed_dictionaries({}, optional=optional))
    max_tokens = draw(st.integers(max(1, values.get("min_tokens", 0)), 14))
    temperature = draw(st.sampled_from(temperatures))
    return SamplingParams(
        **values, max_tokens=max_tokens, temperature=temperature, seed=draw(st.integers(0, 2**64 - 1))
    )


@st.composite
def cases(draw: st.DrawFn, temperatures: Sequence[float], without: Sequence[str] = ()) -> Case:
    """Prompts, their parameters, a seed for the drafts, and how the batch is shuffled."""
    size = draw(st.integers(1, 4))
    prompts = [[*draw(st.lists(IDS, min_size=1, max_size=6)), number] for number in range(size)]
    params = [draw(sampling(temperatures, without)) for _ in prompts]
    return prompts, params, draw(st.integers(0, 999)), draw(st.integers(0, 23))


# --- the decoder from the definitions -------------------------------------------------------------------------


@functools.cache
def make_tokenizer() -> Any:
    return toy_tokenizer(TEXTS)


def spelled(words: Sequence[str | Sequence[int]]) -> list[list[int]]:
    tokenizer = make_tokenizer()
    return [tokenizer.encode(word, add_special_tokens=False) if isinstance(word, str) else list(word) for word in words]


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(TEXTS[token_id] for token_id in token_ids if token_id != EOS)


def structured_part(output: Sequence[int], end: Sequence[int] | None) -> list[int] | None:
    """The output after the reasoning; None while it lasts."""
    if end is None:
        return list(output)
    for stop in range(len(end), len(output) + 1):
        if list(output[stop - len(end) : stop]) == list(end):
            return list(output[stop:])
    return None


def allowed_by_grammar(params: SamplingParams, output: Sequence[int]) -> set[int]:
    part = structured_part(output, params.reasoning_end)  # type: ignore[arg-type]
    if params.structured_outputs is None or part is None or EOS in part:
        return set(range(VOCAB))
    text = text_of(part)
    legal = {t for t in range(VOCAB) if t != EOS and any(c.startswith(text + TEXTS[t]) for c in CHOICES)}
    return legal | ({EOS} if text in CHOICES else set())


def ends_of(params: SamplingParams) -> set[int]:
    return set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {EOS})


def next_logits(
    raw: Sequence[float], prompt: Sequence[int], output: list[int], params: SamplingParams
) -> np.ndarray[Any, Any]:
    logits = np.array(raw, dtype=np.float32)
    for processor in params.logits_processors or ():
        logits = processor(output, torch.from_numpy(logits)).numpy()
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += np.float32(bias)
    for token_id in range(VOCAB):
        count = output.count(token_id)
        if count or token_id in prompt:
            factor = np.float32(params.repetition_penalty)
            logits[token_id] = logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
        logits[token_id] -= np.float32(params.frequency_penalty) * np.float32(count)
        logits[token_id] -= np.float32(params.presence_penalty) * np.float32(count > 0)
    ruled_out = set(range(VOCAB)) - set(params.allowed_token_ids or range(VOCAB))
    for word in spelled(params.bad_words or ()):
        if output[len(output) - len(word) + 1 :] == word[:-1] and len(output) >= len(word) - 1:
            ruled_out.add(word[-1])
    if len(output) < params.min_tokens:
        ruled_out |= ends_of(params)
    ruled_out |= set(range(VOCAB)) - allowed_by_grammar(params, output)
    logits[list(ruled_out)] = -np.inf
    return logits


def decode_greedily(
    target: ToyTarget, prompt: Sequence[int], params: SamplingParams
) -> tuple[list[int], str, int | str | None]:
    """Token ids, finish reason and stop reason."""
    output: list[int] = []
    assert params.max_tokens is not None
    while len(output) < params.max_tokens:
        raw = target.logits_after(len(prompt), [*prompt, *output])
        logits = next_logits(raw, prompt, output, params)
        if logits.max() == -np.inf:
            return output, "error", None
        before = text_of(output)
        output.append(int(logits.argmax()))
        if output[-1] in (params.stop_token_ids or ()):
            return output, "stop", output[-1]
        if output[-1] in ends_of(params):
            return output, "stop", None
        text = text_of(output)
        matches = [(text.find(s, max(0, len(before) - len(s) + 1)), s) for s in params.stop_strings]
        matches = [match for match in matches if match[0] >= 0]
        if matches and len(output) > params.min_tokens:
            return output, "stop", min(matches, key=lambda match: match[0])[1]
    return output, "length", None


# --- the host -------------------------------------------------------------------------------------------------


class Switch:
    """A proposer that a test exchanges between runs."""

    def __init__(self) -> None:
        self.inner: Any = None

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        draft: Draft = self.inner.specplug_propose(batch=batch, limits=limits)
        return draft


class Host:
    """One session for many examples."""

    def __init__(self, target: Any, k: int = 6, rule: str | None = None, **engine: Any) -> None:
        self.switch = Switch()
        manager = ProcessManager()
        manager.register(as_method("scripted", lambda context: self.switch))
        config: dict[str, Any] = {"method": "scripted", "num_speculative_tokens": k}
        if rule is not None:
            config["rejection_sample_method"] = rule
        self.llm = LLM(target, speculative_config=config, manager=manager, strict=True, **engine)

    def run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], proposer: Any
    ) -> list[RequestOutput]:
        self.switch.inner = proposer
        return self.llm.generate([list(prompt) for prompt in prompts], list(params))


class Nothing:
    """Plain decoding in the same session."""

    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        return Draft.empty(len(batch))


def make_target() -> MarkovTarget:
    return MarkovTarget(vocab_size=VOCAB, scale=2.0, max_query_tokens=4, tokenizer=make_tokenizer(), max_num_seqs=3)


def told(output: RequestOutput) -> tuple[Any, ...]:
    sample = output.outputs[0]
    logprobs = [[entry and dict(entry) for entry in each or ()] for each in (sample.logprobs, output.prompt_logprobs)]
    return (
        sample.token_ids,
        sample.text,
        sample.finish_reason,
        sample.stop_reason,
        sample.num_reasoning_tokens,
        logprobs,
    )


def check_same(host: Host, case: Case) -> list[RequestOutput]:
    """Plain outputs, after all proposers gave the same ones, in a shuffled batch."""
    prompts, params, seed, shuffle = case
    plain = host.run(prompts, params, Nothing())
    texts = {tuple(p): output.outputs[0].token_ids for p, output in zip(prompts, plain, strict=True)}
    order = list(itertools.permutations(range(len(prompts))))[shuffle % math.factorial(len(prompts))]
    vocab_size = host.llm._target.vocab_size
    for proposer in (
        OracleProposer(texts, vocab_size=vocab_size),
        OracleProposer(texts, vocab_size=vocab_size, num_right=seed % 4),
        AdversarialProposer(texts, vocab_size=vocab_size),
        RandomProposer(vocab_size, seed=seed),
        OracleTreeProposer(texts, vocab_size=vocab_size, width=2),
        RandomTreeProposer(vocab_size, seed=seed),
    ):
        drafted = host.run([prompts[row] for row in order], [params[row] for row in order], proposer)
        for row, output in zip(order, drafted, strict=True):
            assert told(output) == told(plain[row]), (type(proposer).__name__, prompts[row], params[row])
    return plain


def profile(num_examples: int, *, is_slow: bool) -> settings:
    return settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=not is_slow,
        database=None,
        phases=[Phase.generate],  # shrinking takes minutes; the example is small enough to read
        suppress_health_check=list(HealthCheck),
    )


@functools.cache
def toy_host(rule: str | None = None) -> Host:
    return Host(make_target(), rule=rule)


def check_greedy(case: Case) -> None:
    plain = check_same(toy_host(), case)
    target = make_target()
    for prompt, params, output in zip(case[0], case[1], plain, strict=True):
        sample = output.outputs[0]
        expected = decode_greedily(target, prompt, params)
        assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == expected, (prompt, params)


@profile(NUM_FAST, is_slow=False)
@given(cases([0.0]))
def test_sampling_property_greedy(case: Any) -> None:
    check_greedy(case)


@profile(NUM_FAST // 2, is_slow=False)
@given(cases([0.0, 0.7, 1.3]))
def test_sampling_property_seeded(case: Any) -> None:
    check_same(toy_host(), case)


@profile(NUM_FAST // 3, is_slow=False)
@given(cases([0.0, 0.7, 1.3]))
def test_sampling_property_coupled(case: Any) -> None:
    check_same(toy_host("coupled"), case)


@pytest.mark.slow
@profile(NUM_SLOW, is_slow=True)
@given(cases([0.0]))
def test_sampling_property_greedy_at_length(case: Any) -> None:
    check_greedy(case)


@pytest.mark.slow
@profile(NUM_SLOW, is_slow=True)
@given(cases([0.0, 0.7, 1.3]))
def test_sampling_property_seeded_at_length(case: Any) -> None:
    check_same(toy_host(), case)


@pytest.mark.slow
@profile(NUM_SLOW // 4, is_slow=True)
@given(cases([0.7, 1.3]))
def test_sampling_property_coupled_at_length(case: Any) -> None:
    check_same(toy_host("coupled"), case)


VALUES = ("logprobs", "prompt_logprobs", "logprobs_mode")
"""A forward of several tokens rounds unlike several forwards: real models are compared without these."""


@functools.cache
def llama_host() -> Host:
    return Host(tiny_llama(vocab_size=VOCAB), tokenizer=make_tokenizer(), max_num_seqs=3)


@profile(NUM_FAST // 4, is_slow=False)
@given(cases([0.0, 1.0], without=VALUES))
def test_sampling_property_on_a_real_architecture(case: Any) -> None:
    check_same(llama_host(), case)
