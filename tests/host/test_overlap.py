"""Calls that overlap, end early, come from several threads or from hooks: nothing is lost, mixed up or left hanging."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specplug import (
    LLM,
    PluginContext,
    PluginFaultError,
    PluginLoadError,
    Request,
    RequestError,
    RequestOutput,
    SamplingParams,
    SessionSummary,
    hookimpl,
)
from specplug.hooks import ProcessManager
from specplug.host.session import HostSession
from specplug.testing.models import tiny_llama, toy_tokenizer
from specplug.testing.proposers import FixedProposer, RandomProposer, as_method
from specplug.testing.toys import MarkovTarget, ScriptedTarget
from specplug.types import Batch, Draft

MakeLLM = Callable[..., LLM]


@pytest.fixture(autouse=True)
def _bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that would step for ever fails instead."""
    steps = {"left": 2000}
    step = HostSession.step

    def counted(session: HostSession) -> list[RequestOutput]:
        steps["left"] -= 1
        assert steps["left"], "this call does not end"
        return step(session)

    monkeypatch.setattr(HostSession, "step", counted)


def greedy(max_tokens: int = 6, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **values)


def markov(**settings: Any) -> MarkovTarget:
    return MarkovTarget(eos_token_id=None, **settings)


def ids_of(chunks: Sequence[RequestOutput]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.outputs[0].token_ids]


@pytest.mark.parametrize("inner_tokens", [2, 30])
def test_generate_inside_a_stream(make_llm: MakeLLM, inner_tokens: int) -> None:
    target = markov()
    chunks = []
    with make_llm(target, RandomProposer(16)) as llm:
        for chunk in llm.stream([[1]], greedy(12)):
            chunks.append(chunk)
            [inner] = llm.generate([[2]], greedy(inner_tokens))
            assert inner.outputs[0].token_ids == target.continuation([2], inner_tokens)
    assert ids_of(chunks) == target.continuation([1], 12)
    assert chunks[-1].finished


def test_two_streams_in_turn(make_llm: MakeLLM) -> None:
    target = markov()
    with make_llm(target) as llm:
        pairs = list(zip(llm.stream([[1]], greedy()), llm.stream([[2]], greedy()), strict=True))
    assert ids_of([first for first, _ in pairs]) == target.continuation([1], 6)
    assert ids_of([second for _, second in pairs]) == target.continuation([2], 6)


def test_step_inside_a_stream_gives_added_requests_only(make_llm: MakeLLM) -> None:
    target = markov()
    chunks, stepped = [], []
    with make_llm(target) as llm:
        llm.add_request("mine", [3], greedy(4), output_kind="delta")
        for chunk in llm.stream([[1]], greedy()):
            chunks.append(chunk)
            stepped += llm.step()
        assert {output.request_id for output in stepped} == {"mine"}
    assert ids_of(chunks) == target.continuation([1], 6)
    assert ids_of(stepped) == target.continuation([3], 4)


def test_abort_of_a_waiting_request_of_a_stream(make_llm: MakeLLM) -> None:
    ends = {}
    with make_llm(markov(max_num_seqs=1)) as llm:
        for chunk in llm.stream([[1], [2]], greedy()):
            llm.abort("1")
            if chunk.finished:
                ends[chunk.request_id] = chunk.outputs[0].finish_reason
        assert not llm.has_unfinished_requests()
    assert ends == {"0": "length", "1": "abort"}


def test_abort_from_a_hook_inside_generate(make_llm: MakeLLM) -> None:
    holder: list[LLM] = []

    class Aborting(FixedProposer):
        @hookimpl
        def specplug_advance(self, batch: Batch) -> None:
            holder[0].abort("1")

    with make_llm(markov(max_num_seqs=1), Aborting([])) as llm:
        holder.append(llm)
        reasons = [output.outputs[0].finish_reason for output in llm.generate([[1], [2]], greedy())]
    assert reasons == ["length", "abort"]


def test_close_inside_a_stream_ends_it(make_llm: MakeLLM) -> None:
    llm = make_llm(markov(max_num_seqs=1))
    reasons = []
    for chunk in llm.stream([[1], [2]], greedy()):
        llm.close()
        if chunk.finished:
            reasons.append(chunk.outputs[0].finish_reason)
    assert reasons == ["abort", "abort"]


def test_close_from_a_hook_takes_effect_after_the_step(make_llm: MakeLLM) -> None:
    holder: list[LLM] = []

    class Closing(FixedProposer):
        @hookimpl
        def specplug_advance(self, batch: Batch) -> None:
            holder[0].close()

    llm = make_llm(markov(), Closing([]))
    holder.append(llm)
    [output] = llm.generate([[1]], greedy())
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("abort", 1)
    with pytest.raises(RequestError, match="closed"):
        llm.generate([[1]], greedy())


def test_a_closed_llm_says_so_and_hands_out_what_was_left(make_llm: MakeLLM) -> None:
    llm = make_llm(markov(max_num_seqs=1))
    llm.add_request("running", [1], greedy())
    llm.add_request("waiting", [2], greedy())
    llm.step()
    late = llm.stream([[3]], greedy())
    llm.close()
    for call in (
        lambda: llm.generate([[1]], greedy()),
        lambda: llm.add_request("x", [1], greedy()),
        lambda: next(late),
    ):
        with pytest.raises(RequestError, match="this LLM is closed; build a new one"):
            call()
    assert {output.request_id: output.outputs[0].finish_reason for output in llm.step()} == {
        "running": "abort",
        "waiting": "abort",
    }
    assert not llm.has_unfinished_requests()
    assert llm.step() == []


def test_paused_requests_that_hold_all_rows_are_reported(make_llm: MakeLLM) -> None:
    with make_llm(markov(max_num_seqs=1)) as llm:
        llm.add_request("x", [1], greedy(), output_kind="final_only")
        llm.step()
        llm.pause("x")
        with pytest.raises(RequestError, match="every request is paused"):
            llm.generate([[2]], greedy())
        llm.resume("x")
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
    assert [output.request_id for output in outputs] == ["x"]


def test_ids_of_the_users_own_never_collide_with_ours(make_llm: MakeLLM) -> None:
    target = markov()
    with make_llm(target) as llm:
        llm.add_request("0", [1], greedy(20), output_kind="final_only")
        stream = llm.stream([[2]], greedy())
        with pytest.raises(RequestError, match="request id '1' is in use"):
            llm.add_request("1", [3], greedy())
        assert ids_of(list(stream)) == target.continuation([2], 6)
        [output] = llm.generate([[4]], greedy())
        assert output.outputs[0].token_ids == target.continuation([4], 6)


def test_a_stream_that_never_began_leaves_nothing(make_llm: MakeLLM) -> None:
    with make_llm(markov()) as llm:
        llm.stream([[2]], greedy()).close()  # type: ignore[attr-defined]
        assert not llm.has_unfinished_requests()


def test_threads_share_one_llm(make_llm: MakeLLM) -> None:
    target = markov()
    found: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        outputs = [llm.generate([[number]], greedy(15))[0] for _ in range(4)]
        found[number] = [output.outputs[0].token_ids for output in outputs]

    with make_llm(target, RandomProposer(16)) as llm:
        threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {number: [target.continuation([number], 15)] * 4 for number in (1, 2, 3)}


def test_a_step_inside_a_step_is_refused(make_llm: MakeLLM) -> None:
    holder: list[LLM] = []
    errors: list[str] = []

    class Stepping(FixedProposer):
        @hookimpl
        def specplug_advance(self, batch: Batch) -> None:
            try:
                holder[0].step()
            except RequestError as error:
                errors.append(str(error))

    target = markov()
    with make_llm(target, Stepping([])) as llm:
        holder.append(llm)
        [output] = llm.generate([[1]], greedy())
    assert output.outputs[0].token_ids == target.continuation([1], 6)
    assert errors
    assert "a step of this LLM is running" in errors[0]


class Undecodable:
    """A tokenizer that decodes digits and fails on token 7."""

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        if 7 in token_ids:
            raise KeyError(7)
        return "".join(map(str, token_ids))


@pytest.mark.parametrize("stop", [None, "99"])
@pytest.mark.parametrize("output_kind", ["cumulative", "delta", "final_only"])
def test_text_that_cannot_be_decoded_ends_that_request_only(
    make_llm: MakeLLM, stop: str | None, output_kind: Any
) -> None:
    target = ScriptedTarget([1, 2, 7, 3, 4, 5], tokenizer=Undecodable(), eos_token_id=None)
    with make_llm(target) as llm:
        llm.add_request("text", [0], greedy(6, stop=stop), output_kind=output_kind)
        llm.add_request("ids", [0], greedy(6, detokenize=False), output_kind="final_only")
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
    last = {output.request_id: output.outputs[0] for output in outputs if output.finished}
    assert last["ids"].token_ids == [1, 2, 7, 3, 4, 5]
    assert last["text"].finish_reason == "error"
    assert "the tokenizer cannot decode the output: KeyError: 7" in str(last["text"].error)
    texts = [output.outputs[0].text for output in outputs if output.request_id == "text"]
    assert "".join(texts) == "12" if output_kind == "delta" else texts[-1] in ("12", "")


class InterruptedOnce(FixedProposer):
    """Raises ``KeyboardInterrupt`` in one call of the hook named."""

    def __init__(self, hook: str, at: int) -> None:
        super().__init__([])
        self._hook, self._countdown = hook, at
        self.started: list[str] = []
        self.ended: list[str] = []

    def _call(self, hook: str) -> None:
        if hook == self._hook:
            self._countdown -= 1
            if self._countdown == 0:
                raise KeyboardInterrupt

    @hookimpl
    def specplug_start_request(self, request: Request) -> None:
        self.started.append(request.request_id)
        self._call("start_request")

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        self._call("advance")

    @hookimpl
    def specplug_finish_request(self, request: Request) -> None:
        self.ended.append(request.request_id)
        self._call("finish_request")


@pytest.mark.parametrize("hook", ["start_request", "advance", "finish_request"])
@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_in_a_hook_loses_no_streamed_token(make_llm: MakeLLM, hook: str, at: int) -> None:
    target = markov()
    proposer = InterruptedOnce(hook, at)
    outputs: list[RequestOutput] = []
    interrupts = 0
    with make_llm(target, proposer) as llm:
        for number, length in ((1, 3), (2, 5)):
            llm.add_request(f"r{number}", [number], greedy(length), output_kind="delta")
        while llm.has_unfinished_requests():
            try:
                outputs += llm.step()
            except KeyboardInterrupt:
                interrupts += 1
    assert interrupts == 1
    for number, length in ((1, 3), (2, 5)):
        mine = [output for output in outputs if output.request_id == f"r{number}"]
        assert ids_of(mine) == target.continuation([number], length)
    assert sorted(proposer.started) == sorted(proposer.ended) == ["r1", "r2"]


def test_a_failed_start_gives_the_model_back(make_llm: MakeLLM) -> None:
    model = tiny_llama()
    model.train()
    before = model.config._attn_implementation

    def fail(context: PluginContext) -> object:
        raise RuntimeError("no weights")

    manager = ProcessManager()
    manager.register(as_method("broken", fail))
    with pytest.raises(PluginLoadError, match="'broken' could not be built: RuntimeError: no weights"):
        make_llm(model, speculative_config={"method": "broken", "num_speculative_tokens": 2}, manager=manager)
    assert model.config._attn_implementation == before
    assert model.training


def test_a_strict_fault_at_the_end_gives_the_model_back(make_llm: MakeLLM) -> None:
    class Failing:
        @hookimpl
        def specplug_finish_session(self, summary: SessionSummary) -> None:
            raise OSError("disk full")

        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft | None:
            return None

    model = tiny_llama()
    before = model.config._attn_implementation
    llm = make_llm(model, Failing(), strict=True)
    assert model.config._attn_implementation != before
    with pytest.raises(PluginFaultError, match="disk full"):
        llm.close()
    assert model.config._attn_implementation == before


def test_generate_prints_text_of_a_toy(make_llm: MakeLLM) -> None:
    target = ScriptedTarget([1, 2], tokenizer=toy_tokenizer([f"<{number}>" for number in range(16)]), eos_token_id=None)
    with make_llm(target) as llm:
        assert llm.generate("<0>", greedy(2))[0].outputs[0].text == "<1><2>"
