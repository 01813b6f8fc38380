"""What one request asks of its logits, prepared once: ids as arrays, words as tokens, state for the penalties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specplug.errors import RequestError
from specplug.host.paths import Ids
from specplug.host.processing.bad_words import BadWords, spell_bad_words
from specplug.host.processing.custom import CustomProcessors
from specplug.host.processing.penalties import SeenTokens
from specplug.sampling_params import SamplingParams

__all__ = ["RequestProcessing", "build_processing"]


@dataclass(frozen=True, slots=True, eq=False)
class RequestProcessing:
    """Of each kind what the request uses, or None.

    ``allowed_mask``: ``[vocab]`` float32 on the target's device, 0 for allowed ids and minus infinity for others;
    ``ending_ids``: ruled out until ``min_tokens`` tokens are out.
    """

    custom: CustomProcessors | None = None
    bias_ids: Ids | None = None
    bias_values: NDArray[np.float32] | None = None
    seen: SeenTokens | None = None
    allowed_mask: torch.Tensor | None = None
    bad_words: BadWords | None = None
    ending_ids: Ids | None = None
    min_tokens: int = 0


def build_processing(
    params: SamplingParams, *, vocab_size: int, tokenizer: Any, ending_ids: Iterable[int], device: torch.device
) -> RequestProcessing | None:
    """Prepare a request's processing; None when it asks for none. ``ending_ids``: what ends the request.

    Raises ``RequestError`` naming a parameter whose ids or texts the target does not have.
    """
    bias = params.logit_bias
    ending = _ids(ending_ids)
    custom = CustomProcessors(params.logits_processors) if params.logits_processors else None
    _check_ids("logit_bias", bias or (), vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    words = spell_bad_words(params.bad_words, tokenizer, vocab_size) if params.bad_words else []
    delays_end = params.min_tokens > 0 and len(ending) > 0
    if not (bias or params.allowed_token_ids or words or delays_end or custom or params.has_penalties):
        return None
    return RequestProcessing(
        custom=custom,
        bias_ids=_ids(bias) if bias else None,
        bias_values=np.array(list(bias.values()), dtype=np.float32) if bias else None,
        seen=SeenTokens(params, vocab_size) if params.has_penalties else None,
        allowed_mask=_mask_of(params.allowed_token_ids, vocab_size, device) if params.allowed_token_ids else None,
        bad_words=BadWords(words) if words else None,
        ending_ids=ending if delays_end else None,
        min_tokens=params.min_tokens,
    )


def _ids(ids: Iterable[int]) -> Ids:
    return np.array(list(ids), dtype=np.int64)


def _mask_of(ids: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    mask = torch.full((vocab_size,), -torch.inf)  # added, which is three times as fast as filling
    mask[torch.tensor(ids)] = 0.0
    return mask.to(device)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if token_id >= vocab_size:
            raise RequestError(f"{name} names token id {token_id}; the target has ids 0 to {vocab_size - 1}")
