"""Laws of sampled output, where a case names numbers. Fixed seeds; thresholds that any seed would pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specplug.types import Verification
from specplug.verify import noise
from specplug.verify.inputs import Rule
from specplug.verify.noise import Purpose

Sample = Callable[..., Verification]
NUM = 6000
P, Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]


def draw_drafts(num: int, probs: Sequence[Sequence[float]], seed: int = 0) -> torch.Tensor:
    """``[num, K]`` independent draws."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.multinomial(torch.tensor(p), num, True, generator=generator) for p in probs], 1)


def chi_squared(ids: torch.Tensor, probs: Sequence[float]) -> float:
    """Distance in units of its own spread: below 10 for every seed when ``ids`` follow ``probs``."""
    expected = np.array(probs) * len(ids)
    counts = np.bincount(ids.numpy(), minlength=len(probs))
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    freedom = max(1, int(kept.sum()) - 1)
    statistic = float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    return (statistic - freedom) / (2 * freedom) ** 0.5


def mean_accepted(found: Verification) -> float:
    return found.num_accepted_tokens.float().mean().item()


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_B34_output_follows_the_target_and_acceptance_is_seventy_percent(sample: Sample, rule: Rule) -> None:
    found = sample(NUM, rule, [P, P], draw_drafts(NUM, [Q]), [Q])
    assert chi_squared(found.output_token_ids[:, 0], P) < 10
    assert abs(mean_accepted(found) - 0.70) < 0.03


def test_B38_a_dropped_law_is_lossless_but_accepts_less(sample: Sample) -> None:
    found = sample(NUM, "match", [P, P], draw_drafts(NUM, [Q]), [Q])
    assert chi_squared(found.output_token_ids[:, 0], P) < 10
    assert abs(mean_accepted(found) - 0.31) < 0.03


def test_B33_the_residual_is_normalised_not_softmaxed(sample: Sample) -> None:
    found = sample(500, "standard", [[0.6, 0.3, 0.1]] * 2, torch.full((500, 1), 2), [[0.1, 0.3, 0.6]])
    rejected = found.num_accepted_tokens == 0
    assert rejected.sum() > 300
    assert set(found.output_token_ids[rejected, 0].tolist()) == {0}


def test_B35_top_p_holds_at_drafted_positions(sample: Sample) -> None:
    for rule in ("match", "standard", "block"):
        found = sample(NUM, rule, [P, P], draw_drafts(NUM, [Q]), [Q], top_p=0.7)
        assert chi_squared(found.output_token_ids[:, 0], [0.625, 0.375, 0.0]) < 10


def test_B36_the_law_must_be_the_one_drawn_from(sample: Sample) -> None:
    drafts = torch.zeros((NUM, 1), dtype=torch.int64)  # the proposer filtered to its best token
    honest = sample(NUM, "standard", [P, P], drafts)
    assert chi_squared(honest.output_token_ids[:, 0], P) < 10
    wrong = sample(NUM, "standard", [P, P], drafts, [[0.4, 0.4, 0.2]])
    assert set(wrong.output_token_ids[:, 0].tolist()) == {0}
    assert chi_squared(wrong.output_token_ids[:, 0], P) > 100  # the negative control


@pytest.mark.parametrize(("num_drafts", "expected"), [(2, 0.875), (3, 1.125)])
def test_B49_block_accepts_more_than_the_token_rule(sample: Sample, num_drafts: int, expected: float) -> None:
    target, draft = [[0.25, 0.75]] * (num_drafts + 1), [[0.75, 0.25]] * num_drafts
    drafts = draw_drafts(NUM, draft)
    found = sample(NUM, "block", target, drafts, draft)
    assert abs(mean_accepted(found) - expected) < 0.06
    assert chi_squared(found.output_token_ids[:, 0], [0.25, 0.75]) < 10
    token_rule = sample(NUM, "standard", target, drafts, draft)
    assert abs(mean_accepted(token_rule) - {2: 0.75, 3: 0.875}[num_drafts]) < 0.06


def test_B50_certain_drafts_are_accepted_equally_often_by_both_rules(sample: Sample) -> None:
    drafts = draw_drafts(NUM, [P] * 3)
    block, token = (sample(NUM, rule, [P] * 4, drafts) for rule in ("block", "standard"))
    counts = [torch.bincount(found.num_accepted_tokens, minlength=4).float() / NUM for found in (block, token)]
    assert (counts[0] - counts[1]).abs().max() < 0.03
    assert chi_squared(block.output_token_ids[:, 0], P) < 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_B133_one_distribution_for_draw_ratio_and_residual(sample: Sample, dtype: torch.dtype) -> None:
    target, draft = [0.4, 0.402, 0.198], [0.401, 0.4, 0.199]
    rounded_draft = torch.tensor(draft).log().to(dtype).float().softmax(0).tolist()
    rounded_target = torch.tensor(target).log().to(dtype).float().softmax(0).tolist()
    drafts = draw_drafts(NUM, [rounded_draft])
    found = sample(NUM, "standard", [target, target], drafts, [draft], dtype=dtype)
    assert chi_squared(found.output_token_ids[:, 0], rounded_target) < 10
    assert mean_accepted(found) > 0.97


@pytest.mark.parametrize("rule", ["match", "standard", "block", "coupled"])
def test_two_drafts_over_ten_tokens_leave_the_law_alone(sample: Sample, rule: Rule) -> None:
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(3, 10, generator=generator).softmax(1).tolist()
    draft = torch.randn(2, 10, generator=generator).softmax(1).tolist()
    found = sample(NUM, rule, target, draw_drafts(NUM, draft), draft)
    assert chi_squared(found.output_token_ids[:, 0], target[0]) < 10
    for slot in (1, 2):
        reached = found.num_accepted_tokens >= slot
        assert chi_squared(found.output_token_ids[reached, slot], target[slot]) < 10


def own_stream_drafts(probs: Sequence[float], purpose: Purpose) -> torch.Tensor:
    """Draws by inverse distribution from the verifier's own noise, keyed as ``sample`` keys its rows."""
    words = noise.philox(np.arange(NUM), purpose, 2, 5, 0)
    return torch.from_numpy(np.searchsorted(np.cumsum(probs), noise.uniforms(words))).clamp(max=len(probs) - 1)[:, None]


def test_draft_noise_and_recovery_noise_are_separate(sample: Sample) -> None:
    logits = torch.randn(16, generator=torch.Generator().manual_seed(5))
    target, draft = logits.softmax(0).tolist(), (-logits).softmax(0).tolist()
    separate = sample(NUM, "standard", [target] * 2, own_stream_drafts(draft, Purpose.DRAFT), [draft])
    assert chi_squared(separate.output_token_ids[:, 0], target) < 10
    shared = sample(NUM, "standard", [target] * 2, own_stream_drafts(draft, Purpose.RECOVER), [draft])
    assert chi_squared(shared.output_token_ids[:, 0], target) > 20  # the negative control


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_k": 5}, {"top_k": 99}, {"top_p": 0.5}, {"top_p": 0.99}])
@pytest.mark.parametrize("rule", ["match", "standard", "coupled"])
def test_filtered_tokens_never_appear(sample: Sample, rule: Rule, settings: dict[str, Any]) -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(2)) * 2
    probs = logits.softmax(0)
    order = probs.argsort(descending=True)
    num_kept = settings.get("top_k") or int((probs[order].cumsum(0) - probs[order] < settings["top_p"]).sum())
    allowed = set(order[:num_kept].tolist())
    drafts = torch.randint(0, 100, (300, 2), generator=torch.Generator().manual_seed(1))
    found = sample(300, rule, [probs.tolist()] * 3, drafts, [[0.01] * 100] * 2, **settings)
    assert set(found.output_token_ids.flatten().tolist()) - {-1} <= allowed


@pytest.mark.parametrize("shift", [0.5])
def test_block_accepts_at_least_as_much(sample: Sample, shift: float) -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(6, 40, generator=generator)
    draft = (logits[:5] + shift * torch.randn(5, 40, generator=generator)).softmax(1).tolist()
    drafts = draw_drafts(3000, draft)
    target = logits.softmax(1).tolist()
    block, token = (mean_accepted(sample(3000, rule, target, drafts, draft)) for rule in ("block", "standard"))
    assert block > token - 0.05


def test_equal_laws_leave_no_residual_and_accept_everything(sample: Sample) -> None:
    for rule in ("standard", "block"):
        found = sample(200, rule, [P] * 3, draw_drafts(200, [P] * 2), [P] * 2)
        assert found.num_accepted_tokens.tolist() == [2] * 200
        assert not found.is_invalid.any()  # type: ignore[union-attr]
