"""How a head with a cache of its own follows the text: what it has read of each request, and what waits to be read.

Entry t of a request's cache is made of the target's state at position t and of the token after it, t + 1. Both are
known once position t was computed and kept, so what a head read of the text always stands: the only entries ever rolled
back are those of its own draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch

from specplug.models.cache import RaggedCache
from specplug.models.kernels import Chain, Kernels
from specplug.models.step_plan import StepPlan
from specplug.proposers.heads.features import joined_states
from specplug.trees import Tree
from specplug.types import Batch, cumulative

__all__ = ["Head", "HeadReader"]

READ_AHEAD = 64
"""Unread entries from which a decoding request is read outside its drafts. Fewer are read with the next draft."""


class Head(Protocol):
    """What a head computes, for packed tokens of any number of requests. All tensors have its dtype and device."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers whose states it reads, side by side in this order."""

    @property
    def windows(self) -> Sequence[int | None]:
        """The sliding window of each of its own layers, None for full attention."""

    @property
    def kernels(self) -> Kernels | None:
        """Installed kernels that run its layers, in the dtype of its weights; None: torch."""

    @property
    def chain(self) -> Chain | None:
        """Drafts greedily in one call; None: token by token."""

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states ``[T, layers * target hidden]`` as the features that ``run`` takes, ``[T, hidden]``."""

    def run(self, token_ids: torch.Tensor, features: torch.Tensor, step: StepPlan, cache: RaggedCache) -> torch.Tensor:
        """Read target ids ``[T]`` with the features ``[T, hidden]`` before them, appending to the cache.

        Returns ``[T, hidden]``: what the logits are made of, and the features to read a drafted token with.
        """

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Raw logits ``[n, draft_vocab]`` of what ``run`` returned ``[n, hidden]``."""


@dataclass(slots=True)
class _Last:
    """An entry; its state is taken out of ``states`` only when it is needed."""

    token_id: int
    states: torch.Tensor
    place: int

    def state(self) -> torch.Tensor:
        """``[1, width]``."""
        return self.states[self.place : self.place + 1]


@dataclass(slots=True)
class _Text:
    """What the head knows of one request."""

    length: int = 0
    """Entries of the cache that stand for the text."""
    token_ids: list[int] = field(default_factory=list)
    """Unread: the tokens after the states."""
    states: list[torch.Tensor] = field(default_factory=list)
    """Unread: the target's states, ``[any, width]`` each."""
    last: _Last | None = None
    """The last entry read, to read it again where nothing new came."""

    @property
    def num_known(self) -> int:
        return self.length + len(self.token_ids)


class HeadReader:
    """The ragged cache of a head, by request, and the forwards over it.

    Rows are taken when a request is first read. A request whose steps were not followed from its first position on is
    not known, and gets no drafts.
    """

    def __init__(
        self, head: Head, *, max_num_seqs: int, max_len: int, max_query_tokens: int, device: torch.device
    ) -> None:
        """``max_len``: entries of a request's cache; ``max_query_tokens``: most entries a request reads at once."""
        self.head = head
        self.device = device
        self.max_len = max_len
        self.max_query_tokens = min(max_query_tokens, max_len)
        self._texts: dict[str, _Text] = {}
        self._rows: list[str] = []
        self._cache = RaggedCache(
            head.windows,
            max_num_seqs=max_num_seqs,
            max_model_len=max_len,
            max_query_tokens=self.max_query_tokens,
            device=device,
        )
        if head.kernels is None:
            self._cache.keep_for_drafts()

    # --- following the text -----------------------------------------------------------------------------------

    def advance(self, batch: Batch, rows: Sequence[int]) -> None:
        """Take in what these rows of an advance batch computed; read it where it is a prompt or has become long."""
        long: list[str] = []
        is_decoding = batch.is_decoding
        for row in rows:
            request_id = batch.requests[row].request_id
            text = self._append(batch, row, request_id)
            if text is not None and (not is_decoding[row] or len(text.token_ids) >= READ_AHEAD):
                long.append(request_id)
        if long:
            with torch.inference_mode():
                self._read_chunks(long, 0)

    def _append(self, batch: Batch, row: int, request_id: str) -> _Text | None:
        stop = min(batch.num_computed_tokens[row], len(batch.token_ids[row]) - 1)  # the last one has no token after it
        start = batch.num_computed_tokens[row] - len(batch.new_token_ids[row])
        text = self._texts.get(request_id)
        known = 0 if text is None else text.num_known
        if start != known or stop > self.max_len:
            self.forget(request_id)  # from here on its text is not known
            return None
        if stop <= start:
            return None
        if text is None:
            text = self._texts[request_id] = _Text()
        text.token_ids += batch.token_ids[row][start + 1 : stop + 1]
        states = joined_states(batch.new_hidden_states, self.head.layers, row)[: stop - start]
        # of one layer they are a slice, which would keep the states of the whole step
        text.states.append(states.clone() if len(self.head.layers) == 1 else states)
        return text

    def forget(self, request_id: str) -> None:
        """Free a request's row and drop what waits; unknown ids are ignored."""
        self._texts.pop(request_id, None)
        if request_id in self._rows:
            row = self._rows.index(request_id)
            with torch.inference_mode():
                self._cache.release(row)
            self._rows[row] = self._rows[-1]
            self._rows.pop()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._texts

    def room(self, request_id: str) -> int:
        """Most tokens that can be drafted for a request before its cache is full."""
        return self.max_len - self._texts[request_id].num_known + 1

    # --- forwards ---------------------------------------------------------------------------------------------

    def in_order(self, request_ids: Sequence[str]) -> list[str]:
        """The requests by their rows, as forwards take them; gives those without a row one."""
        for request_id in request_ids:
            if request_id not in self._rows:
                with torch.inference_mode():
                    self._cache.acquire()
                self._rows.append(request_id)
        wanted = set(request_ids)
        return [request_id for request_id in self._rows if request_id in wanted]

    def read(
        self, request_ids: Sequence[str], mask: tuple[int, torch.Tensor] | None, counts: Sequence[int]
    ) -> torch.Tensor:
        """Read everything that waits of requests ``in_order``, and their draft's masks behind it.

        ``mask``: token and features ``[1, hidden]`` that stand for what is to be drafted; ``counts[i] - 1`` of them
        follow request i. Returns the outputs of the last entry and the masks, ``[sum of counts, hidden]``; without a
        mask that of the last entry, ``[len(request_ids), hidden]``.
        """
        num_masks = [count - 1 if mask else 0 for count in counts]
        self._prepare(request_ids, num_masks)
        return self._read(request_ids, mask, num_masks)

    def append(self, token_ids: torch.Tensor, features: torch.Tensor, request_ids: Sequence[str]) -> torch.Tensor:
        """Read one draft token ``[n]`` with its features ``[n, hidden]`` for each request; outputs ``[n, hidden]``."""
        return self._run(token_ids, features, dict.fromkeys(request_ids, 1))

    def read_chain(
        self, chain: Chain, request_ids: Sequence[str], num_tokens: int, drafted: torch.Tensor, probs: torch.Tensor
    ) -> bool:
        """Read everything that waits of requests ``in_order``, and draft ``num_tokens`` for each as by :meth:`append`
        and arg-max: target ids into ``drafted`` ``[n * num_tokens]``, their probabilities into ``probs``. False, with
        nothing drafted, where a token does not see all of the text before it.

        What can be noted is noted before the call, since nothing is in the processor's caches after it.
        """
        num_more = num_tokens - 1
        self._prepare(request_ids, [num_more] * len(request_ids))
        texts = {request_id: self._texts[request_id] for request_id in request_ids}
        num_read = [len(texts[row].token_ids) if row in texts else 0 for row in self._rows]
        num_query_tokens = [num and num + num_more for num in num_read]
        step, layer = self._cache.begin(num_query_tokens), self._cache.ragged_layers[0]
        self._cache.end()
        if not step.sees_all_before(layer.kind):
            return False
        chunks = [self._take(text, len(text.token_ids)) for text in texts.values()]
        for text in texts.values():
            _settle(text, len(text.token_ids))
        self._cache.finish(num_query_tokens)
        token_ids = [token_id for ids, _ in chunks for token_id in ids]
        states = _joined([states for _, states in chunks])
        chain(token_ids, states, num_read, num_tokens, step, layer, drafted, probs)
        return True

    def append_trees(self, token_ids: torch.Tensor, features: torch.Tensor, trees: Mapping[str, Tree]) -> torch.Tensor:
        """Read a tree of draft tokens for each request ``in_order``, in place of what its draft had read so far.

        ``token_ids`` ``[nodes]`` and ``features`` ``[nodes, hidden]``: one request's nodes after the other's. Returns
        ``[nodes, hidden]``.
        """
        self._roll_back(list(trees))
        return self._run(token_ids, features, {name: len(tree) for name, tree in trees.items()}, trees)

    def _prepare(self, request_ids: Sequence[str], num_behind: Sequence[int]) -> None:
        """Drop the entries of earlier drafts; where nothing waits, let the last entry be read again.

        What cannot be read at once with ``num_behind`` more entries behind it is read here, but for its last entry.
        """
        long: list[str] = []
        for request_id, num in zip(request_ids, num_behind, strict=True):
            text = self._texts[request_id]
            if not text.token_ids and text.last is not None:
                text.length -= 1
                text.token_ids, text.states = [text.last.token_id], [text.last.state()]
            if len(text.token_ids) + num > self.max_query_tokens:
                long.append(request_id)
        self._roll_back(request_ids)
        if long:
            self._read_chunks(long, 1)

    def _roll_back(self, request_ids: Sequence[str]) -> None:
        wanted = set(request_ids)
        for row, request_id in enumerate(self._rows):
            if request_id in wanted:
                self._cache.rollback(row, self._texts[request_id].length)

    def _read_chunks(self, request_ids: Sequence[str], num_left: int) -> None:
        """Read what waits, in chunks where it is long, but for ``num_left`` entries of each request."""
        ordered = self.in_order(request_ids)
        self._roll_back(ordered)
        while ordered:
            sizes = [min(len(self._texts[each].token_ids) - num_left, self.max_query_tokens) for each in ordered]
            chunks = [self._take(self._texts[each], size) for each, size in zip(ordered, sizes, strict=True)]
            self._run(
                self._ids(token_id for ids, _ in chunks for token_id in ids),
                self.head.features(_joined([states for _, states in chunks])),
                dict(zip(ordered, sizes, strict=True)),
            )
            for each, size in zip(ordered, sizes, strict=True):
                _settle(self._texts[each], size)
            ordered = [each for each in ordered if len(self._texts[each].token_ids) > num_left]

    def _take(self, text: _Text, size: int) -> tuple[list[int], torch.Tensor]:
        states = _joined(text.states)
        text.states = [states]
        return text.token_ids[:size], states[:size]

    def _ids(self, token_ids: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(token_ids), device=self.device)

    def _read(
        self, request_ids: Sequence[str], mask: tuple[int, torch.Tensor] | None, num_masks: Sequence[int]
    ) -> torch.Tensor:
        texts = [self._texts[each] for each in request_ids]
        sizes = [len(text.token_ids) for text in texts]
        chunks = [self._take(text, size) for text, size in zip(texts, sizes, strict=True)]
        features = self.head.features(_joined([states for _, states in chunks]))
        ids: list[int] = []
        last: list[int] = []
        for (token_ids, _), num in zip(chunks, num_masks, strict=True):
            ids += token_ids
            last += range(len(ids) - 1, len(ids) + num)
            ids += [mask[0]] * num if mask else []
        if mask and any(num_masks):
            features = _interleaved(features, mask[1], sizes, num_masks)
        totals = dict(zip(request_ids, map(sum, zip(sizes, num_masks, strict=True)), strict=True))
        outputs = self._run(self._ids(ids), features, totals)
        for text, size in zip(texts, sizes, strict=True):
            _settle(text, size)
        return outputs[last[0] :] if len(last) == 1 else outputs[torch.tensor(last, device=self.device)]

    def _run(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        counts: Mapping[str, int],
        trees: Mapping[str, Tree] | None = None,
    ) -> torch.Tensor:
        num_query_tokens = [counts.get(request_id, 0) for request_id in self._rows]
        of_rows = {row: trees[name] for row, name in enumerate(self._rows) if name in trees} if trees else None
        step = self._cache.begin(num_query_tokens, of_rows)
        try:
            outputs = self.head.run(token_ids, features, step, self._cache)
        finally:
            self._cache.end()
        self._cache.finish(num_query_tokens)
        return outputs


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _settle(text: _Text, size: int) -> None:
    """The first ``size`` entries that waited were read."""
    states = text.states[0]
    text.last = _Last(text.token_ids[size - 1], states, size - 1)
    text.length += size
    del text.token_ids[:size]
    text.states = [states[size:]] if text.token_ids else []
    if len(states) > READ_AHEAD:  # a prompt's
        text.last = _Last(text.last.token_id, text.last.state().clone(), 0)


def _interleaved(
    features: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int], num_masks: Sequence[int]
) -> torch.Tensor:
    """Each request's ``sizes[i]`` features with ``num_masks[i]`` masks behind them."""
    parts: list[torch.Tensor] = []
    for (start, stop), num in zip(pairwise(cumulative(sizes)), num_masks, strict=True):
        parts += [features[start:stop], mask.expand(num, -1)]
    return torch.cat(parts)
