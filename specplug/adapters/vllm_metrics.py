"""Acceptance counts of a vLLM worker, exported beside vLLM's own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from specplug.metrics import Counter, Metric, Vector
from specplug.metrics.export import serve

__all__ = ["MetricsExport", "as_own", "flat_counts"]

_LOGGER = logging.getLogger("specplug.vllm")
_THEIRS, _OURS = "vllm:spec_decode_", "specplug:"
UPDATE_INTERVAL_S = 1.0


def as_own(metrics: Iterable[Metric]) -> list[Metric]:
    """The same under names that begin with ``specplug:``: the server counts under vLLM's names itself."""
    return [replace(metric, name=metric.name.replace(_THEIRS, _OURS)) for metric in metrics]


def flat_counts(metrics: Iterable[Metric]) -> dict[str, Any]:
    """``{"specplug:num_drafts": 7, 'specplug:num_faults{reason="..."}': 1, ...}``, as workers hand them over."""
    return {
        metric.name + _shown(metric.labels): metric.value if isinstance(metric, Counter) else metric.values
        for metric in metrics
        if isinstance(metric, Counter | Vector)
    }


def _shown(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""


class MetricsExport:
    """Two ways out of a worker process, for Prometheus.

    With a ``port``, ``http://127.0.0.1:port/metrics`` of its own. Where ``PROMETHEUS_MULTIPROC_DIR`` is set, vLLM's own
    ``/metrics`` shows the counts as well: the server adds up what its processes write there.
    """

    def __init__(self, source: Callable[[], Sequence[Metric]], *, model_name: Any, port: int | None) -> None:
        name = model_name[0] if isinstance(model_name, list | tuple) and model_name else model_name
        self._source = source
        self._labels = {"model_name": str(name)} if name else {}
        self._stop_serving = None if port is None else self._serve(port)
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            self._thread = threading.Thread(target=self._share, name="specplug-metrics", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop exporting."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._stop_serving is not None:
            self._stop_serving()
            self._stop_serving = None

    def _share(self) -> None:
        """Beside the steps, which need not wait for it."""
        counters = _SharedCounters(self._labels)
        is_last = False
        while not is_last:
            is_last = self._is_closed.wait(UPDATE_INTERVAL_S)
            try:
                counters.add(self._source())
            except Exception:
                _LOGGER.exception("specplug: the counts for /metrics are off")
                return

    def _serve(self, port: int) -> Callable[[], None] | None:
        try:
            stop = serve(self._source, port, labels=self._labels)
        except (OSError, ImportError) as error:
            _LOGGER.error("metrics_port=%d: no counts are served there: %s", port, error)
            return None
        _LOGGER.info("acceptance counts at http://127.0.0.1:%d/metrics", port)
        return stop


class _SharedCounters:
    """prometheus_client's counters, which several processes may add to, brought up to given totals."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._families: dict[str, Any] = {}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(self, metrics: Iterable[Metric]) -> None:
        for name, labels, total in _samples(metrics):
            values = (*self._labels.values(), *labels.values())
            more = total - self._totals.get((name, values), 0)
            if more > 0:
                self._family(name, labels).labels(*values).inc(more)
                self._totals[name, values] = total

    def _family(self, name: str, labels: dict[str, str]) -> Any:
        if name not in self._families:
            import prometheus_client

            self._families[name] = prometheus_client.Counter(
                name, f"{name}, see docs/metrics.md", [*self._labels, *labels]
            )
        return self._families[name]


def _samples(metrics: Iterable[Metric]) -> Iterator[tuple[str, dict[str, str], float]]:
    for metric in metrics:
        if isinstance(metric, Counter):
            yield metric.name, metric.labels, metric.value
        elif isinstance(metric, Vector):
            for position, value in enumerate(metric.values):
                yield metric.name, {**metric.labels, "position": str(position)}, value
