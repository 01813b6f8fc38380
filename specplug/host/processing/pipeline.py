"""All requests' processing in one pass over the step's logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from specplug.host.paths import Ids
from specplug.host.processing.block import Block, entries, to_device
from specplug.host.processing.penalties import apply_penalties

__all__ = ["process_logits"]

_RULED_OUT = -torch.inf


def process_logits(logits: torch.Tensor, blocks: Sequence[Block]) -> dict[int, str]:
    """Process the blocks' rows in place. ``logits``: ``[num_rows, vocab]`` float32, contiguous.

    Returns what went wrong, block number -> message; the rows of such a block are unusable, the others are not touched
    by it. Masks come last, so nothing can lift them.
    """
    faults = _apply_custom(logits, blocks)
    _add_bias(logits, blocks)
    penalised = [(block, block.processing.seen) for block in blocks]
    if with_penalties := [(block, seen) for block, seen in penalised if seen is not None]:
        apply_penalties(logits, with_penalties)
    _keep_allowed(logits, blocks)
    vocab_size = logits.shape[1]
    if ruled_out := [each for block in blocks for each in _ruled_out(block, vocab_size) if len(each)]:
        logits.view(-1).index_fill_(0, to_device(ruled_out, logits.device), _RULED_OUT)
    return faults


def _apply_custom(logits: torch.Tensor, blocks: Sequence[Block]) -> dict[int, str]:
    faults = {}
    for number, block in enumerate(blocks):
        if block.processing.custom is not None:
            fault = block.processing.custom.apply(logits, block)
            if fault is not None:
                faults[number] = fault
    return faults


def _add_bias(logits: torch.Tensor, blocks: Sequence[Block]) -> None:
    where, values = [], []
    for block in blocks:
        ids, bias = block.processing.bias_ids, block.processing.bias_values
        if ids is not None and bias is not None:
            where.append(entries(block.rows, ids, logits.shape[1]))
            values.append(np.tile(bias, len(block.rows)))
    if where:
        logits.view(-1).index_add_(0, to_device(where, logits.device), to_device(values, logits.device))


def _keep_allowed(logits: torch.Tensor, blocks: Sequence[Block]) -> None:
    for block in blocks:
        if block.processing.allowed_mask is not None:
            start, stop = int(block.rows[0]), int(block.rows[-1]) + 1
            is_run = stop - start == len(block.rows)
            logits[slice(start, stop) if is_run else to_device([block.rows], logits.device)] += (
                block.processing.allowed_mask
            )


def _ruled_out(block: Block, vocab_size: int) -> Iterator[Ids]:
    """Entries that bad words and ``min_tokens`` exclude."""
    processing = block.processing
    if processing.bad_words is not None:
        yield entries(block.rows, processing.bad_words.single_ids, vocab_size)
        yield processing.bad_words.entries(block, vocab_size)
    if processing.ending_ids is not None:
        num_rows = max(processing.min_tokens - block.num_output_tokens - block.first, 0)
        yield entries(block.rows[:num_rows], processing.ending_ids, vocab_size)
