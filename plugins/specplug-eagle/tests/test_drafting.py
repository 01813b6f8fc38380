"""How a head follows the text: chunks, steps without drafts, rollback, company. Drafts depend on the text alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specplug import LLM, SamplingParams
from specplug.models.runner import TargetRunner
from specplug.testing import HookDriver, InstalledMethod, Rig, tiny_llama
from specplug.testing.driver import Rule, Step, follow, keep
from specplug.types import Dense, Indirect, OneHot

GOLDENS = Path(__file__).parent / "goldens"
K = 4
HEADS = {
    "eagle": ("eagle", "eagle", {}),
    "eagle3": ("eagle3", "llama", {}),
    "eagle31": ("eagle3", "llama-31", {}),
    "qwen3": ("eagle3", "qwen3", {}),
    "peagle": ("eagle3", "peagle-llama", {"parallel_drafting": True}),
    "tree": ("eagle3", "llama", {"eagle_tree_width": 3, "eagle_tree_depth": 3}),
}
PROMPT = (3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 8, 2, 7)
TEXT = (9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6)

Driver = Callable[..., HookDriver]


def model() -> Any:
    return tiny_llama(
        vocab_size=40, hidden_size=16, num_hidden_layers=4, max_position_embeddings=128, eos_token_id=None
    )


def make_target(max_query_tokens: int = 64) -> TargetRunner:
    return TargetRunner(model(), max_num_seqs=8, max_model_len=128, max_query_tokens=max_query_tokens)


@pytest.fixture(params=list(HEADS))
def driver(request: pytest.FixtureRequest) -> Driver:
    method, folder, options = HEADS[request.param]
    make = InstalledMethod(method, {"model": str(GOLDENS / folder), **options})

    def made(max_query_tokens: int = 64) -> HookDriver:
        rig = Rig(make_target=lambda: make_target(max_query_tokens), num_speculative_tokens=K)
        return HookDriver(make, rig)

    return made


def drafts_along(
    made: HookDriver,
    prompt: Sequence[int] = PROMPT,
    text: Sequence[int] = TEXT,
    name: str = "r",
    *,
    rule: Rule | None = None,
) -> dict[int, tuple[int, ...]]:
    """The drafts on the way to ``text``: length of the text so far -> draft."""
    made.start(name, prompt)
    made.prefill(follow(text))
    return drafts_on(made, text, name)


def drafts_on(made: HookDriver, text: Sequence[int], name: str = "r") -> dict[int, tuple[int, ...]]:
    drafts = {}
    while len(written := made.text(name)) < len(text):
        drafts[len(written)] = made.step(follow(text[len(written) :])).drafts[name]
    return drafts


def test_drafts_differ_from_place_to_place(driver: Driver) -> None:
    """Or the tests below would say nothing."""
    drafts = drafts_along(driver())
    assert all(len(draft) == K for draft in drafts.values())
    assert len(set(drafts.values())) > len(drafts) // 3


@pytest.mark.parametrize("chunk", [K + 1, K + 2, K + 4])
def test_a_chunked_prompt_is_one_prompt(driver: Driver, chunk: int) -> None:
    assert drafts_along(driver(chunk)) == drafts_along(driver())


@pytest.mark.parametrize("read_ahead", [64, 3])
def test_steps_without_a_draft_lose_no_state(driver: Driver, read_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether what waits is read with the next draft, or before it because it has become long."""
    expected = drafts_along(driver())
    monkeypatch.setattr("specplug.proposers.heads.reader.READ_AHEAD", read_ahead)
    made = driver()
    made.start("r", PROMPT)
    made.prefill(follow(TEXT))
    while len(written := made.text("r")) < 9:
        made.step(follow([TEXT[len(written)]]), limit=0)
    seen = drafts_on(made, TEXT)
    assert {at: seen[at] for at in seen if at in expected} == {at: expected[at] for at in seen if at in expected}
    assert 9 in seen


@pytest.mark.parametrize("num_kept", [0, 1, 2, 3, K])
def test_rollback_after_any_number_of_accepted_tokens(driver: Driver, num_kept: int) -> None:
    made = driver()
    made.start("r", PROMPT)
    made.prefill()
    seen = {}
    for _ in range(5):
        at = len(made.text("r"))
        seen[at] = made.step(keep(num_kept, vocab_size=40)).drafts["r"]
    text = made.text("r")
    for at, draft in seen.items():
        fresh = driver()
        fresh.start("r", PROMPT)
        fresh.prefill(follow(text))
        while len(written := fresh.text("r")) < at:
            fresh.step(follow([text[len(written)]]), limit=0)
        assert fresh.step().drafts["r"] == draft


def test_two_proposals_in_a_row_are_equal(driver: Driver) -> None:
    """A request that is paused between draft and verification is asked again without anything new."""
    made = driver()
    made.start("r", PROMPT)
    made.prefill(follow(TEXT))
    batch = made._batch()
    with torch.inference_mode():
        first, second = (made.call("propose", batch=batch, limits=(K,)) for _ in range(2))
    assert first.draft_token_ids.tolist() == second.draft_token_ids.tolist()
    assert made.step(follow(TEXT[1:])).drafts["r"] == tuple(first.draft_token_ids.tolist())


Drafted = tuple[tuple[int, ...], tuple[float, ...]]
"""Of one request in one step: its draft and, to tell apart what has the same arg-max, the confidence in it."""


def drafted(step: Step) -> dict[str, Drafted]:
    confidence = [] if step.draft is None or step.draft.confidence is None else step.draft.confidence.tolist()
    found, start = {}, 0
    for name in step.batch.request_ids:
        stop = start + len(step.drafts[name])
        found[name], start = (step.drafts[name], tuple(confidence[start:stop])), stop
    return found


def test_company_changes_nothing(driver: Driver) -> None:
    others = {"a": ((7,), TEXT[::-1]), "b": ((2, 2, 2, 8, 1), TEXT[3:]), "c": (PROMPT[::-1], TEXT)}
    made = driver(K + 1)
    made.start("passing", (1, 2))
    for name, (prompt, _) in others.items():
        made.start(name, prompt)
    made.prefill()
    made.step(limit=1)  # so that it has been read
    made.finish("passing", "abort")
    seen: dict[str, dict[tuple[int, ...], Drafted]] = {name: {} for name in others}
    for number in range(10):
        limits = [(number + row) % (K + 1) for row in range(len(made.rows))]
        step = made.step(limit=limits)
        for name, limit, token_ids in zip(step.batch.request_ids, step.limits, step.batch.token_ids, strict=True):
            assert len(step.drafts[name]) == limit
            seen[name][tuple(token_ids)] = drafted(step)[name]
    num_compared = 0
    for name, (prompt, _) in others.items():
        text = made.text(name)
        alone = driver()
        alone.start(name, prompt)
        alone.prefill(follow(text))
        while len(written := alone.text(name)) < len(text) - 1:
            context = (*prompt, *written)
            draft, confidence = drafted(alone.step(follow([text[len(written)]])))[name]
            if context in seen[name]:
                in_company, with_confidence = seen[name][context]
                assert in_company == draft[: len(in_company)]
                assert with_confidence == pytest.approx(confidence[: len(in_company)], abs=1e-4)
                num_compared += 1
    assert num_compared >= 20


def test_confidence_is_the_largest_probability(driver: Driver) -> None:
    made = driver()
    made.start("r", PROMPT)
    made.prefill()
    draft = made.step().draft
    assert draft is not None and draft.confidence is not None
    assert all(isinstance(span.law, OneHot) for span in draft.laws)
    head = made.proposer.head  # type: ignore[attr-defined]
    vocab_size = head.config.draft_vocab_size
    assert bool((draft.confidence <= 1).all())
    assert draft.parents is not None or bool((draft.confidence >= 1 / vocab_size).all())


@pytest.mark.parametrize("name", ["eagle", "eagle3", "peagle"])
def test_confidence_is_that_of_the_law(name: str) -> None:
    method, folder, options = HEADS[name]
    options = {**options, "model": str(GOLDENS / folder), "draft_sample_method": "probabilistic"}
    made = HookDriver(InstalledMethod(method, options), Rig(make_target=make_target, num_speculative_tokens=K))
    made.start("r", PROMPT)
    made.prefill()
    batch = made._batch()
    confidence = []
    for temperature in (0.0, 1.0):
        requests = (replace(batch.requests[0], sampling_params=SamplingParams(temperature=temperature)),)
        with torch.inference_mode():
            draft = made.call("propose", batch=replace(batch, requests=requests), limits=(K,))
        confidence.append(draft.confidence)
    (span,) = draft.laws
    assert torch.allclose(draft.confidence, span.law.draft_logits.softmax(-1).amax(-1))
    assert torch.allclose(confidence[0][0], confidence[1][0]), "the first token's, greedy and sampled"


@pytest.mark.parametrize("name", ["eagle3", "peagle"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafting_reads_nothing_back_from_the_device(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads values would wait for a GPU. Tokens and laws stay tensors until the host copies them."""
    method, folder, options = HEADS[name]
    options = {**options, "model": str(GOLDENS / folder), "draft_sample_method": "probabilistic"}
    made = HookDriver(InstalledMethod(method, options), Rig(make_target=make_target, num_speculative_tokens=K))
    made.start("r", PROMPT)
    made.start("s", PROMPT[:3])
    made.prefill()
    batch = made._batch()
    params = SamplingParams(temperature=temperature)
    batch = replace(batch, requests=tuple(replace(each, sampling_params=params) for each in batch.requests))

    def refuse(*_: object) -> None:
        raise AssertionError("the drafting loop waited for a value")

    with torch.inference_mode(), monkeypatch.context() as patch:
        for reading in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            patch.setattr(torch.Tensor, reading, refuse)
        draft = made.proposer.propose(batch, [K, K - 1])  # type: ignore[attr-defined]
    assert draft.num_draft_tokens == (K, K - 1)
    sampled = {"eagle3": Indirect, "peagle": Dense}[name]
    assert [type(span.law) for span in draft.laws] == [sampled if temperature else OneHot]


def test_a_request_longer_than_the_head_sees_runs_on_without_drafts() -> None:
    config = {"model": str(GOLDENS / "llama"), "num_speculative_tokens": K, "max_model_len": 24}
    prompt, params = {"prompt_token_ids": list(PROMPT)}, SamplingParams(temperature=0.0, max_tokens=40)
    with LLM(model(), max_model_len=128) as llm:
        (plain,) = llm.generate(prompt, params)
    with LLM(model(), speculative_config=config, max_model_len=128, strict=True) as llm:
        (output,) = llm.generate(prompt, params)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    metrics = output.outputs[0].spec_decode_metrics
    assert 0 < metrics.num_drafts < 15
    assert metrics.skipped["draft_len"] > 10


@pytest.mark.parametrize("name", list(HEADS))
@pytest.mark.parametrize("draft_sample_method", ["greedy", "probabilistic"])
def test_greedy_text_is_that_of_plain_decoding(name: str, draft_sample_method: str) -> None:
    _, folder, options = HEADS[name]
    if name == "tree" and draft_sample_method == "probabilistic":
        pytest.skip("trees are not sampled")
    config = {"model": str(GOLDENS / folder), "num_speculative_tokens": K, **options}
    config |= {"draft_sample_method": draft_sample_method}
    prompts = [{"prompt_token_ids": list(ids)} for ids in (PROMPT, (7,), TEXT, PROMPT[::-1])]
    params = [SamplingParams(temperature=0.0, max_tokens=20 + number) for number in range(4)]
    with LLM(model(), max_model_len=128) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 16}
    with LLM(model(), speculative_config=config, max_model_len=128, strict=True, **settings) as llm:
        outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert all(output.outputs[0].spec_decode_metrics.num_draft_tokens for output in outputs)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "peagle", "tree"])
def test_greedy_drafts_are_seed_exact_at_any_temperature(name: str) -> None:
    _, folder, options = HEADS[name]
    config = {"model": str(GOLDENS / folder), "num_speculative_tokens": K, **options}
    prompt, params = {"prompt_token_ids": list(PROMPT)}, SamplingParams(temperature=0.9, seed=5, max_tokens=30)
    with LLM(model(), max_model_len=128) as llm:
        (plain,) = llm.generate(prompt, params)
    with LLM(model(), speculative_config=config, max_model_len=128, strict=True) as llm:
        (output,) = llm.generate(prompt, params)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_toy_target_is_refused() -> None:
    from specplug.testing import MarkovTarget

    with pytest.raises(Exception, match="reads hidden states of a real model"):
        LLM(
            MarkovTarget(),
            speculative_config={"method": "eagle3", "model": str(GOLDENS / "llama"), "num_speculative_tokens": 2},
        )


def test_a_disabled_request_is_not_followed() -> None:
    config = {"model": str(GOLDENS / "llama"), "num_speculative_tokens": K}
    params = SamplingParams(temperature=0.0, max_tokens=8, extra_args={"specplug": {"enabled": False}})
    with LLM(model(), speculative_config=config, max_model_len=128, strict=True) as llm:
        (output,) = llm.generate({"prompt_token_ids": list(PROMPT)}, params)
        assert not llm._session.hooks.instance("eagle3")._reader._rows
    assert output.outputs[0].spec_decode_metrics.num_draft_tokens == 0


@pytest.mark.parametrize("name", ["eagle", "eagle3", "peagle"])
def test_more_draft_tokens_than_the_heads_positions_take(name: str) -> None:
    """The drafts then end where the head's positions do, whatever num_speculative_tokens asks for."""
    method, folder, options = HEADS[name]
    config = {"method": method, "model": str(GOLDENS / folder), "num_speculative_tokens": 30, **options}
    rows = [{"prompt_token_ids": list(ids)} for ids in ([5, 6, 7, 8], [1], PROMPT)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    plain = [each.outputs[0].token_ids for each in LLM(model(), skip_tokenizer_init=True).generate(rows, params)]
    for max_model_len in (1, 2, 12, 20):
        short = config | {"max_model_len": max_model_len}
        with LLM(model(), skip_tokenizer_init=True, strict=True, speculative_config=short) as llm:
            assert [each.outputs[0].token_ids for each in llm.generate(rows, params)] == plain
            counts = {metric.name: metric for metric in llm.get_metrics()}
            assert counts["vllm:spec_decode_num_draft_tokens"].value > 0
