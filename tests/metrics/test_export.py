from __future__ import annotations

import socket
import urllib.request

import pytest

from specplug.metrics import Counter, Metric, Vector
from specplug.metrics.export import register, serve

prometheus_client = pytest.importorskip("prometheus_client")

METRICS: list[Metric] = [
    Counter(name="vllm:spec_decode_num_drafts", value=3),
    Vector(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[2, 1]),
    Counter(name="specplug:num_skipped_drafts", labels={"reason": "limit"}, value=4),
    Counter(name="specplug:num_skipped_drafts", labels={"reason": "no_proposal"}, value=5),
]


def test_counters_and_vectors_are_exported_under_vllms_names() -> None:
    registry = prometheus_client.CollectorRegistry()
    register(lambda: METRICS, labels={"model_name": "m"}, registry=registry)
    text = prometheus_client.generate_latest(registry).decode()
    assert 'vllm:spec_decode_num_drafts_total{model_name="m"} 3.0' in text
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 1.0' in text
    assert 'specplug:num_skipped_drafts_total{model_name="m",reason="limit"} 4.0' in text
    assert text.count("# TYPE specplug:num_skipped_drafts_total counter") == 1


def test_each_scrape_reads_anew() -> None:
    metrics: list[Metric] = [Counter(name="specplug:num_steps", value=1)]
    registry = prometheus_client.CollectorRegistry()
    register(lambda: metrics, registry=registry)
    assert registry.get_sample_value("specplug:num_steps_total") == 1
    metrics[0] = Counter(name="specplug:num_steps", value=2)
    assert registry.get_sample_value("specplug:num_steps_total") == 2


def test_a_vector_without_positions_is_no_error() -> None:
    registry = prometheus_client.CollectorRegistry()
    register(lambda: [Vector(name="specplug:empty", values=[])], registry=registry)
    assert "specplug:empty_total" in prometheus_client.generate_latest(registry).decode()


def test_serve_answers_over_http() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stop = serve(lambda: METRICS, port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b"vllm:spec_decode_num_drafts_total 3.0" in answer.read()
    finally:
        stop()
