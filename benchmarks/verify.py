"""One verification step on the CPU beside transformers, batched torch and, where installed, vLLM.

5 drafts, fp32 logits, greedy and temperature 1. The implementations take turns; the ratio is that of neighbouring
runs of the best peer and ours, with its 95 % interval. "reads" is our time in units of one read (sum) of the target
logits, all rows. Correctness comes first: no time is printed if ours differs from the reference. On a CUDA device
the kernels are measured too (see verify_gpu.py); without one the table says so.

    scripts/bench verify [--batch 1 8 32] [--vocab 49152 151936] [--rounds 8] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
from common import circumstances, paired_ratio, wait_until_idle, write_csv
from peers.verify_step import Step, available, make_step

from specplug.testing.verify_cases import VerifyCase, differences, random_inputs
from specplug.types import Dense, LawSpan, OneHot
from specplug.verify.inputs import RowInputs, Rule, VerifyInputs
from specplug.verify.reference import verify_reference
from specplug.verify.torch_rules import TorchRules

NUM_DRAFTS = 5
Call = Callable[[], Any]


def check_correctness() -> list[str]:
    """Differences between ours and the reference; none is wanted."""
    found = []
    for vocab in (129, 32001, 49152):
        for has_filters in (False, True):
            case = VerifyCase(vocab, batch_size=7, max_drafts=3, has_filters=has_filters, seed=vocab)
            inputs = random_inputs(case)
            found += differences(TorchRules().verify(inputs), verify_reference(inputs))
    return found


def ours(step: Step, rule: Rule) -> Call:
    """Our call for a step: its draft logits as dense laws, or certain drafts under greedy and match."""
    batch, num_drafts = step.tokens.shape
    slots, vocab = batch * num_drafts, step.target.shape[-1]
    law = Dense(step.draft.reshape(slots, vocab)) if rule in ("standard", "block") else OneHot()
    logits, ids = step.target.reshape(-1, vocab), step.tokens.reshape(-1)
    rules, count = TorchRules(), [0]

    def call() -> Any:
        count[0] += 1  # another verify step, other noise
        rows = tuple(RowInputs(rule, seed=row, position=100, step=count[0]) for row in range(batch))
        return rules.verify(VerifyInputs(logits, ids, (num_drafts,) * batch, (LawSpan(0, slots, law),), rows))

    return call


def time_of(call: Call, seconds: float) -> list[float]:
    """Milliseconds of single calls, at least three."""
    times: list[float] = []
    end = perf_counter() + seconds
    while perf_counter() < end or len(times) < 3:
        start = perf_counter()
        call()
        times.append((perf_counter() - start) * 1e3)
    return times


def measure(calls: dict[str, Call], num_rounds: int, seconds: float) -> dict[str, list[list[float]]]:
    """Per implementation and round its single times; the implementations take turns."""
    for call in calls.values():
        call()
    found: dict[str, list[list[float]]] = {name: [] for name in calls}
    for number in range(num_rounds):
        names = list(calls) if number % 2 == 0 else list(reversed(calls))
        for name in names:
            found[name].append(time_of(calls[name], seconds))
    return found


def lines(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row per implementation and setting."""
    for vocab in args.vocab:
        for batch in args.batch:
            for is_greedy in (True, False):
                step = make_step(batch, NUM_DRAFTS, vocab, is_greedy=is_greedy)
                rules: tuple[Rule, ...] = ("greedy",) if is_greedy else ("standard", "match", "block")
                calls = {f"specplug {rule}": ours(step, rule) for rule in rules}
                calls |= {name: make(step) for name, make in available().items()}
                calls["one read"] = step.target.sum
                times = measure(calls, args.rounds, args.seconds)
                yield from summarise(times, {"vocab": vocab, "batch": batch, "mode": "greedy" if is_greedy else "T=1"})


def summarise(times: dict[str, list[list[float]]], setting: dict[str, object]) -> Iterator[dict[str, object]]:
    medians = {name: [statistics.median(single) for single in rounds] for name, rounds in times.items()}
    peers = {name: values for name, values in medians.items() if name != "one read" and not name.startswith("specplug")}
    best = min(peers, key=lambda name: statistics.median(peers[name]))
    read = statistics.median(medians["one read"])
    for name, rounds in times.items():
        every = sorted(single for values in rounds for single in values)
        row: dict[str, object] = {
            **setting,
            "implementation": name,
            "median": round(statistics.median(every), 4),
            "p20": round(every[len(every) // 5], 4),
            "p80": round(every[len(every) * 4 // 5], 4),
            "unit": "ms",
            "reads": round(statistics.median(every) / read, 2),
        }
        if name.startswith("specplug"):
            ratio = paired_ratio(peers[best], medians[name])
            row |= {"best_peer": best, "faster": round(ratio.median, 2), "low95": round(ratio.low, 2)}
        yield row


def show(row: dict[str, object]) -> None:
    setting = f"V {row['vocab']:>6} B {row['batch']:>2} {row['mode']:<6} {row['implementation']:<18}"
    time = f"{row['median']:>9.3f} ms [{row['p20']:.3f}, {row['p80']:.3f}]  {row['reads']:>6} reads"
    against = f"  {row['faster']}x {row['best_peer']} (at least {row['low95']}x)" if "faster" in row else ""
    print(setting, time + against, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.15, help="per implementation and round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if wrong := check_correctness():
        print("ours differs from the reference; nothing is timed:", *wrong, sep="\n  ")
        return 1
    about = circumstances(wait_until_idle()) | {"threads": str(args.threads)}
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    rows = []
    for row in lines(args):
        show(row)
        rows.append(row | about)
    print("written:", write_csv("verify", rows).name)
    if not torch.cuda.is_available():
        print("GPU: open, no CUDA device here; run scripts/gpu-check on a machine with one")
        return 0
    import verify_gpu

    return verify_gpu.main()


if __name__ == "__main__":
    sys.exit(main())
