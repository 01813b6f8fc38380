from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specplug.demo.identity import Deviation, ForcedText, compare_outputs, teacher_force
from specplug.testing import tiny_llama

PROMPT = [1, 2, 3, 4]


def greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_the_targets_own_text_has_no_deviation() -> None:
    model = tiny_llama()
    checked: list[int] = []
    output = greedy(model, PROMPT, 12)
    found = teacher_force(model, [ForcedText("a", PROMPT, output), ForcedText("empty", PROMPT, [])], checked.append)
    assert (found.num_positions, found.deviations, checked) == (12, (), [12])


def test_a_wrong_token_is_reported_with_its_gap() -> None:
    model = tiny_llama()
    output = greedy(model, PROMPT, 6)
    logits = model(torch.tensor([PROMPT + output[:3]])).logits[0, -1].detach()
    second = int(logits.topk(2).indices[1])
    found = teacher_force(model, [ForcedText("chat 1", PROMPT, [*output[:3], second])])
    (one,) = found.deviations
    assert (one.label, one.position, one.emitted_id, one.best_id) == ("chat 1", 3, second, output[3])
    assert one.gap == pytest.approx(float(logits[output[3]] - logits[second]), abs=1e-5)


def test_a_tie_is_no_deviation() -> None:
    def model(input_ids: torch.Tensor, logits_to_keep: int, use_cache: bool) -> Any:
        return SimpleNamespace(logits=torch.tensor([[[1.0, 5.0, 5.0]]]))

    model.device = "cpu"  # type: ignore[attr-defined]
    assert teacher_force(model, [ForcedText("a", [0], [2])]).deviations == ()
    assert len(teacher_force(model, [ForcedText("a", [0], [0])]).deviations) == 1


@pytest.mark.parametrize(
    ("logit", "gap", "ulps"), [(16.0, 0.125, 1.0), (31.9, 0.25, 2.0), (-3.0, 0.0625, 4.0), (1.0, 2**-7, 1.0)]
)
def test_gaps_in_units_of_bfloat16s_last_place(logit: float, gap: float, ulps: float) -> None:
    assert Deviation("a", 0, 1, 2, gap, logit).ulps == ulps
    stored = torch.tensor(abs(logit)).bfloat16()
    neighbour = torch.nextafter(stored, torch.tensor(float("inf")).bfloat16())
    assert float(neighbour - stored) == gap / ulps


def test_outputs_are_compared_token_for_token() -> None:
    assert compare_outputs("edit", [[1, 2], [3]], [[1, 2], [3]]).num_equal == 2
    found = compare_outputs("edit", [[1, 2], [3, 4]], [[1, 2], [3, 5]])
    assert (found.num_equal, found.num_compared, found.first_difference) == (1, 2, 1)
    assert compare_outputs("edit", [[1, 2, 3]], [[1, 2]]).first_difference == 2
