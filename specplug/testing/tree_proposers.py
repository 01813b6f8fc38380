"""Proposers of draft trees for tests: the right text amid wrong siblings, and random trees."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from specplug.hooks.markers import hookimpl
from specplug.types import Batch, Draft, Request, TokenIds

__all__ = ["OracleTreeProposer", "RandomTreeProposer"]

Row = tuple[list[int], list[int]]
"""Tokens and parents."""


class OracleTreeProposer:
    """Knows what plain decoding writes and hides it in a tree: wrong siblings come first at every depth.

    ``continuations``: prompt (tuple of ids) -> output ids. ``width``: nodes at each depth, the last of them the right
    one. The path that follows first children is wrong from its first token on, unless ``width`` is 1.
    """

    def __init__(
        self, continuations: Mapping[tuple[int, ...], Sequence[int]], *, vocab_size: int, width: int = 2
    ) -> None:
        self._continuations = continuations
        self._vocab_size = vocab_size
        self._width = width

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        rows = [self._row(*row) for row in zip(batch.requests, batch.token_ids, limits, strict=True)]
        return Draft.from_trees([tokens for tokens, _ in rows], [parents for _, parents in rows])

    def _row(self, request: Request, token_ids: TokenIds, limit: int) -> Row:
        prompt = tuple(request.prompt_token_ids)
        start = len(token_ids) - len(prompt)
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for right in self._continuations.get(prompt, ())[start : start + limit // self._width]:
            tokens += [(right + offset) % self._vocab_size for offset in range(self._width - 1, -1, -1)]
            parents += [parent] * self._width
            parent = len(tokens) - 1
        return tokens, parents


class RandomTreeProposer:
    """Proposes random tokens in random trees, 0 nodes to the limit; a function of ``seed`` and the context alone.

    Some of the trees are chains, some hold one token twice among siblings.
    """

    def __init__(self, vocab_size: int, *, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._seed = seed

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        rows = [self._row(token_ids, limit) for token_ids, limit in zip(batch.token_ids, limits, strict=True)]
        return Draft.from_trees([tokens for tokens, _ in rows], [parents for _, parents in rows])

    def _row(self, token_ids: TokenIds, limit: int) -> Row:
        rng = random.Random(f"{self._seed} {token_ids.tolist()}")
        parents = [rng.randrange(-1, node) for node in range(rng.randint(0, limit))]
        return [rng.randrange(self._vocab_size) for _ in parents], parents
