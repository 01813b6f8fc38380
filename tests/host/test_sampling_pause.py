"""Pausing, resuming and aborting at every boundary between two phases of a step: rows B77, B115, B125 and B127."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from specplug import LLM, Draft, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams, hookimpl
from specplug.hooks import ProcessManager
from specplug.methods import MethodSpec, PluginConfig, PluginContext
from specplug.models.target import TargetOutput
from specplug.testing.models import tiny_llama, toy_tokenizer
from specplug.testing.proposers import MethodPlugin, OracleProposer, RandomProposer
from specplug.testing.toys import MarkovTarget, ScriptedTarget, TableTarget
from specplug.types import Batch, Request, Verification

MakeLLM = Callable[..., LLM]
PHASES = ("plan", "propose", "forward", "verify", "commit", "advance", "metrics")
SCRIPT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]


class Boundary:
    """Calls ``act()`` once, when the ``at``-th step reaches ``phase``."""

    def __init__(self, phase: str, at: int) -> None:
        self.phase, self.at = phase, at
        self.act: Callable[[], object] = lambda: None
        self.is_over = False
        self._num_seen = 0

    def restart(self) -> None:
        self.is_over, self._num_seen = False, 0

    def reached(self, phase: str) -> None:
        if phase == self.phase and not self.is_over:
            self._num_seen += 1
            if self._num_seen == self.at:
                self.is_over = True
                self.act()


class Watched:
    """A proposer that lets a boundary act inside each of its hooks, and checks what it hears of a request."""

    def __init__(self, inner: Any, boundary: Boundary) -> None:
        self.inner, self.boundary = inner, boundary
        self.read: dict[str, list[int]] = {}
        self.finished: list[tuple[str, str]] = []
        self.batches: list[tuple[str, ...]] = []

    @hookimpl
    def specplug_start_request(self, request: Request) -> None:
        self.read[request.request_id] = []

    @hookimpl
    def specplug_plan(self, batch: Batch) -> None:
        self.boundary.reached("plan")

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        self.batches.append(batch.request_ids)
        self.boundary.reached("propose")
        draft: Draft = self.inner.specplug_propose(batch=batch, limits=limits)
        return draft

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        for request_id, text, new in zip(batch.request_ids, batch.token_ids, batch.new_token_ids, strict=True):
            self.read[request_id] += new.tolist()
            assert text[: len(self.read[request_id])] == self.read[request_id]
        self.boundary.reached("advance")

    @hookimpl
    def specplug_accept_metrics(self, outcome: Any) -> None:
        self.boundary.reached("metrics")

    @hookimpl
    def specplug_finish_request(self, request: Request, reason: str) -> None:
        self.finished.append((request.request_id, reason))
        del self.read[request.request_id]


class AroundVerify:
    """A wrapper in which a boundary acts before and after the rule."""

    def __init__(self, boundary: Boundary) -> None:
        self.boundary = boundary

    @hookimpl(wrapper=True)
    def specplug_verify(self, batch: Batch, draft: Draft) -> Iterator[None]:
        self.boundary.reached("verify")
        result: Verification = yield
        self.boundary.reached("commit")
        return result  # type: ignore[return-value]


def watching(target: Any, boundary: Boundary) -> Any:
    """The same target, in whose forward the boundary acts."""
    forward = target.forward

    def watched(*args: Any) -> TargetOutput:
        boundary.reached("forward")
        output: TargetOutput = forward(*args)
        return output

    target.forward = watched
    return target


@pytest.fixture
def make_watched(make_llm: MakeLLM) -> Callable[..., tuple[LLM, Watched]]:
    def make(target: Any, inner: Any, boundary: Boundary, k: int) -> tuple[LLM, Watched]:
        def factory(config: PluginConfig, context: PluginContext) -> object:
            return AroundVerify(boundary)

        manager = ProcessManager()
        manager.register(MethodPlugin(MethodSpec(name="around", kind="wrapper", factory=factory)))
        proposer = Watched(inner, boundary)
        llm = make_llm(watching(target, boundary), proposer, k, manager=manager, plugins=["around"])
        return llm, proposer

    return make


def drain(llm: LLM) -> list[RequestOutput]:
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    return outputs


def greedy(max_tokens: int = 12, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **values)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("at", [1, 2])
def test_B127_a_result_that_comes_after_the_pause_is_dropped(
    make_watched: Callable[..., tuple[LLM, Watched]], phase: str, k: int, at: int
) -> None:
    boundary = Boundary(phase, at)
    oracle = OracleProposer({(0,): SCRIPT, (9,): SCRIPT}, vocab_size=16, num_right=max(1, k - 1))
    llm, proposer = make_watched(ScriptedTarget(SCRIPT, eos_token_id=None), oracle, boundary, k)
    with llm:
        boundary.act = lambda: llm.pause("paused")
        llm.add_request("paused", [0], greedy(), output_kind="delta")
        llm.add_request("other", [9], greedy(), output_kind="final_only")
        outputs: list[RequestOutput] = []
        last: list[RequestOutput] = []
        while not boundary.is_over:
            last = llm.step()
            outputs += last
        is_told = any(output.request_id == "paused" for output in last)
        assert is_told == (phase in ("advance", "metrics"))  # before, the step's result is dropped
        proposer.batches.clear()
        for _ in range(3):
            outputs += llm.step()
        assert all("paused" not in batch for batch in proposer.batches)
        assert llm.resume("paused")
        outputs += drain(llm)
    tokens = [t for output in outputs if output.request_id == "paused" for t in output.outputs[0].token_ids]
    assert tokens == SCRIPT
    [other] = [output for output in outputs if output.request_id == "other"]
    assert other.outputs[0].token_ids == SCRIPT
    record = [output for output in outputs if output.request_id == "paused"][-1].outputs[0].spec_decode_metrics
    assert record.num_emitted_tokens == 12  # nothing counted twice
    assert sorted(proposer.finished) == [("other", "length"), ("paused", "length")]


@pytest.mark.parametrize("phase", PHASES)
def test_B77_a_paused_grammar_goes_on_as_if_uninterrupted(
    make_watched: Callable[..., tuple[LLM, Watched]], phase: str
) -> None:
    pytest.importorskip("xgrammar")
    texts = ["<p>", "b", "c", "d", "e", "f", "g", "h", "i", "</s>"]
    boundary = Boundary(phase, 2)
    target = MarkovTarget(vocab_size=10, tokenizer=toy_tokenizer(texts), scale=1.0)
    params = greedy(structured_outputs=StructuredOutputsParams(regex="[bcd]{4}[efg]{6}"))
    llm, _ = make_watched(target, RandomProposer(10), boundary, 3)
    with llm:
        [plain] = llm.generate([[0]], params)
        boundary.restart()
        boundary.act = lambda: llm.pause("r")
        llm.add_request("r", [0], params, output_kind="final_only")
        while not boundary.is_over:
            llm.step()
        assert llm.step() == []
        llm.resume("r")
        [output] = drain(llm)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("at", [1, 2, 3, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pausing_inside_a_forward_drops_a_prompt_chunk_too(at: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    prompt = [number % 60 for number in range(3, 25)]
    with LLM(tiny_llama(), max_num_batched_tokens=8) as alone:
        [plain] = alone.generate([prompt], params)
    boundary = Boundary("forward", at)
    with LLM(tiny_llama(), max_num_batched_tokens=8) as host:
        watching(host._target, boundary)
        host.add_request("r", prompt, params, output_kind="final_only")
        host.add_request("other", prompt[::-1], params, output_kind="final_only")
        boundary.act = lambda: host.pause("r")
        while not boundary.is_over:
            host.step()
        for _ in range(4):
            host.step()
        host.resume("r")
        outputs = {output.request_id: output for output in drain(host)}
    assert outputs["r"].outputs[0].token_ids == plain.outputs[0].token_ids
    logprobs = outputs["r"].prompt_logprobs
    assert logprobs is not None
    assert [list(entry or ()) for entry in logprobs] == [list(entry or ()) for entry in plain.prompt_logprobs or ()]


@pytest.mark.parametrize("phase", PHASES)
def test_B115_an_abort_keeps_one_record_and_the_id_starts_at_zero(
    make_watched: Callable[..., tuple[LLM, Watched]], phase: str
) -> None:
    boundary = Boundary(phase, 2)
    oracle = OracleProposer({(0,): SCRIPT}, vocab_size=16)
    llm, proposer = make_watched(ScriptedTarget(SCRIPT, eos_token_id=None), oracle, boundary, 2)
    with llm:
        boundary.act = lambda: llm.abort("r")
        llm.add_request("r", [0], greedy(), output_kind="final_only")
        [aborted] = drain(llm)
        sample = aborted.outputs[0]
        assert sample.finish_reason == "abort"
        assert sample.token_ids == SCRIPT[: len(sample.token_ids)]
        assert sample.spec_decode_metrics.num_emitted_tokens == len(sample.token_ids)
        assert proposer.finished == [("r", "abort")]
        llm.add_request("r", [0], greedy(), output_kind="final_only")
        [again] = drain(llm)
        assert again.outputs[0].token_ids == SCRIPT
        assert again.outputs[0].spec_decode_metrics.num_emitted_tokens == 12
        totals = llm.acceptance.aggregate()
        assert totals.num_requests == 2
        assert totals.num_emitted_tokens == len(sample.token_ids) + 12


def test_B125_many_requests_with_random_ends(make_llm: MakeLLM) -> None:
    rng = random.Random(0)
    model = tiny_llama()
    prompts = [[rng.randrange(64) for _ in range(rng.randint(1, 20))] for _ in range(64)]
    lengths = [rng.randint(1, 24) for _ in prompts]
    config = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    finished: dict[str, RequestOutput] = {}
    with make_llm(model, speculative_config=config, max_num_seqs=48) as llm:
        waiting = list(range(64))
        while waiting or llm.has_unfinished_requests():
            for _ in range(min(len(waiting), rng.randint(0, 6))):
                number = waiting.pop()
                params = SamplingParams(temperature=0.0, max_tokens=lengths[number], ignore_eos=True)
                llm.add_request(str(number), prompts[number], params, output_kind="final_only")
            if rng.random() < 0.3 and (running := llm._session.scheduler.running):
                request_id = rng.choice(running).request_id
                assert llm.pause(request_id)
                assert llm.resume(request_id)
            finished |= {output.request_id: output for output in llm.step()}
        proposer = llm._session.hooks.instance("ngram")
        assert len(finished) == 64
        assert not llm._session.scheduler.running
    with make_llm(model, max_num_seqs=1) as plain:
        for number in range(0, 64, 7):
            params = SamplingParams(temperature=0.0, max_tokens=lengths[number], ignore_eos=True)
            [alone] = plain.generate([prompts[number]], params)
            assert finished[str(number)].outputs[0].token_ids == alone.outputs[0].token_ids
    from specplug.testing.state import find_mentions

    assert find_mentions(proposer, {str(number) for number in range(64)}) == []


def test_a_paused_request_waits_in_line_and_unknown_ids_are_told(make_llm: MakeLLM) -> None:
    with make_llm(ScriptedTarget(SCRIPT, max_num_seqs=1), RandomProposer(16)) as llm:
        llm.add_request("first", [0], greedy(2), output_kind="final_only")
        llm.add_request("second", [0], greedy(2), output_kind="final_only")
        assert llm.pause("first")
        assert not llm.pause("unknown")
        assert not llm.resume("unknown")
        done = [*llm.step(), *llm.step(), *llm.step()]
        assert [output.request_id for output in done] == ["second"]
        assert llm.has_unfinished_requests()
        llm.resume("first")
        assert [output.request_id for output in drain(llm)] == ["first"]


def test_an_aborted_request_leaves_although_it_is_paused(make_llm: MakeLLM) -> None:
    with make_llm(ScriptedTarget(SCRIPT), RandomProposer(16)) as llm:
        llm.add_request("r", [0], greedy())
        llm.step()
        llm.pause("r")
        llm.abort("r")
        [output] = llm.step()
        assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
        assert not llm.has_unfinished_requests()


def test_generate_does_not_wait_for_ever_for_a_paused_request(make_llm: MakeLLM) -> None:
    with make_llm(ScriptedTarget(SCRIPT)) as llm:
        stream = llm.stream([0], greedy())
        llm.pause(next(stream).request_id)
        with pytest.raises(RequestError, match="every request is paused"):
            list(stream)
        assert not llm.has_unfinished_requests()


def test_pausing_several_samples_pauses_them_all(make_llm: MakeLLM) -> None:
    target = TableTarget(probs=[0.5, 0.3, 0.2], eos_token_id=None)
    params = SamplingParams(n=3, seed=1, max_tokens=6)
    with make_llm(target, RandomProposer(3)) as llm:
        [plain] = llm.generate([[0]], params)
        llm.add_request("r", [0], params, output_kind="final_only")
        llm.step()
        assert llm.pause("r")
        assert llm.step() == []
        assert llm.resume("r")
        [output] = drain(llm)
    assert [sample.token_ids for sample in output.outputs] == [sample.token_ids for sample in plain.outputs]
