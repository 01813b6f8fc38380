"""min-p, top-k and top-p as one threshold on a row's raw logits: an entry stays iff its logit reaches it.

Order as in vLLM: temperature, min-p, top-k over all, top-p over what is left. Entries that tie with the last one
kept stay too, so the kept set never depends on ids; ``top_k=1`` never comes here, it is greedy.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from specplug.verify.inputs import RowInputs

__all__ = ["threshold"]

Floats = NDArray[np.float32]


_STRETCH = 64
"""Entries of which only the largest bounds the k-th largest of the row."""


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
    """Maxima of short stretches bound the answer from below, which leaves few entries to select from."""
    num_whole = len(logits) // _STRETCH
    if k <= num_whole // 2:
        stretches = torch.from_numpy(logits[: num_whole * _STRETCH]).view(num_whole, _STRETCH)
        maxima = stretches.amax(1).numpy()
        logits = logits[np.flatnonzero(logits >= np.partition(maxima, num_whole - k)[num_whole - k])]
        k = min(k, len(logits))  # NaN is never at or above: the caller flags the row
    return float(np.partition(logits, len(logits) - k)[len(logits) - k]) if k else -math.inf


def _nucleus_threshold(logits: Floats, probs: Floats, top_p: float, lowest: float) -> float:
    """The fewest largest entries whose mass reaches ``top_p`` of the mass at or above ``lowest``."""
    if lowest > -math.inf:
        allowed = np.flatnonzero(logits >= lowest)
        logits, probs = logits[allowed], probs[allowed]
    wanted = top_p * float(probs.sum())
    candidates = _candidates(probs, wanted)
    if not len(candidates):  # NaN logits: the caller flags the row
        return -math.inf
    logits, probs = logits[candidates], probs[candidates]
    ordered = np.sort(probs)[::-1]
    before = np.cumsum(ordered, dtype=np.float64) - ordered
    num_kept = max(1, int(np.count_nonzero(before < wanted)))
    return float(logits[probs >= ordered[num_kept - 1]].min())


def _candidates(probs: Floats, wanted: float) -> NDArray[np.intp]:
    """Indices of all entries at or above some chance, few of them, but with at least the mass ``wanted``."""
    for chance in (1e-2, 1e-3, 1e-4, 1e-5):
        found = np.flatnonzero(probs >= chance)
        if float(probs[found].sum(dtype=np.float64)) >= wanted:
            return found
    return np.flatnonzero(probs >= 0.0)
