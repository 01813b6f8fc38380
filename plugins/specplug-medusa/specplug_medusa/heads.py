"""The network: per head residual blocks ``x + silu(linear(x))``, then an output head.

Source: "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024), and the released
heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch.nn.functional import silu

from specplug_medusa.checkpoint import HeadsConfig

__all__ = ["MedusaHeads"]


class MedusaHeads(torch.nn.Module):
    """The first ``num_heads`` heads. Their first blocks read the same states, so they are one projection.

    ``num_outputs``: output heads of its own: one each, one for all, or none. ``target_output``: then the target's,
    ``[n, hidden]`` to raw logits.
    """

    def __init__(self, config: HeadsConfig, num_heads: int, num_outputs: int) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.has_bias
        linear = torch.nn.Linear
        self.num_heads = num_heads
        self.first = linear(size, num_heads * size, bias=bias)
        self.later = torch.nn.ModuleList(
            torch.nn.ModuleList(linear(size, size, bias=bias) for _ in range(num_heads))
            for _ in range(config.num_layers - 1)
        )
        self.outputs = torch.nn.ModuleList(
            linear(size, config.draft_vocab_size, bias=False) for _ in range(num_outputs)
        )
        self.target_output: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._scale = config.logit_scale

    @property
    def shares_output(self) -> bool:
        """Whether all heads have the same output head."""
        return len(self.outputs) < 2

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """The target's normalised states ``[n, hidden]`` to what the output heads read, ``[n, heads, hidden]``."""
        features = states[:, None] + silu(self.first(states)).view(len(states), self.num_heads, -1)
        for layer in self.later:
            blocks = cast(torch.nn.ModuleList, layer)
            projected = [block(features[:, head]) for head, block in enumerate(blocks)]
            features = features + silu(torch.stack(projected, dim=1))
        return features

    def logits(self, features: torch.Tensor, head: int) -> torch.Tensor:
        """Raw logits ``[n, draft_vocab]`` of one head's features ``[n, hidden]``; of any head's where all share."""
        output = self.target_output or self.outputs[0 if self.shares_output else head]
        logits: torch.Tensor = output(features)
        return logits if self._scale == 1.0 else logits * self._scale
