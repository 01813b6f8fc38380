"""The observer plugin ``acceptance``: counts what every step drafted, accepted and emitted.

A batch step costs a few microseconds per request: additions of Python ints, whatever the draft length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specplug.hooks.markers import hookimpl
from specplug.methods import MethodSpec, PluginConfig, PluginContext
from specplug.metrics.records import (
    AggregateSpecDecodeMetrics,
    Counter,
    Metric,
    RequestSpecDecodeMetrics,
    SourceTotals,
    Vector,
)
from specplug.types import Request, RequestStep, Session, SourceCount, StepOutcome

__all__ = ["SPECPLUG_API", "AcceptanceMetrics", "specplug_register"]

SPECPLUG_API = (1, 0)


class _Tally:
    """Running counts of one request, or of all."""

    __slots__ = (
        "draft_emitted",
        "draft_nodes",
        "draft_tokens",
        "drafts",
        "emitted",
        "histogram",
        "num_bins",
        "num_speculative_tokens",
        "skipped",
        "sources",
        "steps",
        "verified_histogram",
    )

    def __init__(self, num_speculative_tokens: int) -> None:
        self.steps = self.drafts = self.draft_tokens = self.draft_nodes = self.emitted = self.draft_emitted = 0
        self.num_speculative_tokens = num_speculative_tokens
        # as long as the longest accepted draft so far, not K, which many requests never come near
        self.num_bins = 0
        self.histogram: list[int] = []
        self.verified_histogram: list[int] = []
        self.sources: dict[str, list[int]] = {}
        self.skipped: dict[str, int] = {}

    def add(self, row: RequestStep) -> None:
        self.steps += 1
        self.emitted += row.num_emitted_tokens
        if row.num_draft_tokens:
            self.drafts += 1
            self.draft_tokens += row.num_draft_tokens
            self.draft_nodes += row.num_draft_tokens if row.num_draft_nodes is None else row.num_draft_nodes
            self.draft_emitted += row.num_emitted_tokens
            if row.num_verified_accepted_tokens >= self.num_bins:
                self._make_room(row.num_verified_accepted_tokens + 1)
            self.histogram[row.num_accepted_tokens] += 1
            self.verified_histogram[row.num_verified_accepted_tokens] += 1
            for count in row.sources:
                self._add_source(count)
        elif row.skip_reason is not None:
            self.skipped[row.skip_reason] = self.skipped.get(row.skip_reason, 0) + 1

    def _add_source(self, count: SourceCount) -> None:
        totals = self.sources.get(count.source)
        if totals is None:
            totals = self.sources[count.source] = [0, 0, 0]
        totals[0] += count.num_draft_tokens
        totals[1] += count.num_accepted_tokens
        totals[2] += count.num_verified_accepted_tokens

    def _make_room(self, num_bins: int) -> None:
        for histogram in (self.histogram, self.verified_histogram):
            histogram.extend([0] * (num_bins - self.num_bins))
        self.num_bins = num_bins

    def _padded(self, histogram: Sequence[int]) -> tuple[int, ...]:
        return (*histogram, *[0] * (self.num_speculative_tokens + 1 - len(histogram)))

    def fields(self) -> dict[str, Any]:
        """The fields of ``AcceptanceCounts``, copied."""
        return {
            "num_spec_tokens": self.num_speculative_tokens,
            "num_steps": self.steps,
            "num_drafts": self.drafts,
            "num_draft_tokens": self.draft_tokens,
            "num_draft_nodes": self.draft_nodes,
            "num_emitted_tokens": self.emitted,
            "num_draft_emitted_tokens": self.draft_emitted,
            "histogram": self._padded(self.histogram),
            "verified_histogram": self._padded(self.verified_histogram),
            "sources": {name: SourceTotals(*totals) for name, totals in self.sources.copy().items()},
            "skipped": self.skipped.copy(),
        }


class _RequestTally(_Tally):
    __slots__ = ("per_step_accepted", "per_step_drafted")

    def __init__(self, num_speculative_tokens: int) -> None:
        super().__init__(num_speculative_tokens)
        self.per_step_accepted: list[int] = []
        self.per_step_drafted: list[int] = []

    def add(self, row: RequestStep) -> None:
        super().add(row)
        if row.num_draft_tokens:
            self.per_step_accepted.append(row.num_accepted_tokens)
            self.per_step_drafted.append(row.num_draft_tokens)


class _Totals:
    """What is counted per batch step rather than per request."""

    def __init__(self) -> None:
        self.requests = self.batch_steps = self.prefill_tokens = self.flattened_trees = 0
        self.propose_s = self.forward_s = self.verify_s = self.host_s = 0.0
        self.faults: dict[str, int] = {}
        self.verify_method_effective: dict[str, int] = {}

    def add(self, outcome: StepOutcome) -> None:
        self.batch_steps += 1
        self.prefill_tokens += outcome.num_prefill_tokens
        self.flattened_trees += outcome.num_flattened_trees
        self.propose_s += outcome.propose_s
        self.forward_s += outcome.forward_s
        self.verify_s += outcome.verify_s
        self.host_s += outcome.host_s
        for reason, count in outcome.faults.items():
            self.faults[reason] = self.faults.get(reason, 0) + count
        if outcome.rows and outcome.verify_method:
            steps = self.verify_method_effective
            steps[outcome.verify_method] = steps.get(outcome.verify_method, 0) + 1


class AcceptanceMetrics:
    """Acceptance accounting of one session, per request and over all.

    ``num_speculative_tokens``: the configured K; no request's draft is longer. A request's record exists from its
    ``specplug_start_request`` to its ``specplug_finish_request``: an id that comes again starts at zero.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self._start(num_speculative_tokens)

    def _start(self, num_speculative_tokens: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._all = _Tally(num_speculative_tokens)
        self._totals = _Totals()
        self._requests: dict[str, _RequestTally] = {}

    @hookimpl
    def specplug_start_session(self, session: Session) -> None:
        self._start(session.num_speculative_tokens)

    @hookimpl
    def specplug_start_request(self, request: Request) -> None:
        self._requests[request.request_id] = _RequestTally(self._num_speculative_tokens)
        self._totals.requests += 1

    @hookimpl
    def specplug_finish_request(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)

    @hookimpl
    def specplug_accept_metrics(self, outcome: StepOutcome) -> None:
        self._totals.add(outcome)
        for row in outcome.rows:
            self._all.add(row)
            tally = self._requests.get(row.request_id)
            if tally is not None:
                tally.add(row)

    def request_metrics(self, request_id: str) -> RequestSpecDecodeMetrics | None:
        """The counts of a running request so far; None for an id that is not running."""
        tally = self._requests.get(request_id)
        if tally is None:
            return None
        return RequestSpecDecodeMetrics(
            **tally.fields(),
            per_step_accepted=tally.per_step_accepted.copy(),
            per_step_drafted=tally.per_step_drafted.copy(),
        )

    def aggregate(self) -> AggregateSpecDecodeMetrics:
        """The counts of all requests since the session started."""
        totals = self._totals
        return AggregateSpecDecodeMetrics(
            **self._all.fields(),
            num_requests=totals.requests,
            num_batch_steps=totals.batch_steps,
            num_prefill_tokens=totals.prefill_tokens,
            num_flattened_trees=totals.flattened_trees,
            propose_s=totals.propose_s,
            forward_s=totals.forward_s,
            verify_s=totals.verify_s,
            host_s=totals.host_s,
            faults=totals.faults.copy(),
            verify_method_effective=totals.verify_method_effective.copy(),
        )

    def metrics(self) -> list[Metric]:
        """The aggregate as vLLM-shaped metric objects: vLLM's four names first, then ours (prefix ``specplug:``)."""
        counts = self.aggregate()
        return [
            Counter(name="vllm:spec_decode_num_drafts", value=counts.num_drafts),
            Counter(name="vllm:spec_decode_num_draft_tokens", value=counts.num_draft_tokens),
            Counter(name="vllm:spec_decode_num_accepted_tokens", value=counts.num_accepted_tokens),
            Vector(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=counts.num_accepted_tokens_per_pos),
            *_own_metrics(counts),
        ]


_OWN_COUNTERS = (
    "num_verified_accepted_tokens",
    "num_draft_nodes",
    "num_steps",
    "num_emitted_tokens",
    "num_draft_emitted_tokens",
    "num_requests",
    "num_batch_steps",
    "num_prefill_tokens",
    "num_flattened_trees",
)
_OWN_TIMES = ("propose", "forward", "verify", "host")


def _own_metrics(counts: AggregateSpecDecodeMetrics) -> Iterator[Metric]:
    for name in _OWN_COUNTERS:
        yield Counter(name=f"specplug:{name}", value=getattr(counts, name))
    yield Vector(
        name="specplug:num_verified_accepted_tokens_per_pos", values=counts.num_verified_accepted_tokens_per_pos
    )
    for phase in _OWN_TIMES:
        yield Counter(name="specplug:step_seconds", labels={"phase": phase}, value=getattr(counts, f"{phase}_s"))
    for source, totals in counts.sources.items():
        labels = {"source": source}
        yield Counter(name="specplug:source_num_draft_tokens", labels=labels, value=totals.num_draft_tokens)
        yield Counter(name="specplug:source_num_accepted_tokens", labels=labels, value=totals.num_accepted_tokens)
    for reason, count in counts.skipped.items():
        yield Counter(name="specplug:num_skipped_drafts", labels={"reason": reason}, value=count)
    for reason, count in counts.faults.items():
        yield Counter(name="specplug:num_faults", labels={"reason": reason}, value=count)


def _create(_config: PluginConfig, context: PluginContext) -> AcceptanceMetrics:
    return AcceptanceMetrics(context.session.num_speculative_tokens)


@hookimpl
def specplug_register() -> Sequence[MethodSpec]:
    return [
        MethodSpec(
            name="acceptance",
            kind="observer",
            factory=_create,
            summary="acceptance accounting per request and over all, on by default",
        )
    ]
