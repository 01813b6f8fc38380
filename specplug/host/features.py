"""What some requests ask for beyond plain sampling, and how a step serves them; other batches skip it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from specplug.host.grammar import Grammar, apply_masks, cut_drafts
from specplug.host.logprobs import TokenTexts, processed_logits, token_logprobs
from specplug.host.paths import DraftPath, draft_paths
from specplug.host.processing import Block, RequestProcessing, process_logits
from specplug.host.reasoning import ReasoningSection
from specplug.types import Draft, cumulative

if TYPE_CHECKING:
    from specplug.host.request_state import RequestState

__all__ = [
    "RawLogits",
    "RequestFeatures",
    "StepLogits",
    "cut_to_grammars",
    "process_step",
    "record_logprobs",
    "record_prompt_logprobs",
]


@dataclass(frozen=True, slots=True, eq=False)
class RequestFeatures:
    """Of each kind what one request uses, or None. ``logprobs``, ``prompt_logprobs``: how many, -1 for all."""

    processing: RequestProcessing | None = None
    grammar: Grammar | None = None
    reasoning: ReasoningSection | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    texts: TokenTexts | None = None

    @property
    def is_needed(self) -> bool:
        """Whether a step has anything to do for this request but to sample."""
        asked = (self.processing, self.grammar, self.logprobs, self.prompt_logprobs)
        return any(each is not None for each in asked)


class StepLogits(NamedTuple):
    """``raw``: the model's own; ``processed``: what verification gets. One tensor where nobody needs both."""

    raw: torch.Tensor
    processed: torch.Tensor


def cut_to_grammars(states: Sequence[RequestState], draft: Draft) -> Draft:
    """Cut the drafts where they leave their request's grammar."""
    grammars = [_caught_up(state) for state in states]
    return cut_drafts(grammars, draft) if any(grammars) else draft


def _caught_up(state: RequestState) -> Grammar | None:
    """The request's grammar, having read its output. A fault ends the request."""
    grammar = state.features.grammar
    if grammar is not None:
        fault = grammar.read(state.span(state.num_prompt_tokens, state.num_tokens))
        if fault is not None:
            state.finish("error", error=fault)
            return None
    return grammar


class RawLogits:
    """Keeps a step's unprocessed logits in a buffer that is used again: fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def keep(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy that holds until the next call."""
        buffer, size = self._buffer, logits.numel()
        if buffer is None or buffer.numel() < size or (buffer.dtype, buffer.device) != (logits.dtype, logits.device):
            buffer = self._buffer = torch.empty(size, dtype=logits.dtype, device=logits.device)
        return buffer[:size].view(logits.shape).copy_(logits)


def process_step(
    states: Sequence[RequestState], draft: Draft, logits: torch.Tensor, raw_logits: RawLogits
) -> StepLogits:
    """Apply all requests' processing. ``logits``: ``[num_draft_tokens + len(states), vocab]``, verify's layout.

    Processes float32 logits in place. A request whose processing fails is finished with an error; its rows are
    unusable.
    """
    if not any(state.features.processing or state.features.grammar for state in states):
        return StepLogits(logits, logits)
    starts = cumulative(draft.num_draft_tokens)
    draft_ids = draft.draft_token_ids.tolist()
    blocks: list[Block] = []
    owners: list[RequestState] = []
    masked: list[tuple[Grammar, DraftPath]] = []
    for row, (state, tree) in enumerate(zip(states, draft.trees(), strict=True)):
        paths = draft_paths(draft_ids[starts[row] : starts[row + 1]], starts[row] + row, tree)
        if state.features.processing is not None:
            blocks += [_block(state, state.features.processing, path, logits.shape[1]) for path in paths]
            owners += [state] * len(paths)
        grammar = _caught_up(state)
        if grammar is not None:
            masked += [(grammar, path) for path in paths]
    raw, processed = logits, logits.float().contiguous()
    if processed is logits and any(state.features.logprobs is not None for state in states):
        raw = raw_logits.keep(logits)
    for number, fault in process_logits(processed, blocks).items():
        owners[number].finish("error", error=fault)
    if masked:
        apply_masks(processed, masked)
    return StepLogits(raw, processed)


def _block(state: RequestState, processing: RequestProcessing, path: DraftPath, vocab_size: int) -> Block:
    # what stands behind a placeholder is never read, so any id may stand for it
    ids = np.array(path.draft_ids, dtype=np.int64).clip(0, vocab_size - 1)
    return Block(processing, state.span(0, state.num_tokens), state.num_prompt_tokens, path.rows, ids, path.first)


def record_logprobs(
    states: Sequence[RequestState],
    first_rows: Sequence[int],
    num_emitted: Sequence[int],
    logits: StepLogits,
    accepted: Sequence[Sequence[int] | None] | None = None,
) -> None:
    """Add the log-probabilities of the tokens that a step committed, whoever proposed them.

    ``accepted``: of rows that were trees their accepted nodes, else None.
    """
    rows, token_ids, num_top, owners = [], [], [], []
    for state, first_row, count, nodes in zip(
        states, first_rows, num_emitted, accepted or [None] * len(states), strict=True
    ):
        if state.features.logprobs is None or not count:
            continue
        rows.append(_rows_of(state, logits, _emitting_rows(first_row, count, nodes)))
        token_ids += state.span(state.num_tokens - count, state.num_tokens).tolist()
        num_top += [state.features.logprobs] * count
        owners += [state] * count
    if rows:
        texts = [_texts(state) for state in owners]
        for state, entry in zip(owners, token_logprobs(torch.cat(rows), token_ids, num_top, texts), strict=True):
            state.add_logprobs(entry)


def _emitting_rows(first_row: int, count: int, nodes: Sequence[int] | None) -> slice | list[int]:
    """The logit rows that the first ``count`` emitted tokens come from: the root's, then those of accepted tokens."""
    if nodes is None:
        return slice(first_row, first_row + count)
    return [first_row, *(first_row + node + 1 for node in nodes)][:count]


def _rows_of(state: RequestState, logits: StepLogits, rows: slice | list[int]) -> torch.Tensor:
    params = state.request.sampling_params
    if params.logprobs_mode == "raw_logprobs":
        return logits.raw[rows].float()
    return processed_logits(logits.processed[rows], params)


def record_prompt_logprobs(state: RequestState, logits: torch.Tensor, first_position: int) -> None:
    """Add those of a prompt chunk. ``logits``: ``[num_positions, vocab]``, the first having read ``first_position``."""
    wanted = state.features.prompt_logprobs
    if wanted is None or not len(logits):
        return
    token_ids = state.span(first_position + 1, first_position + 1 + len(logits)).tolist()
    count = len(token_ids)
    state.prompt_logprobs += token_logprobs(logits, token_ids, [wanted] * count, [_texts(state)] * count)


def _texts(state: RequestState) -> TokenTexts:
    return state.features.texts or TokenTexts(None)
