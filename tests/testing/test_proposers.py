"""The test proposers propose what they say they do."""

from __future__ import annotations

import collections

import pytest

from specplug import LLM, SamplingParams
from specplug.hooks import ProcessManager
from specplug.testing import (
    AdversarialProposer,
    FixedProposer,
    HookDriver,
    MarkovTarget,
    OracleProposer,
    RandomProposer,
    Rig,
    SamplingProposer,
    ScriptedTarget,
    as_method,
)
from specplug.types import Dense

PROMPT = (5, 6, 5, 6)


def drafts_of(proposer: object, num_steps: int, target: object = None) -> list[tuple[int, ...]]:
    rig = Rig(make_target=lambda: target or MarkovTarget(), num_speculative_tokens=3)  # type: ignore[arg-type,return-value]
    driver = HookDriver(lambda context: proposer, rig)
    driver.start("r", PROMPT)
    driver.prefill()
    return [driver.step().drafts["r"] for _ in range(num_steps)]


def test_fixed_drafts_come_step_by_step() -> None:
    assert drafts_of(FixedProposer([[1, 2], [], [3, 4, 5, 6]]), 4) == [(1, 2), (), (3, 4, 5), ()]
    assert drafts_of(FixedProposer({PROMPT: [[7]]}), 2) == [(7,), ()]
    assert drafts_of(FixedProposer({(1,): [[7]]}), 1) == [()]


def test_an_oracle_is_always_accepted_and_an_adversary_never() -> None:
    target = MarkovTarget()
    text = target.continuation(PROMPT, 40)
    right = drafts_of(OracleProposer({PROMPT: text}, vocab_size=16), 5)
    assert right == [tuple(text[1 + 4 * step : 4 + 4 * step]) for step in range(5)]
    wrong = drafts_of(AdversarialProposer({PROMPT: text}, vocab_size=16), 5)
    assert all(draft[0] != text[1 + step] for step, draft in enumerate(wrong))
    partly = drafts_of(OracleProposer({PROMPT: text}, vocab_size=16, num_right={PROMPT: 1}), 1)[0]
    assert partly == (text[1], (text[2] + 1) % 16, (text[3] + 1) % 16)


def test_random_drafts_depend_on_seed_and_context_alone() -> None:
    first, again, other = (drafts_of(RandomProposer(16, seed=seed), 6) for seed in (0, 0, 1))
    assert first == again != other
    assert len({len(draft) for draft in first}) > 1


def test_a_sampling_proposer_draws_from_the_law_it_reports() -> None:
    probs = [0.2, 0.5, 0.3, 0.0]
    rig = Rig(make_target=lambda: ScriptedTarget([1], vocab_size=4), num_speculative_tokens=3)
    driver = HookDriver(lambda context: SamplingProposer(probs, seed=1), rig)
    for number in range(60):
        driver.start(f"r{number}", [1, 2], seed=number)
    driver.prefill()
    seen: collections.Counter[int] = collections.Counter()
    for _ in range(10):
        step = driver.step()
        assert step.draft is not None
        (span,) = step.draft.laws
        assert isinstance(span.law, Dense)
        assert span.law.draft_logits.softmax(-1)[0].tolist() == pytest.approx(probs)
        seen.update(step.draft.draft_token_ids.tolist())
    total = sum(seen.values())
    assert total == 1800
    assert [seen[i] / total for i in range(4)] == pytest.approx(probs, abs=0.06)  # 5 standard deviations


def test_as_method_makes_an_object_a_method_of_the_host(process_manager: ProcessManager) -> None:
    target = ScriptedTarget([1, 2, 3, 4, 9])
    process_manager.register(as_method("oracle", lambda context: FixedProposer([[2, 3, 4]])))
    config = {"method": "oracle", "num_speculative_tokens": 3}
    with LLM(target, speculative_config=config, manager=process_manager, strict=True) as llm:
        (output,) = llm.generate({"prompt_token_ids": [5]}, SamplingParams(temperature=0.0, max_tokens=9))
    assert output.outputs[0].token_ids == [1, 2, 3, 4, 9]
