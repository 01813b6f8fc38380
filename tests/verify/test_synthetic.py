"""Acceptance rates of the synthetic rule."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from specplug.config.synthetic import rates_of_length
from specplug.errors import ConfigError
from specplug.types import Draft, LawSpan, OneHot
from specplug.verify import BuiltinVerifier
from specplug.verify.inputs import RowInputs, VerifyInputs
from specplug.verify.synthetic import conditional_rates
from specplug.verify.torch_rules import TorchRules


@pytest.mark.parametrize(
    ("rates", "conditional"),
    [
        ((0.9, 0.5, 0.2), (0.9, 0.5 / 0.9, 0.4)),
        ((1.0, 0.6, 0.0, 0.0), (1.0, 0.6, 0.0, 0.0)),
        ((0.8, 0.6, 0.3), (0.8, 0.75, 0.5)),
    ],
)
def test_rates_become_conditional(rates: Sequence[float], conditional: Sequence[float]) -> None:
    assert conditional_rates(rates) == pytest.approx(conditional)


@pytest.mark.parametrize(("rates", "mean"), [((0.5, 0.0, 0.0), 1.5), ((0.0, 0.0, 0.0), 1.0)])
def test_B52_a_rate_of_zero_divides_nothing(rates: tuple[float, ...], mean: float) -> None:
    assert conditional_rates(rates) == rates
    lengths = emitted(rates, is_greedy=False, num=4000)
    assert abs(lengths.float().mean().item() - mean) < 0.04


def emitted(rates: Sequence[float], *, is_greedy: bool, num: int = 20_000) -> torch.Tensor:
    """Tokens emitted per step, 3 drafts, target law (.5, .3, .2)."""
    rows = tuple(RowInputs("synthetic", seed=n, position=4, step=1, is_greedy=is_greedy) for n in range(num))
    inputs = VerifyInputs(
        torch.tensor([[0.5, 0.3, 0.2]]).log().expand(num * 4, 3),
        torch.full((num * 3,), 2),
        (3,) * num,
        (LawSpan(0, num * 3, OneHot()),),
        rows,
        conditional_rates(rates),
    )
    return TorchRules().verify(inputs).num_accepted_tokens + 1


@pytest.mark.parametrize("is_greedy", [True, False])
def test_B51_unconditional_rates_and_mean_length(is_greedy: bool) -> None:
    lengths = emitted((0.8, 0.6, 0.3), is_greedy=is_greedy)
    assert abs(lengths.float().mean().item() - 2.70) < 0.04
    for slot, rate in enumerate((0.8, 0.6, 0.3)):
        assert abs((lengths > slot + 1).float().mean().item() - rate) < 6 * 0.5 / 20_000**0.5


def test_B51_a_length_becomes_rates() -> None:
    assert rates_of_length(2.7, 3) == pytest.approx((1.0, 0.7, 0.0))


@pytest.mark.parametrize(("rate", "num_accepted"), [(1.0, 3), (0.0, 0)])
def test_all_or_none(rate: float, num_accepted: int) -> None:
    assert set((emitted((rate,) * 3, is_greedy=False, num=50) - 1).tolist()) == {num_accepted}


def test_a_placeholder_is_never_accepted(make_batch: object) -> None:
    verifier = BuiltinVerifier(vocab_size=3, rule="synthetic", synthetic_rates=(1.0, 1.0))
    batch = make_batch([{"temperature": 0.0}])  # type: ignore[operator]
    draft = Draft.from_lists([[-1, 1]])
    found = verifier.specplug_verify(batch=batch, draft=draft, target_logits=torch.tensor([[0.0, 1.0, 0.0]] * 3))
    assert found.output_token_ids.tolist() == [[1, -1, -1]]


def test_rates_are_needed() -> None:
    with pytest.raises(ConfigError, match="synthetic_acceptance_rates"):
        BuiltinVerifier(vocab_size=3, rule="synthetic")
