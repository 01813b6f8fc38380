"""What the acceptance accounting reports: one set of counts with one definition each.

"Steps", "drafts" and "tokens" count per request: a batch step over 8 decoding requests is 8 steps. A *draft* is a step
in which the request got at least one draft token. Counts without "verified" in their name are committed: what the
requests received, after stop and length cuts. ``docs/metrics.md`` holds the formulas.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "AcceptanceCounts",
    "AggregateSpecDecodeMetrics",
    "Counter",
    "Metric",
    "RequestSpecDecodeMetrics",
    "SourceTotals",
    "Vector",
    "merge",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric with its labels, shaped as vLLM's ``get_metrics()`` gives it."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """A count that only grows; seconds are fractional."""

    value: int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector(Metric):
    """Counts by draft position."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class SourceTotals:
    """Tokens that came from one proposer."""

    num_draft_tokens: int
    num_accepted_tokens: int
    num_verified_accepted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCounts:
    """Counts of one request, or of all. ``num_spec_tokens`` is the configured K (vLLM's name)."""

    num_spec_tokens: int
    num_steps: int
    """Verify steps, drafted or not; each emits at least one token before cuts."""
    num_drafts: int
    num_draft_tokens: int
    """Draft tokens that could have been accepted: of a tree those on its longest path, else all."""
    num_emitted_tokens: int
    """Tokens emitted by all steps."""
    num_draft_emitted_tokens: int
    """Tokens emitted by the steps that had a draft."""
    histogram: tuple[int, ...]
    """``[K + 1]``: entry j counts the drafts of which exactly j tokens were accepted and committed."""
    verified_histogram: tuple[int, ...]
    """The same as the rule decided it, before stop and length cuts."""
    num_draft_nodes: int = 0
    """Draft tokens that the target read: of trees all nodes, of chains the draft tokens."""
    sources: Mapping[str, SourceTotals] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Decoding steps without a draft: reason -> count."""

    @property
    def num_accepted_tokens(self) -> int:
        return _total(self.histogram)

    @property
    def num_verified_accepted_tokens(self) -> int:
        return _total(self.verified_histogram)

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        """``[K]``: how often the draft token at each position was accepted."""
        return _per_position(self.histogram)

    @property
    def num_verified_accepted_tokens_per_pos(self) -> list[int]:
        return _per_position(self.verified_histogram)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per draft, the recovered or bonus token included; 1.0 when nothing was drafted."""
        return self.num_draft_emitted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def verified_mean_acceptance_length(self) -> float:
        """vLLM's formula on its (uncut) counts: 1 + accepted / drafts; 1.0 when nothing was drafted."""
        return 1 + self.num_verified_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted of drafted tokens; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def verified_draft_acceptance_rate(self) -> float | None:
        return self.num_verified_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_rate_per_pos(self) -> list[float] | None:
        """``[K]``: accepted at the position / all drafts, shorter ones included (vLLM's denominator)."""
        if not self.num_drafts:
            return None
        return [accepted / self.num_drafts for accepted in self.num_accepted_tokens_per_pos]

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens emitted per step over *all* steps: what speculation saves in target forwards."""
        return self.num_emitted_tokens / self.num_steps if self.num_steps else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the first seven under the names of vLLM's per-request HTTP object."""
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": list(self.histogram),
            "num_spec_steps": self.num_drafts,
            "num_accepted_draft_tokens": self.num_accepted_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.num_spec_tokens,
            "num_steps": self.num_steps,
            "num_emitted_tokens": self.num_emitted_tokens,
            "tokens_per_step": self.tokens_per_step,
            "acceptance_rate_per_pos": self.acceptance_rate_per_pos,
            "num_draft_nodes": self.num_draft_nodes,
            "num_verified_accepted_tokens": self.num_verified_accepted_tokens,
            "verified_mean_acceptance_length": self.verified_mean_acceptance_length,
            "verified_draft_acceptance_rate": self.verified_draft_acceptance_rate,
            "verified_acceptance_histogram": list(self.verified_histogram),
            "sources": {name: _source_dict(totals) for name, totals in self.sources.items()},
            "skipped": dict(self.skipped),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpecDecodeMetrics(AcceptanceCounts):
    """One request run. The two lists have one entry per draft, in order (vLLM's "detailed" fields)."""

    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        lists = {"per_step_accepted": list(self.per_step_accepted), "per_step_drafted": list(self.per_step_drafted)}
        return AcceptanceCounts.as_dict(self) | lists


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateSpecDecodeMetrics(AcceptanceCounts):
    """All requests of a session, running ones included. Times are wall-clock seconds of whole batch steps."""

    num_requests: int
    num_batch_steps: int
    num_prefill_tokens: int
    propose_s: float
    forward_s: float
    verify_s: float
    host_s: float
    faults: Mapping[str, int] = field(default_factory=dict)
    verify_method_effective: Mapping[str, int] = field(default_factory=dict)
    """Rule -> batch steps it verified."""
    num_flattened_trees: int = 0
    """Trees cut to their first path, because the target or the rule takes chains only."""

    def as_dict(self) -> dict[str, Any]:
        return AcceptanceCounts.as_dict(self) | {
            "num_requests": self.num_requests,
            "num_batch_steps": self.num_batch_steps,
            "num_prefill_tokens": self.num_prefill_tokens,
            "num_flattened_trees": self.num_flattened_trees,
            "propose_s": self.propose_s,
            "forward_s": self.forward_s,
            "verify_s": self.verify_s,
            "host_s": self.host_s,
            "faults": dict(self.faults),
            "verify_method_effective": dict(self.verify_method_effective),
        }


def merge(parts: Iterable[AcceptanceCounts]) -> AcceptanceCounts:
    """The counts of several requests together; K is the largest of theirs."""
    listed = list(parts)
    sources: dict[str, SourceTotals] = {}
    skipped: dict[str, int] = {}
    for part in listed:
        for name, totals in part.sources.items():
            sources[name] = _add_sources(sources.get(name), totals)
        for reason, count in part.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    return AcceptanceCounts(
        num_spec_tokens=max((part.num_spec_tokens for part in listed), default=0),
        num_steps=sum(part.num_steps for part in listed),
        num_drafts=sum(part.num_drafts for part in listed),
        num_draft_tokens=sum(part.num_draft_tokens for part in listed),
        num_draft_nodes=sum(part.num_draft_nodes for part in listed),
        num_emitted_tokens=sum(part.num_emitted_tokens for part in listed),
        num_draft_emitted_tokens=sum(part.num_draft_emitted_tokens for part in listed),
        histogram=_add_histograms([part.histogram for part in listed]),
        verified_histogram=_add_histograms([part.verified_histogram for part in listed]),
        sources=sources,
        skipped=skipped,
    )


def _add_histograms(histograms: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0)) or (0,)


def _add_sources(first: SourceTotals | None, second: SourceTotals) -> SourceTotals:
    if first is None:
        return second
    return SourceTotals(
        first.num_draft_tokens + second.num_draft_tokens,
        first.num_accepted_tokens + second.num_accepted_tokens,
        first.num_verified_accepted_tokens + second.num_verified_accepted_tokens,
    )


def _total(histogram: Sequence[int]) -> int:
    return sum(accepted * count for accepted, count in enumerate(histogram))


def _per_position(histogram: Sequence[int]) -> list[int]:
    """A draft with j accepted tokens accepted exactly the positions 0 .. j - 1."""
    counts: list[int] = []
    reached = 0
    for count in reversed(histogram[1:]):
        reached += count
        counts.append(reached)
    return counts[::-1]


def _source_dict(totals: SourceTotals) -> dict[str, int]:
    return {
        "num_draft_tokens": totals.num_draft_tokens,
        "num_accepted_tokens": totals.num_accepted_tokens,
        "num_verified_accepted_tokens": totals.num_verified_accepted_tokens,
    }
