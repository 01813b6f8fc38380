"""min-p, top-k and top-p as one threshold on a row's raw logits: an entry stays iff its logit reaches it.

Order as in vLLM: temperature, min-p, top-k over all, top-p over what is left. Entries that tie with the last one
kept stay too, so the kept set never depends on ids; ``top_k=1`` never comes here, it is greedy.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from specplug.verify.inputs import RowInputs
from specplug.verify.noise import TILE

__all__ = ["threshold"]

Floats = NDArray[np.float32]


def threshold(logits: Floats, probs: Floats, row: RowInputs) -> float:
    """The smallest logit that stays. ``logits``, ``probs``: ``[vocab]``, the latter their softmax at temperature."""
    lowest = -math.inf
    if row.min_p > 0.0:
        lowest = float(logits.max()) + row.temperature * math.log(row.min_p)
    if 0 < row.top_k < len(logits):
        lowest = max(lowest, _kth_largest(logits, row.top_k))
    if row.top_p < 1.0:
        lowest = max(lowest, _nucleus_threshold(logits, probs, row.top_p, lowest))
    return lowest


def _kth_largest(logits: Floats, k: int) -> float:
    """The tiles' own maxima bound the answer from below, which leaves few entries to select from."""
    num_whole = len(logits) // TILE
    if k <= num_whole // 2:
        maxima = logits[: num_whole * TILE].reshape(num_whole, TILE).max(1)
        bound = np.partition(maxima, num_whole - k)[num_whole - k]
        logits = logits[logits >= bound]
    return float(np.partition(logits, len(logits) - k)[len(logits) - k])


def _nucleus_threshold(logits: Floats, probs: Floats, top_p: float, lowest: float) -> float:
    """The fewest largest entries whose mass reaches ``top_p`` of the mass at or above ``lowest``.

    Entries below ``(1 - top_p) / vocab`` of that mass weigh less than what top-p cuts, so they need no sorting.
    """
    if lowest > -math.inf:
        allowed = logits >= lowest
        logits, probs = logits[allowed], probs[allowed]
    total = float(probs.sum(dtype=np.float64))
    likely = probs >= (1.0 - top_p) * total / len(probs)
    logits, probs = logits[likely], probs[likely]
    if not len(probs):  # NaN logits: the caller flags the row
        return -math.inf
    ordered = np.sort(probs)[::-1]
    before = np.cumsum(ordered, dtype=np.float64) - ordered
    num_kept = max(1, int(np.count_nonzero(before < top_p * total)))
    return float(logits[probs >= ordered[num_kept - 1]].min())
