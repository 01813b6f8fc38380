"""Log-probabilities of generated and of prompt tokens, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from specplug.sampling_params import SamplingParams
from specplug.verify import filters
from specplug.verify.inputs import RowInputs

__all__ = ["Logprob", "TokenLogprobs", "TokenTexts", "processed_logits", "token_logprobs"]

_ROWS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Logprob:
    """``rank``: 1 for the likeliest token of the position. ``decoded_token``: None without a tokenizer."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs: TypeAlias = Mapping[int, Logprob]
"""One position: the token that stands there, first, and the likeliest ones; token id -> log-probability."""


class TokenTexts:
    """Texts of single tokens, decoded once; None without a tokenizer, and for tokens that it cannot decode."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str | None] = {}

    def __getitem__(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token_id not in self._texts:
            self._texts[token_id] = self._decode(token_id)
        return self._texts[token_id]

    def _decode(self, token_id: int) -> str | None:
        try:
            text: str = self._tokenizer.decode([token_id])
        except Exception:  # noqa: BLE001 - foreign code; the log-probability is good without the text
            return None
        return text


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int], texts: Sequence[TokenTexts]
) -> list[TokenLogprobs]:
    """One entry a row. ``logits``: ``[num_rows, vocab]``; ``token_ids``: the token that stands at each row.

    ``num_top``: how many of the likeliest tokens each row reports, -1 for all; ``texts``: each row's. Rows that report
    equally many go together, so that no row's ties depend on its neighbours, a few at a time to stay in the cache.
    """
    vocab_size = logits.shape[1]
    counts = [vocab_size if count < 0 else min(count, vocab_size) for count in num_top]
    result: list[TokenLogprobs] = [{}] * len(counts)
    for count in sorted(set(counts)):
        alike = [row for row, each in enumerate(counts) if each == count]
        for start in range(0, len(alike), _ROWS_AT_ONCE):
            rows = alike[start : start + _ROWS_AT_ONCE]
            entries = _entries(logits[rows], [token_ids[row] for row in rows], count, [texts[row] for row in rows])
            for row, entry in zip(rows, entries, strict=True):
                result[row] = entry
    return result


def _entries(
    logits: torch.Tensor, token_ids: Sequence[int], count: int, texts: Sequence[TokenTexts]
) -> Iterator[TokenLogprobs]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(1))
    ranks = (logprobs > own).sum(1) + 1
    top = logprobs.topk(count, dim=1)
    rows = zip(
        token_ids, own[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(), texts, strict=True
    )
    for token_id, value, rank, top_ids, top_values, names in rows:
        entry = {token_id: Logprob(value, rank, names[token_id])}
        for place, (top_id, top_value) in enumerate(zip(top_ids, top_values, strict=True), 1):
            entry[top_id] = Logprob(top_value, place, names[top_id])
        yield entry


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
