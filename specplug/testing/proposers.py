"""Proposers for tests: fixed, sampling, oracle, adversarial and random. ``as_method`` makes any object a method."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence

from specplug.hooks.markers import hookimpl
from specplug.methods import Capabilities, LawName, MethodSpec, PluginConfig, PluginContext
from specplug.testing.tables import Table, check_probs, lookup
from specplug.types import Batch, Dense, Draft, LawSpan, Request, TokenIds

__all__ = [
    "AdversarialProposer",
    "FixedProposer",
    "MethodPlugin",
    "OracleProposer",
    "RandomProposer",
    "SamplingProposer",
    "as_method",
]

Steps = Sequence[Sequence[int]]
"""Drafts of one request, one list of token ids per step."""


class FixedProposer:
    """Proposes given drafts, one list per step of a request; nothing once they are used up.

    ``drafts``: the lists, the same for every request; or a mapping from a prompt (tuple of ids) to its lists. With
    ``clip=False`` the lists go out as they are, past the limits too.
    """

    def __init__(self, drafts: Steps | Mapping[tuple[int, ...], Steps], *, clip: bool = True) -> None:
        self._drafts = drafts
        self._clip = clip
        self._step: dict[str, int] = {}

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        rows = [self._next(request) if limit else [] for request, limit in zip(batch.requests, limits, strict=True)]
        return Draft.from_lists([row[:limit] for row, limit in zip(rows, limits, strict=True)] if self._clip else rows)

    @hookimpl
    def specplug_finish_request(self, request: Request) -> None:
        self._step.pop(request.request_id, None)

    def _next(self, request: Request) -> list[int]:
        drafts = self._drafts
        steps = drafts.get(tuple(request.prompt_token_ids), ()) if isinstance(drafts, Mapping) else drafts
        step = self._step.get(request.request_id, 0)
        self._step[request.request_id] = step + 1
        return list(steps[step]) if step < len(steps) else []


class SamplingProposer:
    """Draws every draft token from a table and reports that law (dense), with its own randomness.

    Draws depend on ``seed``, the request's seed and the position alone. ``reported``: for negative controls, a law to
    claim in place of the one that was drawn from.
    """

    def __init__(self, probs: Table, *, seed: int = 0, reported: Table | None = None) -> None:
        self._probs = check_probs(probs)
        self._reported = self._probs if reported is None else check_probs(reported)
        self._seed = seed

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        import torch

        drafts: list[list[int]] = []
        logits: list[list[float]] = []
        for request, token_ids, limit in zip(batch.requests, batch.token_ids, limits, strict=True):
            context = token_ids.tolist()
            for _ in range(limit):
                logits.append([math.log(prob) if prob > 0 else -math.inf for prob in lookup(self._reported, context)])
                context.append(self._draw(request, context))
            drafts.append(context[len(token_ids) :])
        draft = Draft.from_lists(drafts)
        if not draft.num_slots:
            return draft
        law = Dense(torch.tensor(logits, dtype=torch.float32))
        return Draft(draft.draft_token_ids, draft.num_draft_tokens, (LawSpan(0, draft.num_slots, law),))

    def _draw(self, request: Request, context: Sequence[int]) -> int:
        probs = lookup(self._probs, context)
        uniform = random.Random(f"{self._seed} {request.seed} {len(context)}").random() * sum(probs)
        above = (token_id for token_id, total in enumerate(itertools.accumulate(probs)) if uniform < total)
        return next(above, len(probs) - 1)


class OracleProposer:
    """Knows what plain decoding writes and proposes it; never wrong, or wrong after a given number of tokens.

    ``continuations``: prompt (tuple of ids) -> the output of plain decoding, such as ``ToyTarget.continuation`` gives.
    ``num_right``: None for all; a number, or one per prompt: how many tokens of each draft are right, the others being
    the right one plus 1. Past a continuation's end it proposes nothing.
    """

    def __init__(
        self,
        continuations: Mapping[tuple[int, ...], Sequence[int]],
        *,
        vocab_size: int,
        num_right: int | Mapping[tuple[int, ...], int] | None = None,
    ) -> None:
        self._continuations = continuations
        self._vocab_size = vocab_size
        self._num_right = num_right

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        rows = zip(batch.requests, batch.token_ids, limits, strict=True)
        return Draft.from_lists([self._row(request, token_ids, limit) for request, token_ids, limit in rows])

    def _row(self, request: Request, token_ids: TokenIds, limit: int) -> list[int]:
        prompt = tuple(request.prompt_token_ids)
        start = len(token_ids) - len(prompt)
        right = list(self._continuations.get(prompt, ())[start : start + limit])
        num_right = self._num_right.get(prompt) if isinstance(self._num_right, Mapping) else self._num_right
        kept = len(right) if num_right is None else num_right
        return right[:kept] + [(token_id + 1) % self._vocab_size for token_id in right[kept:]]


class AdversarialProposer(OracleProposer):
    """Knows what plain decoding writes and never proposes it: every draft token is wrong."""

    def __init__(self, continuations: Mapping[tuple[int, ...], Sequence[int]], *, vocab_size: int) -> None:
        super().__init__(continuations, vocab_size=vocab_size, num_right=0)


class RandomProposer:
    """Proposes random tokens in random numbers, 0 to the limit; a function of ``seed`` and the context alone."""

    def __init__(self, vocab_size: int, *, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._seed = seed

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        rows = zip(batch.token_ids, limits, strict=True)
        return Draft.from_lists([self._row(token_ids, limit) for token_ids, limit in rows])

    def _row(self, token_ids: TokenIds, limit: int) -> list[int]:
        rng = random.Random(f"{self._seed} {token_ids.tolist()}")
        return [rng.randrange(self._vocab_size) for _ in range(rng.randint(0, limit))]


class MethodPlugin:
    """A plugin with one method, for registering an object with a ``ProcessManager`` by hand."""

    def __init__(self, spec: MethodSpec) -> None:
        self.SPECPLUG_API = (1, 0)
        self._spec = spec

    @hookimpl
    def specplug_register(self) -> Sequence[MethodSpec]:
        return [self._spec]


def as_method(
    name: str,
    make: Callable[[PluginContext], object],
    *,
    laws: frozenset[LawName] = frozenset({"one_hot"}),
    capabilities: Capabilities | None = None,
) -> MethodPlugin:
    """A plugin whose proposer method ``name`` is built by ``make(context)``, once per session.

    ``capabilities`` describes the method in full; without it, its drafts are deterministic and carry ``laws``.
    """

    def factory(config: PluginConfig, context: PluginContext) -> object:
        return make(context)

    described = capabilities or Capabilities(laws=laws)
    return MethodPlugin(MethodSpec(name=name, kind="proposer", factory=factory, capabilities=described))
