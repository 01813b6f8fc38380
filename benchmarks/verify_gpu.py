"""The verification kernels on a CUDA device: GPU time inside captured graphs, beside the floor and plain torch.

Floor: each fp32 logit row that is needed read once, at the copy bandwidth measured here. Filters are on a line of
their own. Nothing is timed where kernels and reference differ.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import circumstances, write_csv
from peers.verify_step import Step, make_step, torch_batched

from specplug.testing.kernel_check import check_kernels
from specplug.testing.verify_cases import VerifyCase
from specplug.types import Dense, LawSpan, OneHot
from specplug.verify.inputs import RowInputs, Rule, VerifyInputs

NUM_DRAFTS, VOCAB = 5, 151936
FILTERS: dict[str, Any] = {"top_k": 50, "top_p": 0.95}


def check_correctness() -> list[str]:
    cases = [
        VerifyCase(vocab, 7, 3, device="cuda", has_filters=filters) for vocab in (129, 49152) for filters in (0, 1)
    ]
    return [line for case in cases for line in check_kernels(case)]


def graph_ms(run: Callable[[], Any], num_runs: int = 20, num_rounds: int = 15) -> float:
    """GPU milliseconds of one ``run``: the median over replays of a graph that holds ``num_runs`` of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_runs):
            run()
    graph.replay()
    times = []
    for _ in range(num_rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / num_runs)
    return statistics.median(times)


def eager_ms(run: Callable[[], Any], num_runs: int = 20) -> float:
    """Milliseconds of one ``run`` between two events, launches included."""
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_runs):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / num_runs


def copy_bandwidth() -> float:
    """Bytes per second of a device copy, reads and writes counted."""
    source = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (graph_ms(lambda: target.copy_(source), num_runs=4) * 1e-3)


def problem_of(step: Step, rule: Rule, **filters: Any) -> Any:
    from specplug.verify.kernels.problem import pack

    batch, num_drafts = step.tokens.shape
    slots, vocab = batch * num_drafts, step.target.shape[-1]
    law = Dense(step.draft.reshape(slots, vocab)) if rule in ("standard", "block") else OneHot()
    rows = tuple(RowInputs(rule, seed=row, position=100, step=1, **filters) for row in range(batch))
    logits, ids = step.target.reshape(-1, vocab), step.tokens.reshape(-1)
    return pack(VerifyInputs(logits, ids, (num_drafts,) * batch, (LawSpan(0, slots, law),), rows))


def count_launches(run: Callable[[], Any]) -> int:
    """Kernels on the device in one ``run``."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in trace.events())


def stats_line(bandwidth: float) -> dict[str, object]:
    """The log-sum-exp pass alone, against copy bandwidth."""
    from specplug.verify.kernels.row_stats import row_stats

    problem = problem_of(make_step(32, NUM_DRAFTS, VOCAB, is_greedy=False, device="cuda"), "match")
    ms = graph_ms(lambda: row_stats(problem))
    share = problem.logits.numel() * 4 / (ms * 1e-3) / bandwidth
    return {"what": "log-sum-exp pass", "batch": 32, "ms": round(ms, 4), "share_of_copy_bandwidth": round(share, 3)}


def verify_line(batch: int, rule: Rule, bandwidth: float, **filters: Any) -> dict[str, object]:
    """A whole verification, against its floor and plain torch."""
    from specplug.verify.kernels.rules import launch

    step = make_step(batch, NUM_DRAFTS, VOCAB, is_greedy=rule == "greedy", device="cuda")
    problem = problem_of(step, rule, **filters)
    ms = graph_ms(lambda: launch(problem))
    num_rows = problem.num_rows + problem.dense_slots.shape[0]
    floor = num_rows * VOCAB * 4 / bandwidth * 1e3
    row: dict[str, object] = {
        "what": f"verify {rule}" + (" with filters" if filters else ""),
        "batch": batch,
        "ms": round(ms, 4),
        "floors": round(ms / floor, 2),
        "launches": count_launches(lambda: launch(problem)),
    }
    if rule in ("greedy", "standard") and not filters:
        row["faster_than_torch"] = round(eager_ms(torch_batched(step)) / ms, 2)
    return row


def main() -> int:
    if not torch.cuda.is_available():
        print("GPU: open, no CUDA device here")
        return 0
    if wrong := check_correctness():
        print("kernels differ from the reference; nothing is timed:", *wrong, sep="\n  ")
        return 1
    bandwidth = copy_bandwidth()
    about = circumstances(0.0) | {"device": torch.cuda.get_device_name(), "GB_per_s": f"{bandwidth / 1e9:.0f}"}
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    rows = [stats_line(bandwidth)]
    rules: tuple[Rule, ...] = ("greedy", "match", "standard", "block", "coupled")
    rows += [verify_line(batch, rule, bandwidth) for batch in (1, 8, 32) for rule in rules]
    rows += [verify_line(32, rule, bandwidth, **FILTERS) for rule in ("match", "standard")]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    print("written:", write_csv("verify_gpu", [row | about for row in rows]).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
