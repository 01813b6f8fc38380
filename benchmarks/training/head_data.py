"""What heads are trained on: states of the target beside its tokens, and its opinions in the head's vocabulary."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from training.corpus import Corpus
from training.corpus import Sequence as Continuation

__all__ = ["DraftVocabulary", "HeadBatch", "batches", "batches_once", "draft_vocabulary"]

TOKENS_PER_STEP = 1024


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """``target_ids``: ``[draft_vocab]``, ascending; ``places``: ``[vocab]``, draft id of each target id or -1."""

    target_ids: torch.Tensor
    places: torch.Tensor

    @property
    def offsets(self) -> torch.Tensor:
        """``d2t``: what is added to a draft id."""
        return self.target_ids - torch.arange(len(self.target_ids))


def draft_vocabulary(corpus: Corpus, vocab_size: int, size: int) -> DraftVocabulary:
    """The ``size`` tokens that the target expects most often."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for sequence in corpus.train:
        weights = sequence.top_log_probs.exp().double()
        counts.index_add_(0, sequence.top_ids.flatten(), weights.flatten())
    target_ids = counts.topk(min(size, vocab_size)).indices.sort().values
    places = torch.full((vocab_size,), -1)
    places[target_ids] = torch.arange(len(target_ids))
    return DraftVocabulary(target_ids, places)


@dataclass(frozen=True, slots=True)
class HeadBatch:
    """Sequences side by side, padded at the end.

    ``token_ids`` ``[rows, tokens]``; ``states`` ``[rows, tokens, layers, hidden]``; ``label_ids`` (draft ids) and
    ``label_probs`` ``[rows, tokens, TOP_K]``: the target's opinion on the next token, zero where it is padding or
    outside the draft vocabulary; ``is_output`` ``[rows, tokens]``: the next token is one that the target wrote.
    ``best_ids`` ``[rows, tokens]``: its likeliest next token as a draft id, -1 outside.
    """

    token_ids: torch.Tensor
    states: torch.Tensor
    label_ids: torch.Tensor
    label_probs: torch.Tensor
    best_ids: torch.Tensor
    is_output: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.is_output.sum())


def batches(sequences: Sequence[Continuation], vocabulary: DraftVocabulary, seed: int) -> Iterator[HeadBatch]:
    """Endless batches of about ``TOKENS_PER_STEP`` tokens."""
    chance = random.Random(seed)
    while True:
        groups = _groups(sequences, chance)
        chance.shuffle(groups)
        for group in groups:
            yield _stack(group, vocabulary)


def batches_once(sequences: Sequence[Continuation], vocabulary: DraftVocabulary) -> Iterator[HeadBatch]:
    """Every sequence once."""
    return (_stack(group, vocabulary) for group in _groups(sequences, random.Random(0)))


def _groups(sequences: Sequence[Continuation], chance: random.Random) -> list[list[Continuation]]:
    """Of similar length."""
    groups: list[list[Continuation]] = [[]]
    for sequence in sorted(sequences, key=lambda each: len(each.token_ids) + chance.random() * 16):
        if groups[-1] and (len(groups[-1]) + 1) * len(sequence.token_ids) > TOKENS_PER_STEP:
            groups.append([])
        groups[-1].append(sequence)
    return groups


def _stack(sequences: Sequence[Continuation], vocabulary: DraftVocabulary) -> HeadBatch:
    def padded(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

    label_ids = padded([vocabulary.places[sequence.top_ids] for sequence in sequences])
    label_probs = padded([sequence.top_log_probs.exp() for sequence in sequences])
    is_output = [torch.zeros(len(sequence.token_ids), dtype=torch.bool) for sequence in sequences]
    for flags, sequence in zip(is_output, sequences, strict=True):
        flags[slice(*sequence.outputs)] = True
    return HeadBatch(
        token_ids=padded([sequence.token_ids for sequence in sequences]),
        states=padded([sequence.hidden_states() for sequence in sequences]).float(),
        label_ids=label_ids.clamp_min(0),
        label_probs=label_probs * (label_ids >= 0),
        best_ids=label_ids[..., 0],
        is_output=padded(is_output),
    )
