"""The types that travel between host, hooks and plugins.

Importing this module imports neither torch nor numpy; tensors appear in annotations only.
Shapes stand in brackets. Counts start with ``num_``; ids end in ``_ids``; durations end in ``_s``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload

from specplug.trees import ROOT, Tree, chain_parents, split_trees

if TYPE_CHECKING:
    import numpy as np
    import torch

    from specplug.sampling_params import SamplingParams

__all__ = [
    "Batch",
    "Dense",
    "Draft",
    "Indirect",
    "Law",
    "LawSpan",
    "OneHot",
    "Request",
    "RequestStep",
    "Session",
    "SessionSummary",
    "SourceCount",
    "SourceSpan",
    "StepOutcome",
    "TokenIds",
    "Unknown",
    "Verification",
]

PLACEHOLDER_ID = -1
"""Pads ``Verification.output_token_ids``; as a draft token it is never embedded and never accepted."""


class TokenIds(Sequence[int]):
    """Read-only token ids of one request: a view of the host's buffer, fixed in length, O(1) to make.

    Indexing gives an ``int``, slicing a fresh ``list[int]``, ``array`` the ids as a read-only
    ``int32`` numpy array without a copy. Compares equal to any sequence of the same ids.
    """

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """``array``: ``[num_tokens]`` int32. The view it is given is marked read-only, its base is not."""
        view = array[:]
        view.flags.writeable = False
        self._array = view

    @property
    def array(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """``[num_tokens]`` int32, read-only, no copy."""
        return self._array

    def tolist(self) -> list[int]:
        """A fresh list of all ids."""
        ids: list[int] = self._array.tolist()
        return ids

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found: int | list[int] = self._array[index].tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self._array.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return bool(self._array.tolist() == other._array.tolist())
        return isinstance(other, Sequence) and self._array.tolist() == list(other)

    def __hash__(self) -> int:
        return hash(self._array.tobytes())

    def __repr__(self) -> str:
        return f"TokenIds({self._array.tolist()})"


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request, unchanged from admission to finish.

    ``seed`` is always set: the request's own ``SamplingParams.seed``, else one that the host drew.
    ``cache_salt`` is the namespace that state shared between requests must respect (vLLM's name).
    ``speculation``: the per-request switches of ``SamplingParams.extra_args["specplug"]``
    (``enabled``, ``num_speculative_tokens``, ``method``), already validated.
    """

    request_id: str
    prompt_token_ids: TokenIds
    sampling_params: SamplingParams
    seed: int
    cache_salt: str | None = None
    speculation: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A read-only view of the requests in one step; every sequence has one entry per request (row).

    Rows keep their order within a step, not between steps: identify a request by ``request_ids``.
    """

    requests: tuple[Request, ...]
    token_ids: tuple[TokenIds, ...]
    """Prompt and output so far. The newest token is included although the target has not read it yet."""
    num_computed_tokens: tuple[int, ...]
    """Leading tokens of the row whose target state is computed and kept."""
    remaining: tuple[int, ...]
    """Tokens the request may still emit (``max_tokens`` and ``max_model_len`` applied)."""
    num_verify_steps: tuple[int, ...]
    """Verify steps the request has been through, counted per request; part of the noise key."""
    new_token_ids: tuple[TokenIds, ...] = ()
    """``specplug_advance`` only: the tokens whose positions were computed *and kept* in this step, prompt
    chunks included: ``token_ids[r][num_computed_tokens[r] - n : num_computed_tokens[r]]``. The newest token
    is not among them."""
    new_hidden_states: Mapping[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """``specplug_advance`` only: tapped layer -> per row ``[len(new_token_ids[r]), hidden]``. Position t
    holds the state that read token t. Layers are those that the registered methods' capabilities name:
    layer i is the residual stream after i decoder layers (0: the embeddings), before any final norm."""
    step_price: float | None = None
    """What a step takes besides the time of its tokens, in tokens; None where the host does not know. A draft token
    costs as much as any other."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(request.request_id for request in self.requests)

    @property
    def sampling_params(self) -> tuple[SamplingParams, ...]:
        return tuple(request.sampling_params for request in self.requests)

    @property
    def is_decoding(self) -> tuple[bool, ...]:
        """False for a row that is still inside its prompt: it gets no draft in this step."""
        rows = zip(self.requests, self.token_ids, self.num_computed_tokens, strict=True)
        return tuple(
            len(ids) > len(request.prompt_token_ids) and num_computed == len(ids) - 1
            for request, ids, num_computed in rows
        )

    def select(self, rows: Sequence[int]) -> Batch:
        """The same view of some rows only, in the order given."""

        def pick(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[row] for row in rows) if values else ()

        return Batch(
            requests=pick(self.requests),
            token_ids=pick(self.token_ids),
            num_computed_tokens=pick(self.num_computed_tokens),
            remaining=pick(self.remaining),
            num_verify_steps=pick(self.num_verify_steps),
            new_token_ids=pick(self.new_token_ids),
            new_hidden_states={layer: pick(states) for layer, states in self.new_hidden_states.items()},
            step_price=self.step_price,
        )


@dataclass(frozen=True, slots=True, eq=False)
class OneHot:
    """The draft token is a function of the context: its law puts all mass on it."""


@dataclass(frozen=True, slots=True, eq=False)
class Unknown:
    """No law is claimed; such tokens are verified by sample-and-match, which needs none."""


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A law over the target vocabulary: ``softmax(draft_logits)``.

    ``draft_logits``: ``[num_slots, vocab]``, masked, temperature and top-k/top-p applied: the very tensor
    that the draft tokens were sampled from.
    """

    draft_logits: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Indirect:
    """A law over a draft vocabulary, read through a map; never expanded to the target vocabulary.

    ``draft_logits``: ``[num_slots, draft_vocab]`` as for :class:`Dense`, unmapped entries at -inf;
    ``logsumexp``: ``[num_slots]`` of those logits;
    ``target_to_draft_ids``: ``[vocab]`` int, ``-1`` where a target id has no draft id.
    """

    draft_logits: torch.Tensor
    logsumexp: torch.Tensor
    target_to_draft_ids: torch.Tensor


Law: TypeAlias = OneHot | Unknown | Dense | Indirect


@dataclass(frozen=True, slots=True, eq=False)
class LawSpan:
    """Slots ``start`` (inclusive) to ``stop`` (exclusive) of a draft share ``law``."""

    start: int
    stop: int
    law: Law


@dataclass(frozen=True, slots=True)
class SourceSpan:
    """Slots ``start`` to ``stop`` of a draft come from the proposer named ``source``."""

    start: int
    stop: int
    source: str


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Draft tokens for a whole batch, flattened over its requests.

    ``draft_token_ids``: ``[num_draft_tokens]`` int, always *target* ids, on any device.
    ``num_draft_tokens``: ``[batch]`` Python ints, one per row of the batch handed to ``propose``, 0 allowed.
    ``laws`` and ``sources``: spans that cover every slot once, in order (``sources`` may be empty: the host
    then names the proposer). ``confidence``: ``[num_draft_tokens]`` or None; entry i may depend on the laws
    up to i and on earlier draft tokens, never on token i itself.
    ``parents``: ``[num_draft_tokens]`` Python ints, or None for chains. A row's tokens then form a tree: the entry
    is the index, among the row's own tokens, of the token before this one, -1 for those that follow the newest
    committed token. Parents come before their children, and likelier siblings should come first. Trees are verified
    by sample-and-match, whatever their laws.
    """

    draft_token_ids: torch.Tensor
    num_draft_tokens: tuple[int, ...]
    laws: tuple[LawSpan, ...]
    sources: tuple[SourceSpan, ...] = ()
    confidence: torch.Tensor | None = None
    parents: tuple[int, ...] | None = None
    skip_reasons: tuple[str | None, ...] = ()
    """Per row why it got no draft, for the counters; None, and ``()`` for all rows: the proposer had nothing."""

    @classmethod
    def from_lists(cls, draft_token_ids: Sequence[Sequence[int]], *, source: str | None = None) -> Draft:
        """A draft of deterministic tokens (law one_hot): one list of target ids per row, ``[]`` for none.

        Raises ``TypeError`` for an id that is not a whole number.
        """
        import torch

        flat = _whole_numbers([token_id for row in draft_token_ids for token_id in row])
        num_slots = len(flat)
        return cls(
            draft_token_ids=torch.tensor(flat, dtype=torch.int64),
            num_draft_tokens=tuple(len(row) for row in draft_token_ids),
            laws=(LawSpan(0, num_slots, OneHot()),) if num_slots else (),
            sources=(SourceSpan(0, num_slots, source),) if num_slots and source else (),
        )

    @classmethod
    def from_trees(
        cls, draft_token_ids: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], *, source: str | None = None
    ) -> Draft:
        """A draft of deterministic token trees: per row its tokens and, of the same length, their parents.

        ``Draft.from_trees([[5, 7, 6]], [[-1, -1, 0]])``: the text goes on with 5 then 6, or with 7. Order nodes so
        that the first n of a row are the n to keep when fewer are allowed. Raises ``TypeError`` for an id or a parent
        that is not a whole number and ``ValueError`` where a row's lists differ in length.
        """
        for row, (ids, of_row) in enumerate(zip(draft_token_ids, parents, strict=True)):
            if len(ids) != len(of_row):
                raise ValueError(f"row {row} has {len(ids)} draft tokens and {len(of_row)} parents")
        draft = cls.from_lists(draft_token_ids, source=source)
        return replace(draft, parents=tuple(_whole_numbers([parent for of_row in parents for parent in of_row])))

    @classmethod
    def empty(cls, batch_size: int) -> Draft:
        """No draft token for any of ``batch_size`` rows."""
        return cls.from_lists([[]] * batch_size)

    @property
    def num_slots(self) -> int:
        return sum(self.num_draft_tokens)

    def truncate(self, num_per_row: Sequence[int]) -> Draft:
        """Keep at most the first ``num_per_row[r]`` tokens (of a tree: nodes) of each row; laws and sources follow.

        Choosing the lengths by looking at the drawn tokens themselves breaks losslessness for dense and
        indirect laws; lengths from history, confidence or limits are safe.
        """
        kept = [min(have, want) for have, want in zip(self.num_draft_tokens, num_per_row, strict=True)]
        if tuple(kept) == self.num_draft_tokens:
            return self
        slots: list[int] = []
        start = 0
        for have, keep in zip(self.num_draft_tokens, kept, strict=True):
            slots.extend(range(start, start + keep))
            start += have
        return self._select_slots(slots, tuple(kept))

    def select_rows(self, rows: Sequence[int]) -> Draft:
        """The draft of some rows only, in the order given."""
        starts = [0]
        for count in self.num_draft_tokens:
            starts.append(starts[-1] + count)
        slots = [slot for row in rows for slot in range(starts[row], starts[row + 1])]
        selected = self._select_slots(slots, tuple(self.num_draft_tokens[row] for row in rows))
        if not self.skip_reasons:
            return selected
        return replace(selected, skip_reasons=tuple(self.skip_reasons[row] for row in rows))

    def trees(self) -> list[Tree | None]:
        """Per row the shape of its tree; None where the row is a chain."""
        return split_trees(self.parents, self.num_draft_tokens)

    def to_chains(self, rows: Sequence[int] | None = None) -> Draft:
        """Each of ``rows`` (default: all) cut to its first path, which follows every node's first child."""
        kept: list[Sequence[int] | None] = [None] * len(self.num_draft_tokens)
        for row, tree in enumerate(self.trees()):
            if tree is not None and (rows is None or row in rows):
                kept[row] = tree.first_path
        return self.select_nodes(kept)

    def select_nodes(self, kept: Sequence[Sequence[int] | None]) -> Draft:
        """Per row only the nodes ``kept[r]``, ascending, each with its parent among them; None keeps the row."""
        if all(nodes is None for nodes in kept):
            return self
        slots: list[int] = []
        parents: list[int] = []
        counts: list[int] = []
        for nodes, (start, stop) in zip(kept, pairwise(cumulative(self.num_draft_tokens)), strict=True):
            old = chain_parents(stop - start) if self.parents is None else self.parents[start:stop]
            picked = range(stop - start) if nodes is None else nodes
            place = {ROOT: ROOT} | {node: number for number, node in enumerate(picked)}
            slots += [start + node for node in picked]
            parents += [place[old[node]] for node in picked]
            counts.append(len(picked))
        return replace(self._select_slots(slots, tuple(counts)), parents=_unless_chains(parents, counts))

    def _select_slots(self, slots: Sequence[int], num_draft_tokens: tuple[int, ...]) -> Draft:
        import torch

        index = torch.tensor(slots, dtype=torch.int64, device=self.draft_token_ids.device)
        return replace(
            self,
            draft_token_ids=self.draft_token_ids[index],
            num_draft_tokens=num_draft_tokens,
            laws=tuple(select_laws(self.laws, slots)),
            sources=tuple(_select_sources(self.sources, slots)),
            confidence=None if self.confidence is None else self.confidence[index.to(self.confidence.device)],
            parents=None
            if self.parents is None
            else _unless_chains([self.parents[slot] for slot in slots], num_draft_tokens),
        )


def _unless_chains(parents: Sequence[int], counts: Sequence[int]) -> tuple[int, ...] | None:
    """The parents, None when every row is a chain."""
    as_chains = tuple(chain.from_iterable(map(chain_parents, counts)))
    return None if as_chains == tuple(parents) else tuple(parents)


def _whole_numbers(token_ids: Sequence[Any]) -> list[int]:
    ids: list[int] = []
    try:
        ids.extend(map(operator.index, token_ids))
    except TypeError:
        raise TypeError(f"{token_ids[len(ids)]!r} is no token id; a draft holds whole numbers") from None
    return ids


class _Span(Protocol):
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


def _runs(spans: Sequence[_Span], slots: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (span number, new start, old slots) for each maximal run of ``slots`` inside one span."""
    owner = {slot: number for number, span in enumerate(spans) for slot in range(span.start, span.stop)}
    start = 0
    while start < len(slots):
        number = owner[slots[start]]
        stop = start
        while stop < len(slots) and owner[slots[stop]] == number:
            stop += 1
        yield number, start, list(slots[start:stop])
        start = stop


def select_laws(spans: Sequence[LawSpan], slots: Sequence[int]) -> Iterator[LawSpan]:
    """The laws of some slots, in the order given."""
    for number, start, old in _runs(spans, slots):
        span = spans[number]
        rows = [slot - span.start for slot in old]
        law = span.law
        if isinstance(law, Dense):
            law = Dense(law.draft_logits[rows])
        elif isinstance(law, Indirect):
            law = replace(law, draft_logits=law.draft_logits[rows], logsumexp=law.logsumexp[rows])
        yield LawSpan(start, start + len(old), law)


def _select_sources(spans: Sequence[SourceSpan], slots: Sequence[int]) -> Iterator[SourceSpan]:
    if spans:
        for number, start, old in _runs(spans, slots):
            yield SourceSpan(start, start + len(old), spans[number].source)


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """What a verifier decided. Every row emits its accepted draft tokens and exactly one more.

    ``output_token_ids``: ``[batch, max_draft_len + 1]`` int32: accepted tokens, then the recovered or bonus
    token, padded with -1 (of trees at least ``[batch, max_depth + 1]``). ``num_accepted_tokens``: ``[batch]`` int.
    ``is_invalid``: ``[batch]`` bool or None: rows whose target logits were unusable (NaN); the host ends those
    requests with an error.
    ``accepted_draft_indices``: ``[batch, max_depth]`` int, the accepted nodes of each row from the root on, padded
    with -1; None for chains, where they are 0, 1, 2, ...
    """

    output_token_ids: torch.Tensor
    num_accepted_tokens: torch.Tensor
    is_invalid: torch.Tensor | None = None
    accepted_draft_indices: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SourceCount:
    """Tokens of one source in one request's step."""

    source: str
    num_draft_tokens: int
    num_accepted_tokens: int
    num_verified_accepted_tokens: int


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One request's part of a step, in plain Python values that ``commit`` copied from the device once.

    "Verified" counts are those of the rule, before stop and length cuts; the others are committed:
    what the request really received.
    """

    request_id: str
    num_draft_tokens: int
    num_verified_accepted_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    sources: tuple[SourceCount, ...] = ()
    skip_reason: str | None = None
    """Why the row got no draft; None when it did. ``prefill``: its prompt ended in this step; ``disabled``: no
    speculation, for the session or the request; ``no_proposer``: the proposer was detached; ``limit``: a plan
    or a length limit said 0; ``fault``: its draft was dropped; ``grammar``: the request's grammar rules out its
    first token; ``no_proposal``: the proposer had nothing; or a reason of the proposer's own (``Draft.skip_reasons``),
    such as ``draft_len``: the text is longer than the draft model's context."""
    num_draft_nodes: int | None = None
    """Draft tokens that the target read: of a tree all nodes, whereas ``num_draft_tokens`` is its longest path, the
    most that could be accepted. None: as many as ``num_draft_tokens``."""

    @property
    def num_verified_emitted_tokens(self) -> int:
        return self.num_verified_accepted_tokens + 1


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step, after commit. ``rows`` holds the requests that were verified: rows still inside their prompt
    emit nothing and do not appear. Times are wall-clock seconds of the whole batch."""

    step: int
    rows: tuple[RequestStep, ...]
    num_prefill_tokens: int = 0
    verify_method: str = ""
    propose_s: float = 0.0
    forward_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    """Everything else in the step: plan, packing, commit, advance."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Plugin faults in this step: reason -> count."""
    num_flattened_trees: int = 0
    """Rows whose tree was cut to its first path, because the target or the rule takes chains only."""


@dataclass(frozen=True, slots=True)
class Session:
    """What plugins may know about the session that starts; also the context for building them."""

    vocab_size: int
    max_num_seqs: int
    max_model_len: int
    num_speculative_tokens: int
    """The configured K; 0 without speculation."""
    device: str = "cpu"
    dtype: str = "float32"
    eos_token_ids: frozenset[int] = frozenset()
    hidden_size: int | None = None
    num_layers: int | None = None


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """Handed to ``specplug_finish_session``."""

    num_steps: int
    num_requests: int
    faults: Mapping[str, int] = field(default_factory=dict)


def cumulative(counts: Iterable[int]) -> list[int]:
    """``[0, c0, c0 + c1, ...]``: where each row's slots start, and the total last."""
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums
