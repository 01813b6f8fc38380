"""The loop on tiny models: the same text with and without speculation, whatever the batch (B26-B31, B91, B92, B128)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specplug import LLM, Request, RequestOutput, SamplingParams, hookimpl
from specplug.testing.models import tiny_llama
from specplug.testing.proposers import FixedProposer, OracleProposer, RandomProposer
from specplug.testing.toys import MarkovTarget, ScriptedTarget
from specplug.types import Batch, StepOutcome

Decode = Callable[..., list[RequestOutput]]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def greedy(max_tokens: int = 16) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def prompts_of(lengths: Sequence[int], seed: int = 0, vocab_size: int = 64) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def hf_greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Plain greedy decoding by the model alone, without a cache: the code that is not ours."""
    import torch

    token_ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            token_ids.append(int(model(torch.tensor([token_ids]), use_cache=False).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


def test_B26_greedy_text_is_unchanged_by_ngram(decode: Decode) -> None:
    prompt = [5, 6] * 20
    model = tiny_llama()
    [output] = decode(model, [prompt], greedy(), speculative_config=NGRAM)
    assert output.outputs[0].token_ids == hf_greedy(model, prompt, 16)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_B27_every_draft_length_gives_the_same_text(decode: Decode, k: int) -> None:
    model, prompt = tiny_llama(), [3, 1, 4, 1, 5]
    plain = hf_greedy(model, prompt, 32)
    proposer = OracleProposer({tuple(prompt): plain}, vocab_size=64)
    assert ids(decode(model, [prompt], greedy(32), proposer, k)) == [plain]


def test_B28_both_paths_read_the_same_generation_config(decode: Decode) -> None:
    model, prompt = tiny_llama(), [5, 6] * 10
    model.generation_config.repetition_penalty = 1.3
    plain = decode(model, [prompt], greedy(), None)
    drafted = decode(model, [prompt], greedy(), speculative_config=NGRAM)
    assert ids(plain) == ids(drafted)


def test_B30_rows_of_a_batch_equal_their_own_decoding(decode: Decode) -> None:
    model, prompts = tiny_llama(), prompts_of([1, 3, 7, 12])
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    outputs = decode(model, prompts, greedy(24), speculative_config=config)
    assert ids(outputs) == [hf_greedy(model, prompt, 24) for prompt in prompts]


def test_B31_unrelated_drafts_change_nothing(decode: Decode) -> None:
    model, prompts = tiny_llama(), prompts_of([4, 9], seed=1)
    outputs = decode(model, prompts, greedy(20), RandomProposer(64, seed=5), 5)
    assert ids(outputs) == [hf_greedy(model, prompt, 20) for prompt in prompts]


def test_B91_no_draft_inside_an_unfinished_prompt(decode: Decode) -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []

    class Watching(RandomProposer):
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Any:
            seen.append((batch.num_computed_tokens[0], tuple(limits)))
            return super().specplug_propose(batch=batch, limits=limits)

    target = MarkovTarget(vocab_size=24, max_query_tokens=4)
    prompt = prompts_of([9], vocab_size=24)[0]
    [output] = decode(target, [prompt], greedy(8), Watching(24))
    assert output.outputs[0].token_ids == target.continuation(prompt, 8)
    assert seen[0][0] == 9  # first asked when the whole prompt was read: chunks of 4, 4 and 1 drew no call


def test_B92_rows_with_different_accepted_lengths(decode: Decode) -> None:
    model, prompts = tiny_llama(), prompts_of([5, 6, 7], seed=2)
    plain = [hf_greedy(model, prompt, 20) for prompt in prompts]
    keys = [tuple(prompt) for prompt in prompts]
    proposer = OracleProposer(
        dict(zip(keys, plain, strict=True)), vocab_size=64, num_right=dict(zip(keys, [0, 2, 3], strict=True))
    )
    assert ids(decode(model, prompts, greedy(20), proposer)) == plain


def test_B128_rows_without_drafts_beside_drafting_rows(decode: Decode) -> None:
    script = [1, 2, 3, 4, 5, 6]
    prompts = [[10], [11], [12]]
    proposer = FixedProposer({(10,): [[2, 3, 4]], (11,): [[]], (12,): [[7]]})
    outputs = decode(ScriptedTarget(script), prompts, SamplingParams(temperature=0.0, max_tokens=6), proposer)
    assert ids(outputs) == [script] * 3


def test_B149_a_request_can_opt_out(decode: Decode) -> None:
    script = list(range(1, 9))
    off = SamplingParams(temperature=0.0, max_tokens=8, extra_args={"specplug": {"enabled": False}})
    on = SamplingParams(temperature=0.0, max_tokens=8)
    proposer = OracleProposer({(0,): script, (15,): script}, vocab_size=16)
    outputs = decode(ScriptedTarget(script), [[0], [15]], [off, on], proposer)
    assert ids(outputs) == [script, script]
    records = [output.outputs[0].spec_decode_metrics for output in outputs]
    assert [record.num_draft_tokens for record in records] == [0, 5]


def test_per_request_cap_on_draft_length(decode: Decode) -> None:
    script = list(range(1, 9))
    capped = SamplingParams(temperature=0.0, max_tokens=8, extra_args={"specplug": {"num_speculative_tokens": 1}})
    [output] = decode(ScriptedTarget(script), [[0]], capped, OracleProposer({(0,): script}, vocab_size=16))
    assert output.outputs[0].token_ids == script
    assert max(output.outputs[0].spec_decode_metrics.per_step_drafted) == 1


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5])
@pytest.mark.parametrize("max_num_batched_tokens", [5, 16, 2048])
def test_continuous_batching_with_random_lengths(
    decode: Decode, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    target = MarkovTarget(vocab_size=24, max_num_seqs=max_num_seqs, max_query_tokens=8, eos_token_id=None)
    prompts = prompts_of([1, 9, 3, 17, 2, 30, 5], vocab_size=24)
    lengths = [5, 1, 12, 3, 20, 7, 2]
    params = [greedy(length) for length in lengths]
    outputs = decode(target, prompts, params, RandomProposer(24), 4, max_num_batched_tokens=max_num_batched_tokens)
    expected = [target.continuation(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    assert ids(outputs) == expected


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_text_is_the_plain_text_for_any_proposer(decode: Decode, temperature: float) -> None:
    model, prompts = tiny_llama(), prompts_of([4, 7, 2], seed=3)
    params = [
        SamplingParams(temperature=temperature, top_p=0.9, top_k=20, seed=seed, max_tokens=20, ignore_eos=True)
        for seed in (1, 2, 3)
    ]
    plain = ids(decode(model, prompts, params))
    assert ids(decode(model, prompts, params, RandomProposer(64), 5)) == plain
    oracle = OracleProposer({tuple(p): text for p, text in zip(prompts, plain, strict=True)}, vocab_size=64)
    assert ids(decode(model, prompts[::-1], params[::-1], oracle, 3)) == plain[::-1]
    other_seed = [SamplingParams(temperature=temperature, seed=99, max_tokens=20, ignore_eos=True)] * 3
    assert ids(decode(model, prompts, other_seed)) != plain


class Recorder:
    """Follows a request by ``advance`` and checks that what it hears is the text, without gap or overlap."""

    def __init__(self) -> None:
        self.read: dict[str, list[int]] = {}
        self.positions: dict[str, list[float]] = {}
        self.finished: list[tuple[str, str]] = []
        self.outcomes: list[StepOutcome] = []
        self.hidden_state_layers = (1,)

    @hookimpl
    def specplug_start_request(self, request: Request) -> None:
        self.read[request.request_id], self.positions[request.request_id] = [], []

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        rows = zip(batch.request_ids, batch.new_token_ids, batch.new_hidden_states[1], strict=True)
        for row, (request_id, new, states) in enumerate(rows):
            self.read[request_id] += new.tolist()
            assert [int(state[0]) for state in states] == new.tolist()  # the toy's first feature: the token read
            self.positions[request_id] += [float(state[1]) for state in states]
            assert batch.token_ids[row][: len(self.read[request_id])] == self.read[request_id]

    @hookimpl
    def specplug_accept_metrics(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    @hookimpl
    def specplug_finish_request(self, request: Request, reason: str) -> None:
        self.finished.append((request.request_id, reason))


class RecordingProposer(Recorder, RandomProposer):
    def __init__(self, vocab_size: int) -> None:
        Recorder.__init__(self)
        RandomProposer.__init__(self, vocab_size)


def test_advance_covers_exactly_what_was_computed_and_kept(decode: Decode) -> None:
    target = MarkovTarget(vocab_size=24, max_query_tokens=4, max_num_seqs=3, eos_token_id=None)
    prompts = prompts_of([9, 2, 6, 13, 1], vocab_size=24)
    proposer = RecordingProposer(24)
    outputs = decode(target, prompts, greedy(15), proposer)
    for output in outputs:
        text = output.prompt_token_ids + output.outputs[0].token_ids
        heard = proposer.read[output.request_id]
        assert heard == text[: len(heard)]
        assert len(heard) >= len(text) - 1  # the newest token is read only if it was a draft token
        assert proposer.positions[output.request_id] == list(range(len(heard)))
    assert sorted(proposer.finished) == sorted((output.request_id, "length") for output in outputs)


def test_outcomes_add_up(decode: Decode) -> None:
    target = MarkovTarget(vocab_size=24, max_query_tokens=4, max_num_seqs=3, eos_token_id=None)
    proposer = RecordingProposer(24)
    outputs = decode(target, prompts_of([9, 2, 6, 13], vocab_size=24), greedy(15), proposer)
    rows = [row for outcome in proposer.outcomes for row in outcome.rows]
    assert sum(row.num_emitted_tokens for row in rows) == sum(len(output.outputs[0].token_ids) for output in outputs)
    assert all(0 <= row.num_accepted_tokens <= row.num_verified_accepted_tokens <= row.num_draft_tokens for row in rows)
    assert all((row.skip_reason is None) == (row.num_draft_tokens > 0) for row in rows)
    assert sum(outcome.num_prefill_tokens for outcome in proposer.outcomes) == 9 + 2 + 6 + 13
    sources = [source for row in rows for source in row.sources]
    assert {source.source for source in sources} == {"scripted"}
    assert sum(source.num_draft_tokens for source in sources) == sum(row.num_draft_tokens for row in rows)


def hook_calls(make_llm: Callable[..., LLM], num_requests: int, k: int, max_tokens: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    script = [1] * 64
    target = ScriptedTarget(script, eos_token_id=None)
    proposer = FixedProposer([[1] * k] * 64)
    with make_llm(target, proposer, k) as llm:
        manager = llm._session.hooks.plugin_manager

        def before(name: str, impls: object, kwargs: object) -> None:
            counts[name] = counts.get(name, 0) + 1

        undo = manager.add_hookcall_monitoring(before, lambda outcome, name, impls, kwargs: None)
        llm.generate([[0]] * num_requests, greedy(max_tokens))
        undo()
    return counts


def test_hook_calls_do_not_depend_on_batch_size_or_draft_length(make_llm: Callable[..., LLM]) -> None:
    # 1 prefill token and then full acceptance: the same 4 decoding steps for each pair of K and length
    calls = {(size, k): hook_calls(make_llm, size, k, max_tokens=1 + 4 * (k + 1)) for size in (1, 8) for k in (1, 5)}
    per_request = ("specplug_start_request", "specplug_finish_request")
    for (size, _), counts in calls.items():
        assert all(counts.pop(name) == size for name in per_request)
    assert len({tuple(sorted(counts.items())) for counts in calls.values()}) == 1
    assert calls[1, 1]["specplug_propose"] == 4
    assert calls[1, 1]["specplug_verify"] == 5
