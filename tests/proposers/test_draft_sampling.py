"""How draft tokens are chosen: filters, draws, noise, laws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from specplug.draft_space import IdentityDraftSpace
from specplug.proposers.draft_sampling import DraftRow, DraftSampler, cut_by_sorting, process_logits, race
from specplug.sampling_params import SamplingParams
from specplug.types import Dense, OneHot
from specplug.verify import noise, reference
from specplug.verify.inputs import RowInputs
from specplug.verify.noise import Purpose

CPU = torch.device("cpu")


def logits_of(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return 3.0 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def row(num_slots: int, seed: int = 1, step: int = 0, position: int = 7, **params: Any) -> DraftRow:
    return DraftRow(SamplingParams(**params), seed, step, position, num_slots)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.05},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
def test_the_law_is_that_of_verification(params: dict[str, Any]) -> None:
    """The same request parameters, the same law: what makes a good draft be accepted."""
    logits = logits_of(3, 200)
    sampling = SamplingParams(**params)
    found = torch.softmax(process_logits(logits, [sampling] * 3).double(), -1).numpy()
    inputs = RowInputs(
        "standard",
        temperature=sampling.temperature,
        top_k=max(sampling.top_k, 0),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
    for number in range(3):
        wanted = reference.target_law(logits[number].double().numpy(), inputs)
        np.testing.assert_allclose(found[number], wanted, atol=1e-6)
        assert ((found[number] > 0) == (wanted > 0)).all()


def test_rows_with_different_filters_do_not_mix() -> None:
    logits = logits_of(4, 300)
    params = [
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.2, temperature=2.0),
    ]
    together = process_logits(logits, params)
    for number, each in enumerate(params):
        torch.testing.assert_close(together[number], process_logits(logits[number : number + 1], [each])[0])
    assert torch.equal(logits, logits_of(4, 300))  # the draft's own logits are left alone


def test_sorting_on_a_device_cuts_the_same() -> None:
    """The path of accelerators, here on the CPU; ties as in half precision."""
    for seed, dtype in ((0, torch.float32), (1, torch.bfloat16)):
        logits = logits_of(5, 400, seed).to(dtype).float()
        params = [
            SamplingParams(top_k=7),
            SamplingParams(temperature=0.5, top_p=0.9),
            SamplingParams(min_p=0.1),
            SamplingParams(temperature=1.5, top_k=50, top_p=0.8, min_p=0.01),
            SamplingParams(),
        ]
        temperatures = torch.tensor([[each.temperature] for each in params])
        assert torch.equal(cut_by_sorting(logits / temperatures, params), process_logits(logits, params))


@pytest.mark.parametrize("vocab_size", [5, 1024, 2500])
def test_a_draw_follows_its_law(vocab_size: int) -> None:
    """Chi-square of 40 000 draws with the noise of as many positions; a law that is not the drawn one fails."""
    num_draws, num_cells = 40_000, 5
    logits = torch.full((vocab_size,), -math.inf)
    ids = torch.linspace(0, vocab_size - 1, num_cells).long()
    logits[ids] = torch.tensor([1.0, 0.0, 0.5, -1.0, 2.0])
    counts = torch.zeros(vocab_size)
    for start in range(0, num_draws, 4000):
        sampler = DraftSampler([row(4000, position=start)], is_probabilistic=True, device=CPU)
        chosen = sampler.choose(logits.expand(4000, -1), range(4000))
        counts += torch.bincount(chosen, minlength=vocab_size)
    assert counts.sum() == counts[ids].sum() == num_draws

    def chi_squared(probs: torch.Tensor) -> float:
        expected = num_draws * probs
        return float(((counts[ids] - expected) ** 2 / expected).sum())

    limit = 47.0  # 4 degrees of freedom: a chance below 1e-9
    assert chi_squared(torch.softmax(logits[ids], -1)) < limit
    assert chi_squared(torch.softmax(logits[ids] / 1.1, -1)) > limit


def test_the_race_agrees_with_the_specification() -> None:
    """The tile race of ``specplug.verify.reference``, batched."""
    probs = torch.softmax(logits_of(20, 3000), -1)
    words = noise.philox(np.arange(20, dtype=np.uint64)[:, None], 5, 0, 3, noise.draw_blocks(3000))
    uniforms = noise.uniforms(words[:, 0])
    tickets = noise.exponentials(words[:, 1:].reshape(20, -1)[:, : noise.num_tiles(3000)])
    found = race(probs, torch.from_numpy(uniforms), torch.from_numpy(tickets)).tolist()
    wanted = [
        reference.draw(probs[number].double().numpy(), float(uniforms[number]), tickets[number].tolist())
        for number in range(20)
    ]
    assert found == wanted
    assert len(set(found)) > 5


def test_draws_depend_on_request_step_and_position_only() -> None:
    logits = logits_of(1, 500).expand(6, -1)

    def draw(rows: list[DraftRow]) -> list[list[int]]:
        sampler = DraftSampler(rows, is_probabilistic=True, device=CPU)
        total = sum(each.num_slots for each in rows)
        chosen = sampler.choose(logits[:1].expand(total, -1), range(total)).tolist()
        return [[chosen.pop(0) for _ in range(each.num_slots)] for each in rows]

    one, two = row(3, seed=5), row(3, seed=6, position=2)
    assert draw([one, two]) == [draw([one])[0], draw([two])[0]]
    assert draw([two, row(1, temperature=0.0), one])[2] == draw([one])[0]
    assert draw([row(2, seed=5, position=8)])[0] == draw([one])[0][1:]  # the position, not the place in the draft
    assert draw([one]) != draw([row(3, seed=5, step=1)])
    assert draw([one]) != draw([row(3, seed=9)])


def test_noise_is_not_that_of_verification() -> None:
    purposes = {purpose.value for purpose in Purpose} - {Purpose.DRAFT.value}
    key = {"seed": 3, "step": 0, "position": 7, "index": 0}
    own = noise.philox(purpose=Purpose.DRAFT.value, **key).tolist()
    assert all(noise.philox(purpose=purpose, **key).tolist() != own for purpose in purposes)


def test_slots_may_come_in_any_order_and_laws_are_what_was_drawn_from() -> None:
    rows = [row(2, temperature=0.7, top_k=5), row(1, temperature=0.0), row(0), row(3, seed=2), row(1, temperature=0.0)]
    logits = logits_of(7, 50)
    ordered = DraftSampler(rows, is_probabilistic=True, device=CPU)
    ordered.choose(logits, range(7))
    mixed = DraftSampler(rows, is_probabilistic=True, device=CPU)
    for slots in ([3, 0], [6, 5, 2], [1], [4]):
        mixed.choose(logits[slots], slots)
    assert torch.equal(mixed.token_ids, ordered.token_ids)
    assert torch.equal(mixed.confidence, ordered.confidence)
    spans = mixed.laws(IdentityDraftSpace(50))
    assert [(span.start, span.stop, type(span.law)) for span in spans] == [
        (0, 2, Dense),
        (2, 3, OneHot),
        (3, 6, Dense),
        (6, 7, OneHot),
    ]
    for span in spans:
        if isinstance(span.law, Dense):
            params = [rows[0].params] * 2 if span.start == 0 else [rows[3].params] * 3
            assert torch.equal(span.law.draft_logits, process_logits(logits[span.start : span.stop], params))
            drawn = span.law.draft_logits.gather(1, mixed.token_ids[span.start : span.stop, None])
            assert torch.isfinite(drawn).all()


def test_greedy_takes_the_first_maximum_and_needs_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "philox", None)
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 0.0]])
    for rows, how in (([row(2)], False), ([row(2, temperature=0.0)], True), ([row(2, top_k=1)], True)):
        sampler = DraftSampler(rows, is_probabilistic=how, device=CPU)
        assert sampler.choose(logits, [0, 1]).tolist() == [1, 0]
        assert [type(span.law) for span in sampler.laws(IdentityDraftSpace(3))] == [OneHot]


def test_half_precision_logits_are_drawn_from_in_float32() -> None:
    """Row B133: one float32 law for the draw and for the ratio."""
    sampler = DraftSampler([row(2)], is_probabilistic=True, device=CPU)
    logits = logits_of(2, 30).bfloat16()
    sampler.choose(logits, [0, 1])
    (span,) = sampler.laws(IdentityDraftSpace(30))
    assert isinstance(span.law, Dense)
    assert torch.equal(span.law.draft_logits, logits.float())
