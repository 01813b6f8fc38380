"""Acceptance accounting: the observer plugin, its records, their rendering and the Prometheus exporter."""

from __future__ import annotations

from specplug.metrics.acceptance import AcceptanceMetrics
from specplug.metrics.records import (
    AcceptanceCounts,
    AggregateSpecDecodeMetrics,
    Counter,
    Metric,
    RequestSpecDecodeMetrics,
    SourceTotals,
    Vector,
    merge,
)
from specplug.metrics.render import acceptance_line, stats_lines

__all__ = [
    "AcceptanceCounts",
    "AcceptanceMetrics",
    "AggregateSpecDecodeMetrics",
    "Counter",
    "Metric",
    "RequestSpecDecodeMetrics",
    "SourceTotals",
    "Vector",
    "acceptance_line",
    "merge",
    "stats_lines",
]
