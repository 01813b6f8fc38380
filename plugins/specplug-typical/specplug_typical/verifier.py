"""Typical acceptance, expressed through the lossless rule that matches the target's own draws.

A draft token x stands where ``p(x) > min(threshold, alpha * exp(-H(p)))``, p being the target's law after temperature
and filters and H its entropy ("Medusa", 2024). Where it stands, its logit row is replaced by one that can only give x;
the built-in ``match`` then finds that the target drew x. Everywhere else ``match`` decides: a token that ends a row is
the very draw that plain decoding would make there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specplug import Batch, Draft, Verification, hookimpl
from specplug.proposers.draft_sampling import process_logits
from specplug.verify import BuiltinVerifier

__all__ = ["TypicalVerifier", "is_typical"]


class TypicalVerifier:
    """Greedy requests (temperature 0, top-k 1) are verified greedily: nothing is lost there."""

    def __init__(self, *, vocab_size: int, threshold: float, alpha: float) -> None:
        self._threshold, self._alpha = threshold, alpha
        self._match = BuiltinVerifier(vocab_size=vocab_size, rule="match")

    @hookimpl
    def specplug_verify(self, batch: Batch, draft: Draft, target_logits: torch.Tensor) -> Verification:
        if draft.num_slots:
            target_logits = self._with_kept_tokens(batch, draft, target_logits)
        return self._match.specplug_verify(batch, draft, target_logits)

    def _with_kept_tokens(self, batch: Batch, draft: Draft, target_logits: torch.Tensor) -> torch.Tensor:
        """The logits, as a copy, with the rows that read a kept token next turned into that token alone."""
        slots, rows, owners = self._random_slots(batch, draft)
        if not slots:
            return target_logits
        device, vocab_size = target_logits.device, target_logits.shape[1]
        tokens = draft.draft_token_ids.to(device)[torch.tensor(slots, device=device)].long()
        row_index = torch.tensor(rows, device=device)
        params = [batch.sampling_params[owner] for owner in owners]
        processed = process_logits(target_logits[row_index].float(), params)
        is_token = (tokens >= 0) & (tokens < vocab_size)
        tokens = tokens.clamp(0, vocab_size - 1)
        is_kept = is_token & is_typical(processed, tokens, threshold=self._threshold, alpha=self._alpha)
        if draft.parents is not None:
            is_kept = self._longest_paths(draft, slots, is_kept)
        forced = target_logits.clone()
        only = torch.full((len(slots), vocab_size), -torch.inf, device=device, dtype=forced.dtype)
        only.scatter_(1, tokens[:, None], 0.0)
        forced[row_index[is_kept]] = only[is_kept]
        return forced

    def _random_slots(self, batch: Batch, draft: Draft) -> tuple[list[int], list[int], list[int]]:
        """Of requests that are not greedy: every draft slot, the logit row that it is judged by, and its request."""
        slots: list[int] = []
        rows: list[int] = []
        owners: list[int] = []
        start = 0
        for owner, (params, count) in enumerate(zip(batch.sampling_params, draft.num_draft_tokens, strict=True)):
            if not (params.is_greedy or params.top_k == 1):
                first_row = start + owner
                parents = range(-1, count - 1) if draft.parents is None else draft.parents[start : start + count]
                slots += range(start, start + count)
                rows += (first_row + 1 + parent for parent in parents)
                owners += [owner] * count
            start += count
        return slots, rows, owners

    def _longest_paths(self, draft: Draft, slots: Sequence[int], is_kept: torch.Tensor) -> torch.Tensor:
        """Of kept siblings only the one that leads furthest, the first of equals: each logit row can give one token."""
        kept = dict(zip(slots, is_kept.tolist(), strict=True))
        chosen: set[int] = set()
        start = 0
        for tree, count in zip(draft.trees(), draft.num_draft_tokens, strict=True):
            parents = range(-1, count - 1) if tree is None else tree.parents
            length = [0] * count
            best: dict[int, int] = {}
            for node in reversed(range(count)):
                if not kept.get(start + node, False):
                    continue
                length[node] = 1 + (length[best[node]] if node in best else 0)
                parent = parents[node]
                if parent not in best or length[node] >= length[best[parent]]:
                    best[parent] = node
            chosen |= {start + node for node in best.values()}
            start += count
        return torch.tensor([slot in chosen for slot in slots], device=is_kept.device)


def is_typical(logits: torch.Tensor, token_ids: torch.Tensor, *, threshold: float, alpha: float) -> torch.Tensor:
    """``[n]`` bool: whether ``token_ids`` ``[n]`` stand under processed ``logits`` ``[n, vocab]``. NaN: no."""
    log_probs = torch.log_softmax(logits, -1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs.nan_to_num(neginf=0.0)).sum(-1)
    bar = torch.minimum(torch.full_like(entropy, threshold), alpha * torch.exp(-entropy))
    return probs.gather(1, token_ids[:, None])[:, 0] > bar
