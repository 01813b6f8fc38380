"""Prometheus export of ``LLM.get_metrics()`` (extra ``metrics``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specplug.metrics.records import Counter, Metric, Vector

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

__all__ = ["MetricsCollector", "register", "serve"]

MetricsSource = Callable[[], Sequence[Metric]]


class MetricsCollector:
    """A Prometheus collector that reads the metrics anew at each scrape: nothing is counted twice.

    ``source`` is ``llm.get_metrics``; ``labels`` (such as ``{"model_name": ...}``) go on every sample. Counters are
    exported with the suffix ``_total``, vectors as a counter with the label ``position``, as vLLM does.
    """

    def __init__(self, source: MetricsSource, labels: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._labels = dict(labels or {})

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        for name, metrics in _by_name(self._source()).items():
            samples = [sample for metric in metrics for sample in self._samples(metric)]
            names = list(samples[0][0]) if samples else [*self._labels, "position"]
            family = CounterMetricFamily(name, f"{name}, see docs/metrics.md", labels=names)
            for labels, value in samples:
                family.add_metric(list(labels.values()), value)
            yield family

    def _samples(self, metric: Metric) -> Iterator[tuple[dict[str, str], float]]:
        labels = self._labels | metric.labels
        if isinstance(metric, Counter):
            yield labels, metric.value
        elif isinstance(metric, Vector):
            for position, value in enumerate(metric.values):
                yield labels | {"position": str(position)}, value


def _by_name(metrics: Iterable[Metric]) -> dict[str, list[Metric]]:
    grouped: dict[str, list[Metric]] = {}
    for metric in metrics:
        grouped.setdefault(metric.name, []).append(metric)
    return grouped


def register(
    source: MetricsSource, *, labels: Mapping[str, str] | None = None, registry: CollectorRegistry | None = None
) -> MetricsCollector:
    """Add the metrics of ``source`` to ``registry`` (prometheus_client's default one)."""
    from prometheus_client import REGISTRY

    collector = MetricsCollector(source, labels)
    (registry or REGISTRY).register(collector)
    return collector


def serve(source: MetricsSource, port: int, *, labels: Mapping[str, str] | None = None) -> Callable[[], None]:
    """Answer ``http://127.0.0.1:port/metrics`` with the metrics of ``source``; returns the function that stops it."""
    from prometheus_client import start_http_server
    from prometheus_client.registry import CollectorRegistry

    registry = CollectorRegistry()
    register(source, labels=labels, registry=registry)
    server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
