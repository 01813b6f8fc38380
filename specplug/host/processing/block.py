"""One request's rows of the expanded verify batch, and the flat addresses of entries in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from specplug.host.paths import Ids

if TYPE_CHECKING:
    from specplug.host.processing.request import RequestProcessing

__all__ = ["Block", "entries", "to_device"]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Logit row ``rows[j]`` is about the token that follows the request's text and ``draft_ids[: first + j]``.

    ``token_ids``: ``[num_tokens]`` int32, prompt and output so far; ``draft_ids``: ``[num_draft_tokens]``, all valid
    ids (rows behind a placeholder are never read, so any id may stand for it). A tree has one block for each of its
    paths; rows that a path shares with one before it are left to that (``first`` of them).
    """

    processing: RequestProcessing
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    rows: Ids
    draft_ids: Ids
    first: int = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def entries(rows: Ids, ids: Ids, vocab_size: int) -> Ids:
    """``[len(rows) * len(ids)]``: where these ids stand in these rows of the flattened logits."""
    starts = rows * vocab_size
    return (starts[:, None] + ids).ravel()


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> torch.Tensor:
    """The arrays one after another, as one tensor on ``device``."""
    return torch.from_numpy(np.concatenate(arrays)).to(device)
