"""Log-probabilities of generated and of prompt tokens, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from specplug.sampling_params import SamplingParams
from specplug.verify import filters
from specplug.verify.inputs import RowInputs

__all__ = ["Logprob", "TokenLogprobs", "TokenTexts", "processed_logits", "token_logprobs"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """``rank``: 1 for the likeliest token of the position. ``decoded_token``: None without a tokenizer."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs: TypeAlias = Mapping[int, Logprob]
"""One position: the token that stands there, first, and the likeliest ones; token id -> log-probability."""


class TokenTexts:
    """Texts of single tokens, decoded once. Without a tokenizer there are none."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token_id not in self._texts:
            self._texts[token_id] = self._tokenizer.decode([token_id])
        return self._texts[token_id]


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int], texts: Sequence[TokenTexts]
) -> list[TokenLogprobs]:
    """One entry a row. ``logits``: ``[num_rows, vocab]``; ``token_ids``: the token that stands at each row.

    ``num_top``: how many of the likeliest tokens each row reports, -1 for all; ``texts``: each row's. One pass over
    the rows.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(1))
    ranks = (logprobs > own).sum(1) + 1
    top = _top(logprobs, num_top)
    result: list[TokenLogprobs] = []
    for token_id, names, value, rank, likeliest in zip(
        token_ids, texts, own[:, 0].tolist(), ranks.tolist(), top, strict=True
    ):
        entry = {token_id: Logprob(value, rank, names[token_id])}
        for place, (top_id, top_value) in enumerate(likeliest, 1):
            entry[top_id] = Logprob(top_value, place, names[top_id])
        result.append(entry)
    return result


def _top(logprobs: torch.Tensor, num_top: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Per row its likeliest tokens. Rows that report equally many go together, so none depends on its neighbours."""
    vocab_size = logprobs.shape[1]
    counts = [vocab_size if count < 0 else min(count, vocab_size) for count in num_top]
    result: list[list[tuple[int, float]]] = [[] for _ in counts]
    for count in set(counts) - {0}:
        rows = [row for row, each in enumerate(counts) if each == count]
        top = logprobs[rows].topk(count, dim=1)
        for row, ids, values in zip(rows, top.indices.tolist(), top.values.tolist(), strict=True):
            result[row] = list(zip(ids, values, strict=True))
    return result


def processed_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What the tokens of these rows are drawn from: temperature, top-k, top-p and min-p applied. ``[num_rows, vocab]``.

    ``logits``: after everything that depends on the text. Greedy rows have no temperature and no filters.
    """
    if params.is_greedy:
        return logits
    row = RowInputs(
        "match",
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
    )
    scaled = logits.float() / params.temperature
    if row.has_filters:
        probs = torch.softmax(scaled, dim=-1)
        for number, (raw, likely) in enumerate(zip(logits.float().cpu().numpy(), probs.cpu().numpy(), strict=True)):
            scaled[number, logits[number].float() < filters.threshold(raw, likely, row)] = -torch.inf
    return scaled
