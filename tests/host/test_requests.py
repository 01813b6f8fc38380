"""Adding, streaming, aborting and refusing requests; faults of plugins; rows B78, B79, B104, B155."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specplug import LLM, Draft, PluginFaultError, Request, RequestError, RequestOutput, SamplingParams, hookimpl
from specplug.models.target import TargetOutput
from specplug.testing.models import toy_tokenizer
from specplug.testing.proposers import FixedProposer, OracleProposer, RandomProposer
from specplug.testing.toys import MarkovTarget, ScriptedTarget
from specplug.types import Batch

MakeLLM = Callable[..., LLM]
SCRIPT = [1, 2, 3, 4, 5, 6, 7, 8]


def greedy(max_tokens: int = 8, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **values)


class Following(FixedProposer):
    """Proposes nothing and notes which requests it was told had finished."""

    def __init__(self) -> None:
        super().__init__([])
        self.finished: list[tuple[str, str]] = []

    @hookimpl
    def specplug_finish_request(self, request: Request, reason: str) -> None:
        self.finished.append((request.request_id, reason))


def drain(llm: LLM) -> list[RequestOutput]:
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    return outputs


def test_B78_streaming_delivers_every_accepted_token_once(make_llm: MakeLLM) -> None:
    texts = [f"<{number}>" for number in range(16)]
    target = ScriptedTarget(SCRIPT, tokenizer=toy_tokenizer(texts))
    with make_llm(target, OracleProposer({(0,): SCRIPT}, vocab_size=16)) as llm:
        chunks = list(llm.stream([[0]], greedy()))
        [whole] = llm.generate([[0]], greedy())
    assert [token_id for chunk in chunks for token_id in chunk.outputs[0].token_ids] == SCRIPT
    assert "".join(chunk.outputs[0].text for chunk in chunks) == whole.outputs[0].text == "".join(texts[1:9])
    assert max(len(chunk.outputs[0].token_ids) for chunk in chunks) == 4
    assert len(chunks) < len(SCRIPT)


class ByteTokenizer:
    """Token i is the byte ``table[i]``; decodes like a byte-level tokenizer."""

    table = b"\xe4\xbd\xa0x?"

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return bytes(self.table[token_id] for token_id in token_ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("k", [1, 3])
def test_B79_no_broken_characters_in_a_stream(make_llm: MakeLLM, k: int) -> None:
    script = [0, 1, 2, 3]
    target = ScriptedTarget(script, vocab_size=8, eos_token_id=None, tokenizer=ByteTokenizer())
    with make_llm(target, OracleProposer({(4,): script}, vocab_size=8), k) as llm:
        deltas = [chunk.outputs[0].text for chunk in llm.stream([[4]], greedy(4))]
    assert all("\ufffd" not in delta for delta in deltas)
    assert "".join(deltas) == "你x"


def test_a_character_that_never_ends_is_flushed_at_the_end(make_llm: MakeLLM) -> None:
    target = ScriptedTarget([3, 0], vocab_size=8, eos_token_id=None, tokenizer=ByteTokenizer())
    with make_llm(target) as llm:
        assert "".join(chunk.outputs[0].text for chunk in llm.stream([[4]], greedy(2))) == "x\ufffd"


def test_requests_join_and_leave_at_any_step(make_llm: MakeLLM) -> None:
    target = MarkovTarget(vocab_size=24, max_num_seqs=3, eos_token_id=None)
    with make_llm(target, RandomProposer(24)) as llm:
        outputs: list[RequestOutput] = []
        for number in range(10):
            llm.add_request(f"r{number}", [number, 1], greedy(3 + number % 4), output_kind="final_only")
            outputs += llm.step()
        outputs += drain(llm)
    assert sorted(output.request_id for output in outputs) == sorted(f"r{number}" for number in range(10))
    for output in outputs:
        number = int(output.request_id[1:])
        assert output.outputs[0].token_ids == target.continuation([number, 1], 3 + number % 4)


def test_abort_of_a_running_and_of_a_waiting_request(make_llm: MakeLLM) -> None:
    target = ScriptedTarget(SCRIPT, max_num_seqs=1)
    proposer = Following()
    with make_llm(target, proposer) as llm:
        llm.add_request("running", [0], greedy())
        llm.add_request("waiting", [0], greedy())
        llm.step()
        for request_id in ("waiting", "running", "unknown"):
            llm.abort(request_id)
        ended = {output.request_id: output.outputs[0] for output in llm.step()}
        assert {request_id: output.finish_reason for request_id, output in ended.items()} == {
            "waiting": "abort",
            "running": "abort",
        }
        assert (ended["waiting"].token_ids, ended["running"].token_ids) == ([], [1])
        assert not llm.has_unfinished_requests()
        assert proposer.finished == [("running", "abort")]  # the waiting one never started
        llm.add_request("running", [0], greedy(2))  # the id is free again
        assert drain(llm)[-1].outputs[0].token_ids == [1, 2]


def test_closing_a_stream_early_aborts_it(make_llm: MakeLLM) -> None:
    proposer = Following()
    with make_llm(ScriptedTarget(SCRIPT), proposer) as llm:
        stream = llm.stream([[0]], greedy())
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert not llm.has_unfinished_requests()
        assert len(proposer.finished) == 1


def test_generate_keeps_the_outputs_of_other_requests(make_llm: MakeLLM) -> None:
    with make_llm(ScriptedTarget(SCRIPT)) as llm:
        llm.add_request("mine", [0], greedy(2), output_kind="final_only")
        [whole] = llm.generate([[0]], greedy(8))
        assert whole.outputs[0].token_ids == SCRIPT
        assert [output.request_id for output in drain(llm)] == ["mine"]


@pytest.mark.parametrize(
    "prompts",
    [
        torch.tensor([0, 1]),
        np.array([0, 1]),
        {"prompt_token_ids": torch.tensor([0, 1])},
        {"prompt_token_ids": [0, 1], "prompt": None, "cache_salt": None, "multi_modal_data": None},
        torch.tensor([[0, 1]]),
        [np.array([0, 1])],
        [np.int64(0), np.int32(1)],
        [torch.tensor(0), torch.tensor(1)],
        (0, 1),
        range(2),
        iter([[0, 1]]),
    ],
)
def test_ids_come_in_any_sequence(make_llm: MakeLLM, prompts: Any) -> None:
    with make_llm(ScriptedTarget(SCRIPT)) as llm:
        [output] = llm.generate(prompts, greedy(2))
    assert output.prompt_token_ids == [0, 1]
    assert output.outputs[0].token_ids == SCRIPT[:2]


@pytest.mark.parametrize("prompts", [None, 5, 1.5, b"ab", {"text": "ab"}, [None], [5, "a"], np.array([None])])
def test_what_is_no_prompt_is_a_request_error(make_llm: MakeLLM, prompts: Any) -> None:
    with make_llm(ScriptedTarget(SCRIPT)) as llm, pytest.raises(RequestError):
        llm.generate(prompts, greedy())


@pytest.mark.parametrize("text", ["\ud800", "é"])
def test_a_text_that_cannot_be_tokenised(make_llm: MakeLLM, text: str) -> None:
    with (
        make_llm(ScriptedTarget(SCRIPT, tokenizer=toy_tokenizer(list("abcdefghijklmnop")))) as llm,
        pytest.raises(RequestError, match=r"cannot be tokenised .* pass {'prompt_token_ids'"),
    ):
        llm.generate(text, greedy())


def test_an_id_that_is_no_text_and_an_unknown_output_kind(make_llm: MakeLLM) -> None:
    with make_llm(ScriptedTarget(SCRIPT)) as llm:
        with pytest.raises(RequestError, match="request_id=5 is a int; it must be text"):
            llm.add_request(5, [0], greedy())  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="output_kind='all' must be one of cumulative, delta, final_only"):
            llm.add_request("a", [0], greedy(), output_kind="all")  # type: ignore[arg-type]


def test_the_switches_of_a_request_stay_as_they_were_checked(make_llm: MakeLLM) -> None:
    switches: dict[str, Any] = {"num_speculative_tokens": 1}
    params = greedy(3, extra_args={"specplug": switches})
    seen: list[Request] = []

    class Watching(Following):
        @hookimpl
        def specplug_start_request(self, request: Request) -> None:
            seen.append(request)

    with make_llm(ScriptedTarget(SCRIPT), Watching()) as llm:
        llm.add_request("a", [0], params)
        switches["num_speculative_tokens"] = -1
        drain(llm)
        assert dict(seen[0].speculation) == {"num_speculative_tokens": 1}
        with pytest.raises(TypeError):
            seen[0].speculation["enabled"] = False  # type: ignore[index]
        with pytest.raises(RequestError, match=r"\['num_speculative_tokens'\]=-1 is not valid"):
            llm.add_request("b", [0], params)


def test_close_finishes_running_requests_and_only_once(make_llm: MakeLLM) -> None:
    proposer = Following()
    llm = make_llm(ScriptedTarget(SCRIPT), proposer)
    llm.add_request("left", [0], greedy())
    llm.step()
    llm.close()
    llm.close()
    assert proposer.finished == [("left", "abort")]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], greedy(), "the prompt is empty"),
        ([0] * 12, greedy(), "12 tokens and max_model_len is 12: at most 11"),
        ([0, 99], greedy(), r"prompt_token_ids\[1\]=99 is not a token id of the target, which has ids 0 to 15"),
        ([0, -1], greedy(), r"prompt_token_ids\[1\]=-1"),
        ("text", greedy(), "the target has no tokenizer"),
        ([0], greedy(stop="x"), "needs a tokenizer"),
        ([0], "greedy", "sampling_params is a str"),
        ({"prompt_token_ids": "12"}, greedy(), "prompt_token_ids='12' is a str, not a list of token ids"),
        (None, greedy(), r"prompt=None is a NoneType, not a list of token ids; write a text, a list of token ids"),
        (5, greedy(), "prompt=5 is a int"),
        (b"ab", greedy(), "prompt=b'ab' is a bytes"),
        ([True, False], greedy(), r"prompt_token_ids\[0\]=True is not a token id"),
        (torch.tensor([True]), greedy(), r"prompt_token_ids\[0\]=True is not a token id"),
        (torch.tensor([1.0]), greedy(), r"prompt_token_ids\[0\]=1.0 is not a token id"),
        (torch.tensor([[1]]), greedy(), r"prompt_token_ids\[0\]=\[1\] is not a token id"),
        ({"text": "ab"}, greedy(), "the prompt has the key 'text'; write a text, .* each with a cache_salt"),
        ({"prompt": None}, greedy(), r"the prompt {'prompt': None} has neither text nor ids"),
        ({"prompt": 5}, greedy(), "prompt=5 is a int; it must be text"),
        ({"prompt_token_ids": [1], "prompt": 5}, greedy(), "prompt=5 is a int; it must be text"),
        ({"prompt_token_ids": [1], "cache_salt": 5}, greedy(), "cache_salt=5 is a int; it must be text"),
        ({"prompt_token_ids": [1], "multi_modal_data": {}}, greedy(), "has the key 'multi_modal_data'"),
        ([0], {"temperature": 0}, r"is a mapping; write SamplingParams\(temperature=0\)"),
    ],
)
def test_a_request_that_cannot_be_served_harms_no_other(
    make_llm: MakeLLM, prompt: Any, params: Any, message: str
) -> None:
    with make_llm(ScriptedTarget(SCRIPT, max_model_len=12)) as llm:
        llm.add_request("good", [0], greedy(3), output_kind="final_only")
        llm.step()
        with pytest.raises(RequestError, match=message):
            llm.add_request("bad", prompt, params)
        with pytest.raises(RequestError, match="request id 'good' is in use"):
            llm.add_request("good", [0], greedy())
        [output] = drain(llm)
        assert output.outputs[0].token_ids == [1, 2, 3]


def test_sampling_params_report_all_faults_at_once() -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(temperature=-1.0, top_p=0.0, seed=2**64, extra_args={"specplug": {"enable": True}})
    for part in ("temperature=-1.0", "top_p=0.0", "seed=", "['enable'] is unknown; known: enabled"):
        assert part in str(error.value)
    with pytest.raises(RequestError, match=r"unknown sampling parameter 'temprature'. Did you mean temperature"):
        SamplingParams.from_mapping({"temprature": 1.0})


class RaisingProposer:
    def __init__(self) -> None:
        self.calls = 0

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        self.calls += 1
        raise RuntimeError("boom")


class WrongRows:
    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        return Draft.from_lists([[1]] * (len(batch) + 1))


FAULTY = [
    (lambda: RaisingProposer(), "propose_raised"),
    (lambda: FixedProposer([[64]] * 20, clip=False), ""),
    (lambda: FixedProposer([[-5]] * 20, clip=False), ""),
    (lambda: WrongRows(), ""),
]


@pytest.mark.parametrize(("make", "reason"), FAULTY)
def test_B104_B155_faulty_proposers_never_change_the_text(make_llm: MakeLLM, make: Any, reason: str) -> None:
    with make_llm(ScriptedTarget(SCRIPT), make(), strict=False) as llm:
        outputs = llm.generate([[0], [3]], greedy())
        assert [output.outputs[0].token_ids for output in outputs] == [SCRIPT, SCRIPT]
        faults = llm._session.hooks.faults
        assert faults
        assert any(name.startswith(reason) for name in faults)


def test_a_raising_proposer_is_detached_for_the_session(make_llm: MakeLLM) -> None:
    proposer = RaisingProposer()
    with make_llm(ScriptedTarget(SCRIPT), proposer, strict=False) as llm:
        llm.generate([[0], [3]], greedy())
        llm.generate([[0]], greedy())
    assert proposer.calls == 1


def test_strict_raises_and_the_session_can_go_on(make_llm: MakeLLM) -> None:
    with make_llm(ScriptedTarget(SCRIPT), RaisingProposer(), strict=True) as llm:
        with pytest.raises(PluginFaultError, match="scripted"):
            llm.generate([[0]], greedy())
        assert not llm.has_unfinished_requests()


def test_too_many_ids_are_cut_to_the_limit(make_llm: MakeLLM) -> None:
    proposer = FixedProposer([[2, 3, 4, 5, 6, 7]], clip=False)
    with make_llm(ScriptedTarget(SCRIPT), proposer, 3, strict=False) as llm:
        [output] = llm.generate([[0]], greedy())
    assert output.outputs[0].token_ids == SCRIPT
    assert max(output.outputs[0].spec_decode_metrics.per_step_drafted) == 3


class Interrupted(ScriptedTarget):
    """Raises in one forward, after having read its tokens."""

    def __init__(self, at: int) -> None:
        super().__init__(SCRIPT)
        self.countdown = at

    def forward(self, *args: Any) -> TargetOutput:
        output = super().forward(*args)
        self.countdown -= 1
        if self.countdown == 0:
            raise KeyboardInterrupt
        return output


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_step_loses_nothing(make_llm: MakeLLM, at: int) -> None:
    with make_llm(Interrupted(at), OracleProposer({(0,): SCRIPT}, vocab_size=16), 2) as llm:
        llm.add_request("a", [0], greedy(), output_kind="final_only")
        with pytest.raises(KeyboardInterrupt):
            drain(llm)
        [output] = drain(llm)
    assert output.outputs[0].token_ids == SCRIPT


class NaNTarget(ScriptedTarget):
    """NaN logits for rows whose prompt is [13], from the third output token on."""

    def logits_after(self, prompt_length: int, token_ids: Sequence[int]) -> Sequence[float]:
        if token_ids[0] == 13 and len(token_ids) >= 3:
            return [float("nan")] * self.vocab_size
        return super().logits_after(prompt_length, token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_end_that_request_only(make_llm: MakeLLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=8, seed=1, top_k=1)
    with make_llm(NaNTarget(SCRIPT)) as llm:
        healthy, broken = llm.generate([[0], [13]], params)
    assert healthy.outputs[0].token_ids == SCRIPT
    assert (broken.outputs[0].finish_reason, broken.outputs[0].token_ids) == ("error", [1, 2])
    assert "NaN" in str(broken.outputs[0].error)


def test_step_runs_in_inference_mode(make_llm: MakeLLM) -> None:
    modes = []

    class Watching(RandomProposer):
        @hookimpl
        def specplug_advance(self, batch: Batch) -> None:
            modes.append(torch.is_inference_mode_enabled())

    with make_llm(ScriptedTarget(SCRIPT), Watching(16)) as llm:
        llm.generate([[0]], greedy(3))
    assert modes == [True] * len(modes)
    assert modes


def test_B158_a_request_that_names_no_method_of_the_session_is_refused(make_llm: MakeLLM) -> None:
    params = greedy(extra_args={"specplug": {"method": "sufix"}})
    with make_llm(ScriptedTarget(SCRIPT), Following()) as llm:
        with pytest.raises(RequestError, match=r"\['method'\]='sufix' is not in this session; it has scripted"):
            llm.generate([[0]], params)
        [output] = llm.generate([[0]], greedy(extra_args={"specplug": {"method": "scripted"}}))
    assert output.outputs[0].token_ids == SCRIPT


def test_odd_ids_and_params_are_messages(make_llm: MakeLLM) -> None:
    with make_llm(ScriptedTarget(SCRIPT), plugins=None) as llm:
        with pytest.raises(RequestError, match=r"request_id=\[1\] is a list"):
            llm.add_request([1], [0], greedy())  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r"write SamplingParams\(temperature=0"):
            llm.generate([[0], [1]], {"temperature": 0.0})  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="n=1000000000 must be a whole number from 1 to 16384"):
            SamplingParams(n=10**9)
