"""One verification step as others do it: transformers' row loop, plain batched torch, vLLM's CPU kernels.

Each function takes a ``Step`` and returns a call without arguments; ``available`` says which can run here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

__all__ = ["PEERS", "Step", "available", "make_step"]

Call = Callable[[], Any]


@dataclass(frozen=True)
class Step:
    """``target`` ``[batch, K + 1, vocab]`` and ``draft`` ``[batch, K, vocab]`` logits, ``tokens`` ``[batch, K]``."""

    target: torch.Tensor
    draft: torch.Tensor
    tokens: torch.Tensor
    is_greedy: bool


def make_step(batch: int, num_drafts: int, vocab: int, *, is_greedy: bool, device: str = "cpu", seed: int = 0) -> Step:
    """Target logits of spread 2, draft logits half a unit beside them; greedy drafts are wrong one time in four."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(batch, num_drafts + 1, vocab, generator=generator) * 2
    draft = target[:, :num_drafts] + 0.5 * torch.randn(batch, num_drafts, vocab, generator=generator)
    if is_greedy:
        best = target[:, :num_drafts].argmax(-1)
        is_wrong = torch.rand(batch, num_drafts, generator=generator) < 0.25
        tokens = torch.where(is_wrong, (best + 1) % vocab, best)
    else:
        probs = draft.softmax(-1).reshape(-1, vocab)
        tokens = torch.multinomial(probs, 1, generator=generator).reshape(batch, num_drafts)
    return Step(target.to(device), draft.to(device), tokens.to(device), is_greedy)


def transformers_rows(step: Step) -> Call:
    """transformers verifies one sequence: its own ``_speculative_sampling`` or greedy comparison, row by row."""
    from transformers.generation.utils import _speculative_sampling

    batch, num_drafts = step.tokens.shape

    def call() -> list[Any]:
        found = []
        for row in range(batch):
            target, tokens = step.target[row : row + 1], step.tokens[row : row + 1]
            if step.is_greedy:
                chosen = target.argmax(dim=-1)
                num_matches = ((~(tokens == chosen[:, :-1])).cumsum(dim=-1) < 1).sum()
                found.append((chosen[:, : num_matches + 1], num_matches))
            else:
                found.append(_speculative_sampling(tokens, step.draft[row : row + 1], num_drafts, target))
        return found

    return call


def torch_batched(step: Step) -> Call:
    """The whole batch at once, with log-sum-exp for the accept test and one full row per request for the residual."""
    batch, num_drafts = step.tokens.shape
    rows = torch.arange(batch, device=step.target.device)

    def greedy() -> tuple[torch.Tensor, torch.Tensor]:
        best = step.target.argmax(-1)
        return best, (best[:, :num_drafts] == step.tokens).int().cumprod(1).sum(1)

    def sampled() -> tuple[torch.Tensor, torch.Tensor]:
        ids = step.tokens.unsqueeze(-1)
        target = step.target[:, :num_drafts]
        log_target = target.gather(-1, ids).squeeze(-1) - target.logsumexp(-1)
        log_draft = step.draft.gather(-1, ids).squeeze(-1) - step.draft.logsumexp(-1)
        noise = torch.rand(batch, num_drafts, device=target.device).log()
        count = (noise <= log_target - log_draft).int().cumprod(1).sum(1)
        probs = step.target[rows, count].softmax(-1)
        draft_probs = step.draft[rows, count.clamp(max=num_drafts - 1)].softmax(-1)
        left = torch.where((count < num_drafts).unsqueeze(-1), (probs - draft_probs).clamp_(min=0), probs)
        return torch.multinomial(left, 1), count

    return greedy if step.is_greedy else sampled


def vllm_kernels(step: Step) -> Call:
    """vLLM's V1 rejection sampler with draft probabilities, on its CPU kernels."""
    import numpy as np
    from vllm.platforms import current_platform
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    batch, num_drafts = step.tokens.shape
    vocab = step.target.shape[-1]
    sampler, at, nothing = RejectionSampler(Sampler()), torch.arange(batch * (num_drafts + 1)), torch.empty(0)
    grid = at.view(batch, num_drafts + 1)
    sampling = SamplingMetadata(
        temperature=None if step.is_greedy else torch.ones(batch),
        all_greedy=step.is_greedy,
        all_random=not step.is_greedy,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        spec_token_ids=[[] for _ in range(batch)],
    )
    metadata = SpecDecodeMetadata(
        draft_token_ids=step.tokens.reshape(-1).to(torch.int32).contiguous(),
        num_draft_tokens=[num_drafts] * batch,
        cu_num_draft_tokens=torch.from_numpy(np.cumsum([num_drafts] * batch, dtype=np.int32)),
        cu_num_sampled_tokens=torch.from_numpy(np.cumsum([num_drafts + 1] * batch, dtype=np.int32)),
        target_logits_indices=grid[:, :num_drafts].reshape(-1),
        bonus_logits_indices=grid[:, num_drafts].reshape(-1),
        logits_indices=at,
    )
    logits = step.target.reshape(-1, vocab)

    def call() -> torch.Tensor:
        probs = None if step.is_greedy else step.draft.softmax(-1).view(-1, vocab)
        return sampler(metadata, probs, logits, sampling).sampled_token_ids

    return call


PEERS: dict[str, tuple[str, Callable[[Step], Call]]] = {
    "transformers": ("transformers", transformers_rows),
    "batched torch": ("torch", torch_batched),
    "vllm": ("vllm", vllm_kernels),
}
"""Name -> the package it needs, and how to make its call."""


def available() -> dict[str, Callable[[Step], Call]]:
    """The peers whose package is installed."""
    return {name: make for name, (package, make) in PEERS.items() if find_spec(package) is not None}
