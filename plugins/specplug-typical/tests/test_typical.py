"""What typical acceptance keeps, that it is opt-in and labelled, and that what it leaves is the plain draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from specplug_typical.verifier import TypicalVerifier, is_typical

from specplug import LLM, Batch, ConfigError, Draft, Request, SamplingParams, TokenIds
from specplug.hooks import ProcessManager
from specplug.metrics.render import stats_lines
from specplug.testing import FixedProposer, TableTarget, as_method

PROBS = [0.5, 0.3, 0.15, 0.05]


def generate(params: SamplingParams, *, allow_lossy: bool = True, rule: str | None = "typical", **keys: Any) -> Any:
    config: dict[str, Any] = {"method": "fixed", "num_speculative_tokens": 3, **keys}
    if rule:
        config["rejection_sample_method"] = rule
    manager = ProcessManager()
    manager.register(as_method("fixed", lambda context: FixedProposer([[1, 1, 3]] * 256)), name="fixed")
    with LLM(
        TableTarget(PROBS), speculative_config=config, allow_lossy=allow_lossy, manager=manager, strict=True
    ) as llm:
        (output,) = llm.generate([[0]], params)
        return output.outputs[0], llm.acceptance.aggregate() if llm.acceptance else None


def reference(probs: Sequence[float], token_id: int, threshold: float, alpha: float) -> bool:
    entropy = -sum(p * math.log(p) for p in probs if p > 0)
    return probs[token_id] > min(threshold, alpha * math.exp(-entropy))


@pytest.mark.parametrize("threshold", [0.0, 0.09, 0.3, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 2.0])
def test_tokens_stand_by_the_papers_formula(threshold: float, alpha: float) -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(3 * torch.randn(50, 8, generator=generator), -1)
    probs[:10, 5:] = 0  # filtered out
    probs /= probs.sum(-1, keepdim=True)
    token_ids = torch.arange(50) % 8
    found = is_typical(probs.log(), token_ids, threshold=threshold, alpha=alpha)
    expected = [reference(row, int(token_ids[number]), threshold, alpha) for number, row in enumerate(probs.tolist())]
    assert found.tolist() == expected
    assert len(set(expected)) == 2 or (threshold, alpha) != (0.09, 0.3)


def make_batch(params: Sequence[SamplingParams]) -> Batch:
    import numpy as np

    ids = TokenIds(np.array([0], dtype=np.int32))
    requests = tuple(Request(str(number), ids, each, seed=number) for number, each in enumerate(params))
    texts = tuple(TokenIds(np.array([0, 0], dtype=np.int32)) for _ in requests)
    ones = (1,) * len(requests)
    return Batch(requests, texts, num_computed_tokens=ones, remaining=(50,) * len(requests), num_verify_steps=ones)


RANDOM, GREEDY = SamplingParams(temperature=1.0), SamplingParams(temperature=0.0)
LOGITS = torch.tensor(PROBS).log()


def verify(draft: Draft, logits: torch.Tensor, params: Sequence[SamplingParams]) -> Any:
    verifier = TypicalVerifier(vocab_size=4, threshold=0.09, alpha=0.3)
    before = logits.clone()
    answer = verifier.specplug_verify(make_batch(params), draft, logits)
    torch.testing.assert_close(logits, before, equal_nan=True, rtol=0, atol=0)  # arguments are read-only
    return answer


def test_plausible_tokens_stand_whatever_was_drawn() -> None:
    """exp(-H) is 0.32 here, so the bar is 0.09: tokens 0, 1 and 2 stand, 3 does not."""
    draft = Draft.from_lists([[1, 2, 0, 3, 0], [1, 2, 1, 2, 1]])
    answer = verify(draft, LOGITS.repeat(12, 1), [RANDOM, RANDOM])
    assert answer.num_accepted_tokens.tolist()[1] == 5
    assert answer.output_token_ids[1, :5].tolist() == [1, 2, 1, 2, 1]
    assert answer.output_token_ids[0, :3].tolist() == [1, 2, 0]
    assert answer.num_accepted_tokens.tolist()[0] in (3, 5)  # 5 where the target happens to draw the 3


def test_greedy_requests_lose_nothing() -> None:
    draft = Draft.from_lists([[1, 1], [0, 1]])
    answer = verify(draft, LOGITS.repeat(6, 1), [GREEDY, SamplingParams(temperature=1.0, top_k=1)])
    assert answer.num_accepted_tokens.tolist() == [0, 1]
    assert answer.output_token_ids[0, 0] == 0


def test_filtered_tokens_do_not_stand() -> None:
    """Token 2 is out of the nucleus, so its probability is 0 whatever its logit says."""
    draft = Draft.from_lists([[2]])
    answer = verify(draft, LOGITS.repeat(2, 1), [SamplingParams(temperature=1.0, top_p=0.6)])
    assert answer.num_accepted_tokens.tolist() == [0]


def test_unusable_logits_and_placeholders_are_left_to_the_built_in_rule() -> None:
    logits = LOGITS.repeat(4, 1)
    logits[0] = torch.nan
    draft = Draft.from_lists([[1], [-1]])
    answer = verify(draft, logits, [RANDOM, RANDOM])
    assert answer.is_invalid.tolist() == [True, False]
    assert answer.num_accepted_tokens.tolist()[1] == 0


def test_of_a_tree_the_longest_plausible_path_stands() -> None:
    """Root: 3 (no), 1 (yes, a leaf), 2 (yes) with the child 0 (yes), whose child 3 does not stand."""
    draft = Draft.from_trees([[3, 1, 2, 0, 3]], [[-1, -1, -1, 2, 3]])
    for seed in range(8):
        answer = verify(draft, LOGITS.repeat(6, 1), [SamplingParams(temperature=1.0, seed=seed)])
        assert answer.output_token_ids[0, :2].tolist() == [2, 0]
        assert answer.accepted_draft_indices[0, :2].tolist() == [2, 3]


def test_a_chain_given_as_a_tree_is_the_chain() -> None:
    chain = Draft.from_lists([[1, 2, 3, 0], [1, 1]])
    tree = Draft.from_trees([[1, 2, 3, 0], [1, 1]], [[-1, 0, 1, 2], [-1, 0]])
    answers = [verify(draft, LOGITS.repeat(8, 1), [RANDOM, RANDOM]) for draft in (chain, tree)]
    assert torch.equal(answers[0].output_token_ids, answers[1].output_token_ids)


def test_it_is_an_opt_in() -> None:
    with pytest.raises(ConfigError, match=r'plugin "typical" is lossy.*allow_lossy=True'):
        generate(RANDOM, allow_lossy=False)


def test_metrics_name_the_rule() -> None:
    output, totals = generate(SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True))
    assert set(totals.verify_method_effective) == {"typical"}
    assert output.spec_decode_metrics.num_accepted_tokens > 0
    assert any(line.startswith("rule         typical") for line in stats_lines(totals, 1.0))
    _, totals = generate(SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True), rule="match")
    assert not any(line.startswith("rule") for line in stats_lines(totals, 1.0))


def counts(rule: str | None) -> list[int]:
    output, _ = generate(SamplingParams(temperature=1.0, seed=5, max_tokens=3000, ignore_eos=True), rule=rule)
    return [list(output.token_ids).count(token_id) for token_id in range(4)]


def chi_square(found: Sequence[int]) -> float:
    total = sum(found)
    return sum((count - total * p) ** 2 / (total * p) for count, p in zip(found, PROBS, strict=True))


def test_the_text_is_no_longer_the_targets_and_match_is_the_control() -> None:
    """Token 1 is drafted twice a step and always kept, so it is far too frequent: lossy, as labelled."""
    assert chi_square(counts("typical")) > 300
    assert chi_square(counts("match")) < 45  # 3 degrees of freedom: passed over once in 1e9 runs


def test_a_bar_that_nothing_passes_is_match() -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
    strict, _ = generate(params, typical_threshold=1.0, typical_alpha=1e9)
    plain, _ = generate(params, rule="match")
    assert list(strict.token_ids) == list(plain.token_ids)


@pytest.mark.parametrize("key", ["typical_threshold", "typical_alpha"])
def test_settings_are_in_range(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        generate(RANDOM, **{key: -0.1})
