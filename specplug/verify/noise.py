"""Counter-based noise: Philox 4x32-10 (Salmon et al., SC 2011), the same bits in numpy, torch and Triton.

Key: the request's seed (two 32-bit words). Counter: ``(index, position, step, purpose)``, 32 bits each:

* ``purpose`` keeps streams apart, so that draft, accept and recovery noise are never shared;
* ``step`` is the request's own verify-step count, 0 for the purposes that are keyed by position alone;
* ``position`` is the index, in the request's text, of the token to be drawn;
* ``index`` numbers the four-word blocks that one decision needs.

A draw over a vocabulary (``specplug.verify.reference.draw``) reads block 0 for the uniform inside a tile and
lane ``t % 4`` of block ``1 + t // 4`` for tile t. Per-entry noise reads lane ``v % 4`` of block ``v // 4``.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = [
    "TILE",
    "Purpose",
    "draw_blocks",
    "exponentials",
    "gumbel",
    "num_tiles",
    "philox",
    "uniforms",
]

TILE = 1024
"""Vocabulary entries that share one race ticket in a draw; part of the noise's definition."""

Words: TypeAlias = NDArray[np.uint64]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10

_NUMPY_MULTIPLIERS = np.array(_MULTIPLIERS, dtype=np.uint64).reshape(2, 1)
_ROUND_KEYS = np.arange(_NUM_ROUNDS, dtype=np.uint64).reshape(-1, 1, 1) * np.array(_WEYL, dtype=np.uint64).reshape(2, 1)
_HIGH = 1 if sys.byteorder == "little" else 0
"""Which half of a 64-bit product's memory holds its high word."""


class Purpose(IntEnum):
    """What a random number is for. Numbers of different purposes are independent."""

    TARGET = 1
    """``match`` and plain sampling: keyed (seed, position), step 0."""
    ACCEPT = 2
    """Accept tests of ``standard``, ``block`` and ``synthetic``: keyed (seed, step, position)."""
    RECOVER = 3
    """The token that ends a row under those rules: keyed (seed, step, position)."""
    COUPLED = 4
    """Per-entry noise that ``coupled`` shares with proposers: keyed (seed, position), step 0."""
    DRAFT = 5
    """For proposers that sample drafts by themselves: keyed (seed, step, position)."""


def num_tiles(vocab_size: int) -> int:
    """How many tiles of ``TILE`` entries cover the vocabulary."""
    return -(-vocab_size // TILE)


def philox(seed: Any, purpose: Any, step: Any, position: Any, index: Any) -> Words:
    """Four words per counter: ``[..., 4]`` uint64 holding 32 bits each.

    Every argument is an int or an integer array; they broadcast against each other to ``[...]``.
    """
    arrays = [np.asarray(value, dtype=np.uint64) for value in (index, position, step, purpose, seed)]
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    counter = np.empty((4, *shape), dtype=np.uint32)
    for number, array in enumerate(arrays[:4]):
        counter[number] = array
    key = np.empty((2, *shape), dtype=np.uint64)
    key[0], key[1] = arrays[4] & np.uint64(_MASK), arrays[4] >> np.uint64(32)
    counter, key = counter.reshape(4, -1), key.reshape(2, -1)
    even, odd = counter[0::2], counter[1::2]
    for round_key in (key + _ROUND_KEYS).astype(np.uint32):
        halves = np.multiply(even, _NUMPY_MULTIPLIERS, dtype=np.uint64).view(np.uint32)
        even = halves[::-1, _HIGH::2] ^ odd
        even ^= round_key
        odd = halves[::-1, 1 - _HIGH :: 2]
    return np.stack((even[0], odd[0], even[1], odd[1]), axis=-1).astype(np.uint64).reshape(*shape, 4)


def uniforms(words: Words) -> NDArray[np.float64]:
    """``[..., 4]`` words to ``[...]`` uniforms in (0, 1), 52 bits from the first two words, never 0 or 1."""
    bits = ((words[..., 0] << np.uint64(32)) | words[..., 1]) >> np.uint64(12)
    return np.asarray((bits.astype(np.float64) + 0.5) * 2.0**-52)


def exponentials(words: Words) -> NDArray[np.float64]:
    """Words to unit exponentials, one each, same shape, all positive and finite."""
    return np.asarray(-np.log((words.astype(np.float64) + 0.5) * 2.0**-32))


def draw_blocks(vocab_size: int) -> NDArray[np.uint64]:
    """``[1 + ceil(tiles / 4)]``: the block indices that one draw over the vocabulary reads."""
    return np.arange(1 + -(-num_tiles(vocab_size) // 4), dtype=np.uint64)


def gumbel(
    seed: int,
    position: int,
    vocab_size: int,
    *,
    purpose: Purpose = Purpose.COUPLED,
    step: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Per-entry Gumbel noise ``[vocab_size]`` float64 on ``device``.

    ``coupled`` verification takes the arg-max of the processed target logits plus this noise; a proposer that
    drafts with the arg-max of its own processed logits plus the same noise is accepted most often.
    """
    index = torch.arange(-(-vocab_size // 4), device=device)
    even = torch.stack((index, torch.full_like(index, step & _MASK)))
    odd = torch.tensor([[position & _MASK], [int(purpose)]], device=device)
    multipliers, weyl, key = (
        torch.tensor([[first], [second]], device=device)
        for first, second in (_MULTIPLIERS, _WEYL, (seed & _MASK, seed >> 32))
    )
    for _ in range(_NUM_ROUNDS):
        product = even * multipliers  # wraps, which leaves the 64 bits that count
        even = ((product >> 32) & _MASK).flip(0) ^ odd ^ key
        odd = (product & _MASK).flip(0)
        key = (key + weyl) & _MASK
    words = torch.stack((even[0], odd[0], even[1], odd[1]), dim=-1).reshape(-1)[:vocab_size]
    exponential = -((words.double() + 0.5) * 2.0**-32).log()
    return -exponential.log()
