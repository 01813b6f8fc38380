"""Cross entropy against the target's likeliest tokens, over the whole vocabulary or over a sample of it."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

__all__ = ["Candidates", "sampled_cross_entropy", "soft_cross_entropy"]

_LEAST_PROBABILITY = 0.01


class Candidates:
    """A part of the vocabulary that stands for the whole in one step.

    It holds every token that a label gives weight, and ``num_random`` others, each of which stands for as many as
    were left out: the normaliser's expectation is that of the full softmax.
    """

    def __init__(self, label_ids: torch.Tensor, label_probs: torch.Tensor, vocab_size: int, num_random: int) -> None:
        """``label_ids``, ``label_probs``: ``[rows, labels]``; weights below one in a hundred are dropped."""
        is_kept = label_probs >= _LEAST_PROBABILITY
        needed = label_ids[is_kept].unique()
        is_free = torch.ones(vocab_size, dtype=torch.bool)
        is_free[needed] = False
        others = is_free.nonzero().squeeze(1)
        drawn = others[torch.randperm(len(others))[:num_random]]
        self.ids = torch.cat([needed, drawn])
        self.log_weights = torch.zeros(len(self.ids))
        if len(drawn):
            self.log_weights[len(needed) :] = torch.log(torch.tensor(len(others) / len(drawn)))
        places = torch.zeros(vocab_size, dtype=torch.long)
        places[needed] = torch.arange(len(needed))
        self.label_places = places[label_ids]
        kept = label_probs * is_kept
        self.label_probs = kept / kept.sum(-1, keepdim=True).clamp_min(_LEAST_PROBABILITY)


def sampled_cross_entropy(states: torch.Tensor, head: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """Mean over ``[rows]``. ``states``: ``[rows, hidden]``; ``head``: ``[vocab, hidden]``."""
    logits = linear(states, head[candidates.ids]).float()
    normaliser = (logits + candidates.log_weights).logsumexp(-1)
    chosen = logits.gather(-1, candidates.label_places)
    return (normaliser - (chosen * candidates.label_probs).sum(-1)).mean()


def soft_cross_entropy(logits: torch.Tensor, label_ids: torch.Tensor, label_probs: torch.Tensor) -> torch.Tensor:
    """Per row, ``[rows]``; rows of ``label_probs`` that sum to less than 1 count for less."""
    log_probs = logits.float().log_softmax(-1)
    return -(log_probs.gather(-1, label_ids) * label_probs).sum(-1)
