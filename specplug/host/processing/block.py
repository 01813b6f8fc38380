"""One request's rows of the expanded verify batch, and the flat addresses of entries in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from specplug.host.processing.request import RequestProcessing

__all__ = ["Block", "Ids", "entries", "to_device"]

Ids: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Logit row ``first_row + j`` is about the token that follows the request's text and ``draft_ids[:j]``.

    ``token_ids``: ``[num_tokens]`` int32, prompt and output so far; ``draft_ids``: ``[num_draft_tokens]``, all valid
    ids (rows behind a placeholder are never read, so any id may stand for it).
    """

    processing: RequestProcessing
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    first_row: int
    draft_ids: Ids

    @property
    def num_rows(self) -> int:
        return len(self.draft_ids) + 1

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def entries(first_row: int, num_rows: int, ids: Ids, vocab_size: int) -> Ids:
    """``[num_rows * len(ids)]``: where these ids stand in ``num_rows`` rows of the flattened logits."""
    starts = np.arange(first_row, first_row + num_rows, dtype=np.int64) * vocab_size
    return (starts[:, None] + ids).ravel()


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> torch.Tensor:
    """The arrays one after another, as one tensor on ``device``."""
    return torch.from_numpy(np.concatenate(arrays)).to(device)
