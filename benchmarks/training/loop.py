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
    """Until the budget is used up, or until it is interrupted: what was learnt by then is kept.

    ``next_loss`` gets the fraction done and returns a loss and its tokens.
    """
    weights = list(parameters)
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    start, progress = budget.fraction, _Progress()
    try:
        while (done := (budget.fraction - start) / max(1e-9, 1 - start)) < 1 or not progress.num_steps:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * _rate(done)
            loss, num_tokens = next_loss(done)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            progress.add(done, loss.item(), num_tokens)
    except KeyboardInterrupt:
        print("  interrupted: what was learnt is kept", flush=True)
    return progress.report()


class _Progress:
    """What was done so far; prints a line now and then."""

    def __init__(self) -> None:
        self.num_steps = self.num_tokens = self._num_lines = 0
        self._loss = math.nan

    def add(self, done: float, loss: float, num_tokens: int) -> None:
        """A step was made; the loss that is shown is a running mean."""
        self.num_steps += 1
        self.num_tokens += num_tokens
        self._loss = loss if math.isnan(self._loss) else 0.95 * self._loss + 0.05 * loss
        if done * LINES >= self._num_lines:
            self._num_lines += 1
            print(f"  {done:4.0%}: step {self.num_steps}, {self.num_tokens} tokens, loss {self._loss:.3f}", flush=True)

    def report(self) -> dict[str, Any]:
        return {"steps": self.num_steps, "tokens_trained_on": self.num_tokens, "last_loss": round(self._loss, 4)}


def _rate(done: float) -> float:
    warm = min(1.0, done / WARM_UP + 0.01)
    return warm * (LAST_RATE + (1 - LAST_RATE) * math.cos(math.pi / 2 * min(1.0, done)) ** 2)
