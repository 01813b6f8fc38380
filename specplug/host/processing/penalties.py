"""Presence, frequency and repetition penalties. Only entries of tokens that were seen are touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specplug.host.paths import Ids
from specplug.host.processing.block import Block, entries
from specplug.sampling_params import SamplingParams

__all__ = ["SeenTokens", "apply_penalties"]

Floats = NDArray[np.float32]
_UNSEEN = -1


class SeenTokens:
    """The distinct tokens of one request's text and how often its output holds each, kept up to date with it.

    Prompt tokens count for the repetition penalty alone, and are left out without one.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.penalties = np.array(
            [params.repetition_penalty, params.frequency_penalty, params.presence_penalty], dtype=np.float32
        )
        self._has_prompt = params.repetition_penalty != 1.0
        self._places = np.full(vocab_size, _UNSEEN, dtype=np.int32)
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float32)
        self._num_ids = 0
        self._num_read = 0

    @property
    def ids(self) -> Ids:
        """``[num_ids]``, each once."""
        return self._ids[: self._num_ids]

    @property
    def counts(self) -> Floats:
        """``[num_ids]``: occurrences in the output, 0 for ids of the prompt alone."""
        return self._counts[: self._num_ids]

    def counts_of(self, token_ids: Ids) -> Floats:
        """Occurrences of any ids in the output so far."""
        if not self._num_ids:
            return np.zeros(len(token_ids), dtype=np.float32)
        places = self._places[token_ids]
        found: Floats = np.where(places == _UNSEEN, np.float32(0.0), self._counts[places])
        return found

    def read(self, token_ids: NDArray[np.int32], num_prompt_tokens: int) -> None:
        """Take in what the text ``token_ids`` has grown by since the last call."""
        if self._num_read < num_prompt_tokens:
            self._num_read = num_prompt_tokens
            if self._has_prompt:
                self._append(np.unique(token_ids[:num_prompt_tokens]).astype(np.int64))
        for token_id in token_ids[self._num_read :].tolist():
            place = self._places[token_id]
            if place == _UNSEEN:
                place = self._num_ids
                self._append(np.array([token_id], dtype=np.int64))
            self._counts[place] += 1.0
        self._num_read = len(token_ids)

    def _append(self, new_ids: Ids) -> None:
        start, stop = self._num_ids, self._num_ids + len(new_ids)
        if stop > len(self._ids):
            size = max(stop, 2 * len(self._ids))
            self._ids, self._counts = np.resize(self._ids, size), np.resize(self._counts, size)
        self._ids[start:stop], self._counts[start:stop] = new_ids, 0.0
        self._places[new_ids] = np.arange(start, stop)
        self._num_ids = stop


class _Edits(NamedTuple):
    """Entries of the flattened logits, the count of each one's token, and its request's three penalties."""

    entries: Ids
    counts: Floats
    penalties: Floats


def apply_penalties(logits: torch.Tensor, blocks: Sequence[tuple[Block, SeenTokens]]) -> None:
    """Penalise in place. ``logits``: ``[num_rows, vocab]`` float32, contiguous.

    Row j counts the draft tokens before it as output. Entries of the text come first; those of the draft tokens are
    then written anew from the unpenalised values, with the count that holds at their row.
    """
    for block, seen in blocks:
        seen.read(block.token_ids, block.num_prompt_tokens)
    flat = logits.view(-1)
    of_text = _on(flat, _text_edits(blocks, logits.shape[1]))
    of_drafts = _on(flat, _draft_edits(blocks, logits.shape[1]))
    unpenalised = flat[of_drafts[0]]
    flat[of_text[0]] = _penalised(flat[of_text[0]], *of_text[1:])
    flat[of_drafts[0]] = _penalised(unpenalised, *of_drafts[1:])


def _on(flat: torch.Tensor, edits: _Edits) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    where, counts, penalties = (torch.from_numpy(array).to(flat.device) for array in edits)
    return where, counts, penalties


def _penalised(values: torch.Tensor, counts: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    repetition, frequency, presence = penalties
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    result: torch.Tensor = repeated - frequency * counts - presence * (counts > 0)
    return result


def _text_edits(blocks: Sequence[tuple[Block, SeenTokens]], vocab_size: int) -> _Edits:
    where = [entries(block.rows, seen.ids, vocab_size) for block, seen in blocks]
    counts = [np.tile(seen.counts, len(block.rows)) for block, seen in blocks]
    penalties = np.stack([seen.penalties for _, seen in blocks], axis=1)
    return _Edits(
        np.concatenate(where), np.concatenate(counts), np.repeat(penalties, [len(each) for each in where], axis=1)
    )


def _draft_edits(blocks: Sequence[tuple[Block, SeenTokens]], vocab_size: int) -> _Edits:
    """For every row and every draft token before it: one entry. A token that repeats appears twice, with one value."""
    num_drafts = np.array([len(block.draft_ids) for block, _ in blocks])
    width = int(num_drafts.max(initial=0))
    drafts = np.full((len(blocks), width), _UNSEEN, dtype=np.int64)
    in_text = np.zeros((len(blocks), width), dtype=np.float32)
    rows = np.zeros((len(blocks), width + 1), dtype=np.int64)
    for index, (block, seen) in enumerate(blocks):
        rows[index, block.first : num_drafts[index] + 1] = block.rows
        drafts[index, : num_drafts[index]] = block.draft_ids
        in_text[index, : num_drafts[index]] = seen.counts_of(block.draft_ids)
    # how often the token of slot i is drafted in the slots up to the last one before a row
    in_draft = (drafts[:, :, None] == drafts[:, None, :]).cumsum(axis=2)
    slots = np.arange(width)
    firsts = np.array([block.first for block, _ in blocks])[:, None, None]
    is_before = (slots[:, None] <= slots) & (slots < num_drafts[:, None, None]) & (slots + 1 >= firsts)
    number, slot, last = np.nonzero(is_before)
    penalties = np.stack([seen.penalties for _, seen in blocks], axis=1)
    return _Edits(
        rows[number, last + 1] * vocab_size + drafts[number, slot],
        in_text[number, slot] + in_draft[number, slot, last].astype(np.float32),
        penalties[:, number],
    )
