"""The training loop that all models share: AdamW, a cosine schedule over the budget, a line now and then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from training.budget import Budget

__all__ = ["minimise"]

WARM_UP = 0.03
LAST_RATE = 0.02
"""Fractions: of the budget, and of the learning rate."""
LINES = 20


def minimise(
    parameters: Iterable[torch.nn.Parameter],
    next_loss: Callable[[float], tuple[torch.Tensor, int]],
    budget: Budget,
    *,
    learning_rate: float,
) -> dict[str, Any]:
    """Until the budget is used up. ``next_loss`` gets the fraction done and returns a loss and its tokens."""
    weights = list(parameters)
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    start = budget.fraction
    num_steps = num_tokens = num_lines = 0
    smooth = math.nan
    while (done := (budget.fraction - start) / max(1e-9, 1 - start)) < 1 or not num_steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * _rate(done)
        loss, size = next_loss(done)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        num_steps, num_tokens = num_steps + 1, num_tokens + size
        smooth = loss.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss.item()
        if done * LINES >= num_lines:
            num_lines += 1
            print(f"  {done:4.0%}: step {num_steps}, {num_tokens} tokens, loss {smooth:.3f}", flush=True)
    return {"steps": num_steps, "tokens_trained_on": num_tokens, "last_loss": round(smooth, 4)}


def _rate(done: float) -> float:
    warm = min(1.0, done / WARM_UP + 0.01)
    return warm * (LAST_RATE + (1 - LAST_RATE) * math.cos(math.pi / 2 * min(1.0, done)) ** 2)
