"""Acceptance counts as text. Length and rate always stand together with K, since they mean different things."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from specplug.metrics.records import AcceptanceCounts, AggregateSpecDecodeMetrics

__all__ = ["acceptance_line", "stats_lines"]

_ENOUGH_TO_WORRY = 200
_LOSSLESS_RULES = ("match", "standard", "block", "coupled")


def acceptance_line(counts: AcceptanceCounts) -> str:
    """For example ``length 2.30 (incl. bonus), rate 43 % of drafted, K=3``."""
    rate = counts.draft_acceptance_rate
    shown = "none drafted" if rate is None else f"rate {100 * rate:.0f} % of drafted"
    return f"length {counts.mean_acceptance_length:.2f} (incl. bonus), {shown}, K={counts.num_spec_tokens}"


def stats_lines(counts: AggregateSpecDecodeMetrics, elapsed_s: float) -> list[str]:
    """Everything ``--stats`` prints; ``elapsed_s`` is the wall-clock time of generating, prefill included."""
    return list(_lines(counts, elapsed_s))


def _lines(counts: AggregateSpecDecodeMetrics, elapsed_s: float) -> Iterator[str]:
    speed = counts.num_emitted_tokens / elapsed_s if elapsed_s > 0 else 0.0
    yield f"speed        {speed:.1f} tokens/s ({counts.num_emitted_tokens} tokens in {elapsed_s:.2f} s with prefill)"
    if counts.tokens_per_step is not None:
        yield f"per step     {counts.tokens_per_step:.2f} tokens over all {counts.num_steps} steps"
    if counts.num_spec_tokens:
        yield f"acceptance   {acceptance_line(counts)}"
    yield from _draft_lines(counts)
    if counts.faults:
        yield f"faults       {_listed(counts.faults)}"
    yield f"time         {_times(counts)}"


def _draft_lines(counts: AggregateSpecDecodeMetrics) -> Iterator[str]:
    others = {name: steps for name, steps in counts.verify_method_effective.items() if name not in _LOSSLESS_RULES}
    if others:
        yield f"rule         {_listed(others)} (not one of the built-in lossless rules)"
    rates = counts.acceptance_rate_per_pos
    if rates is not None:
        yield f"per position {_positions(rates)}"
    if counts.num_draft_nodes != counts.num_draft_tokens:
        yield f"trees        {counts.num_draft_nodes} nodes verified, {counts.num_draft_tokens} tokens on longest paths"
    cut = counts.num_verified_accepted_tokens - counts.num_accepted_tokens
    if cut:
        yield f"cut          {cut} accepted tokens discarded by a stop or length limit"
    for source, totals in counts.sources.items():
        yield f"source       {source}: {totals.num_accepted_tokens} of {totals.num_draft_tokens} draft tokens accepted"
    if counts.skipped and counts.num_spec_tokens:
        yield f"no draft     {_listed(counts.skipped)}"
    if counts.num_draft_tokens >= _ENOUGH_TO_WORRY and not counts.num_verified_accepted_tokens:
        yield (
            f"warning      {counts.num_draft_tokens} tokens drafted, none accepted: usual causes are a method that "
            "does not fit the text, a draft of another model family, or a wrong vocabulary table"
        )


def _positions(rates: Sequence[float]) -> str:
    """Up to the last position at which anything was accepted; the first in any case."""
    last = max((position for position, rate in enumerate(rates, 1) if rate), default=1)
    shown = [f"{position}: {100 * rate:.0f} %" for position, rate in enumerate(rates[:last], 1)]
    return "  ".join(shown if last == len(rates) else [*shown, f"{last + 1} on: 0 %"])


def _times(counts: AggregateSpecDecodeMetrics) -> str:
    steps = max(counts.num_batch_steps, 1)
    parts = {"propose": counts.propose_s, "forward": counts.forward_s, "verify": counts.verify_s, "host": counts.host_s}
    return "per batch step: " + ", ".join(f"{name} {1000 * spent / steps:.2f} ms" for name, spent in parts.items())


def _listed(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counted.items()))
