"""The network: a recurrent MLP that starts from the target's last state and reads one token a stage.

With ``sw = 0.5 ** (0.5 / n_predict)`` and ``ew = sqrt((1 - sw**2) * inner / 2)``, stage i computes
``s = gelu(ln_i(proj_i(s) + (ew / sw) * emb_i(token)))`` and drafts from ``head_i(s)``; ``ln(x) = x / rms(x) * w + b``.
Source: "Accelerating Production LLMs with Combined Token/Embedding Speculators" (2024), and the released models.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch.nn.functional import gelu, rms_norm

from specplug.models.kernels import Kernels
from specplug.proposers.heads.layers import Map, root_mean_square_norm
from specplug_mlp.checkpoint import SpeculatorConfig

__all__ = ["MlpHead"]

_EPS = 1e-6


class StageNorm(torch.nn.Module):
    """Root-mean-square norm with scale and shift."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.bias = torch.nn.Parameter(torch.zeros(size))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """``[n, size]`` in and out."""
        return rms_norm(states, self.weight.shape, self.weight, _EPS) + self.bias

    def bound(self, kernels: Kernels | None) -> Map:
        """The same of the present weights, in fewer operations and without gradients."""
        weight, bias = self.weight.detach(), self.bias.detach()
        compiled = None if kernels is None else kernels.norm(weight, _EPS)
        if compiled is None:
            return root_mean_square_norm(weight, _EPS, bias)
        return lambda states: compiled(states).add_(bias)


class MlpHead(torch.nn.Module):
    """All stages. Tied ones are one module: of each kind, stage i is the i-th or, beyond it, the last."""

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__()
        inner = config.inner_dim
        num_own = 1 if config.tie_weights else config.n_predict
        num_proj = 2 if config.tie_weights else config.n_predict
        linear = torch.nn.Linear
        self.config = config
        self.emb = torch.nn.ModuleList(torch.nn.Embedding(config.vocab_size, inner) for _ in range(num_own))
        self.proj = torch.nn.ModuleList(
            linear(inner if stage else config.emb_dim, inner, bias=False) for stage in range(num_proj)
        )
        self.head = torch.nn.ModuleList(linear(inner, config.draft_vocab_size, bias=False) for _ in range(num_own))
        self.ln = torch.nn.ModuleList(StageNorm(inner) for _ in range(num_own))
        state_weight = 0.5 ** (0.5 / config.n_predict)
        self.bind()
        self._emb_weight = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight

    def bind(self, kernels: Kernels | None = None) -> None:
        """Look up what each stage calls, which costs as much as a small operation; again once weights are final.

        ``kernels``: the target's, for the norms.
        """
        self._stages: list[tuple[Map, Map, Map, Map]] = []
        for stage in range(self.config.n_predict):
            project, embed, norm, output = (
                parts[min(stage, len(parts) - 1)] for parts in (self.proj, self.emb, self.ln, self.head)
            )
            normalise = cast(StageNorm, norm).forward if self.training else cast(StageNorm, norm).bound(kernels)
            self._stages.append((project.forward, embed.forward, normalise, output.forward))

    def start(self, states: torch.Tensor) -> torch.Tensor:
        """The target's normalised states ``[n, emb_dim]`` as stage 0 takes them."""
        if not self.config.scale_input:
            return states
        return rms_norm(states, states.shape[-1:], None, _EPS) / math.sqrt(2)

    def forward(self, states: torch.Tensor, token_ids: torch.Tensor, stage: int) -> torch.Tensor:
        """States ``[n, emb_dim or inner]`` and the tokens ``[n]`` after them to new states ``[n, inner]``."""
        project, embed, normalise, _ = self._stages[stage]
        mixed = torch.add(project(states), embed(token_ids), alpha=self._emb_weight)
        return gelu(normalise(mixed))

    def logits(self, states: torch.Tensor, stage: int) -> torch.Tensor:
        """Raw logits ``[n, draft_vocab]`` of what ``forward`` returned."""
        return self._stages[stage][3](states)
