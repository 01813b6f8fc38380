"""The proposer: suffix drafting behind specplug's hooks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from specplug import Batch, ConfigError, Draft, Request, SourceSpan, TokenIds, hookimpl
from specplug.proposers import Proposer, load_of, rows_to_draft
from specplug_suffix.acceptance import AcceptanceRow
from specplug_suffix.drafter import RequestText, SuffixDrafter
from specplug_suffix.options import SuffixOptions
from specplug_suffix.shared import SharedIndex
from specplug_suffix.storage import read_corpus, read_index, write_index

__all__ = ["SuffixProposer"]

PROMPT_TOKENS_PER_STEP = 4096
"""Prompt tokens that are indexed in one step, over all requests (about 8 ms), so that none stalls the batch."""


class SuffixProposer(Proposer):
    """Suffix decoding for a batch: one text a request, and one index that they share by ``cache_salt``.

    Prompts are indexed step by step; a request whose prompt is not indexed to its end gets no draft. State is kept
    by request id until the request finishes, also while it is absent from the batch.

    Drafts name their sources ``NAME:local`` (the request's own text) and ``NAME:shared``, and carry as confidence
    what such matches achieved so far.
    """

    def __init__(
        self,
        options: SuffixOptions,
        *,
        num_speculative_tokens: int,
        vocab_size: int,
        device: str = "cpu",
        name: str = "suffix",
    ) -> None:
        self.options = options
        self.device = device
        self.name = name
        self._vocab_size = vocab_size
        rules = options.rules(num_speculative_tokens)
        shared = SharedIndex(
            max_tokens=options.suffix_cached_tokens,
            max_requests=options.max_cached_requests,
            counts=rules.min_probability > 0,
        )
        self._drafter = SuffixDrafter(rules, shared)
        self._texts: dict[str, RequestText] = {}

    # --- hooks ------------------------------------------------------------------------------------------------

    @hookimpl
    def specplug_start_request(self, request: Request) -> None:
        self._start(request)

    @hookimpl
    def specplug_finish_request(self, request: Request) -> None:
        text = self._texts.pop(request.request_id, None)
        if text is not None:
            self._drafter.finish(text)

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        room = PROMPT_TOKENS_PER_STEP
        for request, token_ids in zip(batch.requests, batch.token_ids, strict=True):
            text = self._texts.get(request.request_id)
            if text is not None:
                room -= self._catch_up(text, token_ids, room)

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        rows: list[int] = []
        texts: list[RequestText] = []
        for row in rows_to_draft(batch, limits):
            request, token_ids = batch.requests[row], batch.token_ids[row]
            text = self._texts.get(request.request_id)
            if text is None:
                text = self._start(request)
            self._catch_up(text, token_ids, 0)
            if len(text) == len(token_ids):
                rows.append(row)
                texts.append(text)
        drafts: list[list[int]] = [[] for _ in batch.requests]
        load = load_of(batch, self.device) if self.options.suffix_backoff else None
        found = self._drafter.propose_all(texts, [limits[row] for row in rows], load)
        for row, draft in zip(rows, found, strict=True):
            drafts[row] = draft
        drafted = [(text, len(draft)) for text, draft in zip(texts, found, strict=True) if draft]
        return self._described(Draft.from_lists(drafts), drafted)

    # --- what others may ask ----------------------------------------------------------------------------------

    @property
    def acceptance(self) -> list[AcceptanceRow]:
        """How drafts did so far, by origin and match length."""
        return self._drafter.acceptance.rows()

    @property
    def num_cached_tokens(self) -> int:
        """Output tokens kept for other requests."""
        return self._drafter.shared.num_tokens

    @property
    def num_cached_requests(self) -> int:
        """Outputs kept for other requests."""
        return self._drafter.shared.num_requests

    def expected_accepted_tokens(self, request_id: str) -> float:
        """Accepted tokens to be expected of the request's last draft; 0.0 without one. For hybrids: use it or not?"""
        text = self._texts.get(request_id)
        return 0.0 if text is None else self._drafter.expected_accepted(text)

    def warm(self, documents: Iterable[Sequence[int]]) -> int:
        """Let all requests draft from these texts, for good; returns their number.

        Raises ``ValueError``, ``OverflowError`` or ``TypeError`` for ids that cannot be; nothing is added then.
        """
        return self._drafter.shared.warm(documents)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write corpus and kept outputs, with their namespaces, to a ``.safetensors`` file."""
        write_index(path, self._drafter.shared, vocab_size=self._vocab_size)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Add what :meth:`save` wrote. Raises ``ValueError`` for a file that does not fit; nothing is added then."""
        shared = self._drafter.shared
        for segment in read_index(path, vocab_size=self._vocab_size):
            if segment.is_corpus:
                shared.add_to_corpus(segment.pieces)
            else:
                shared.restore(segment.cache_salt, segment.pieces)

    def read_corpus(self, tokenizer: Any) -> None:
        """Read the file of ``suffix_corpus``, if there is one; all its texts become corpus.

        Raises ``ConfigError`` for a file that does not fit.
        """
        path = self.options.suffix_corpus
        if path is None:
            return
        try:
            if Path(path).suffix == ".jsonl":
                encode = None if tokenizer is None else lambda text: tokenizer.encode(text, add_special_tokens=False)
                self.warm(read_corpus(path, vocab_size=self._vocab_size, encode=encode))
            else:
                for segment in read_index(path, vocab_size=self._vocab_size):
                    self._drafter.shared.add_to_corpus(segment.pieces)
        except ValueError as error:
            raise ConfigError(f"suffix_corpus: {error}") from error

    # --- inside -----------------------------------------------------------------------------------------------

    def _start(self, request: Request) -> RequestText:
        text = self._drafter.start(len(request.prompt_token_ids), request.cache_salt)
        self._texts[request.request_id] = text
        return text

    def _catch_up(self, text: RequestText, token_ids: TokenIds, room: int) -> int:
        """Read what is new; of the prompt at most ``room`` tokens. Returns how many of the prompt."""
        start, stop = len(text), len(token_ids)
        if start == stop:
            return 0
        num_prompt = max(0, text.num_prompt_tokens - start)
        if num_prompt > room:
            num_prompt, stop = room, start + room
        if stop > start:
            self._drafter.append(text, token_ids[start:stop])
        return num_prompt

    def _described(self, draft: Draft, drafted: Sequence[tuple[RequestText, int]]) -> Draft:
        """With sources and confidence. ``drafted``: texts and the lengths of their drafts, in the order of the rows."""
        if not draft.num_slots:
            return draft
        import torch

        sources: list[SourceSpan] = []
        confidence: list[float] = []
        for origin, group in groupby(drafted, key=lambda each: each[0].origin):
            start = len(confidence)
            for text, num_tokens in group:
                confidence += [self._drafter.acceptance_rate(text)] * num_tokens
            sources.append(SourceSpan(start, len(confidence), f"{self.name}:{origin}"))
        return replace(draft, sources=tuple(sources), confidence=torch.tensor(confidence))
