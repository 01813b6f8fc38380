"""Suffix decoding end to end on the demo model: tokens per second beside vLLM's suffix, our n-gram and plain decoding.

    python benchmarks/suffix_e2e.py [PART ...] [--model FOLDER] [--pairs 8] [--vllm PYTHON]

Parts: ``edit`` (edit prompts against our n-gram at its best setting and, given the Python of its environment,
vLLM's suffix, which needs arctic-inference), ``humaneval`` (against our own plain decoding, on text that repeats
little), ``memory`` (10,000 requests in a row through the host loop on a toy: resident memory). Runs repeat prompts,
so nothing is shared between requests in the first two, on either side. Pairs, intervals and result files as in
``benchmarks/host.py``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from common import circumstances, wait_until_idle
from host import Bench, Parts, Row, ngrams, run_parts

SUFFIX = {"method": "suffix", "num_speculative_tokens": 32, "suffix_decoding_max_cached_requests": 0}
VLLM_LENGTH = 24
"""vLLM's default."""
NUM_REQUESTS = 10_000


def edit(bench: Bench) -> Iterator[Row]:
    """At least 1.3 (batch 1) and 1.1 (batch 8) times vLLM's suffix, and 1.2 times our n-gram."""
    from peers.client import Peer

    for batch in (1, 8):
        prompts = bench.some("edit", batch)
        with ExitStack() as stack:
            ours = stack.enter_context(bench.ours("specplug suffix", SUFFIX))
            best = bench.best([stack.enter_context(other) for other in ngrams(bench, batch)], prompts, batch)
            yield {"kind": "edit", "at_least": 1.2} | bench.pairs(ours, best, prompts, batch)
            if bench.args.vllm:
                options = ["--model", bench.args.model, "--method", "suffix", "--k", str(VLLM_LENGTH)]
                vllm = stack.enter_context(Peer("vllm suffix", "vllm_peer.py", options, python=bench.args.vllm))
                yield {"kind": "edit", "at_least": 1.3 if batch == 1 else 1.1} | bench.pairs(ours, vllm, prompts, batch)


def humaneval(bench: Bench) -> Iterator[Row]:
    """Not below plain decoding: the interval must reach 1."""
    with bench.ours("specplug suffix", SUFFIX) as ours, bench.ours("specplug plain") as plain:
        for batch in (1, 8):
            prompts = bench.some("humaneval", batch)
            yield {"kind": "humaneval", "at_least": 1.0} | bench.pairs(ours, plain, prompts, batch)


def memory(bench: Bench) -> Iterator[Row]:
    """Requests of their own text each, shared up to a bound that they reach after a twentieth of them."""
    from specplug import LLM, SamplingParams
    from specplug.testing import MarkovTarget

    chance = random.Random(0)
    config = {"method": "suffix", "num_speculative_tokens": 8, "suffix_cached_tokens": 16 * NUM_REQUESTS // 20}
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    load = wait_until_idle()
    with LLM(MarkovTarget(vocab_size=16), speculative_config=config, strict=True) as llm:
        for done in range(0, NUM_REQUESTS, 500):
            prompts = [{"prompt_token_ids": chance.choices(range(16), k=8)} for _ in range(500)]
            llm.generate(prompts, params)
            if done + 500 in (1000, NUM_REQUESTS // 2, NUM_REQUESTS):
                print(f"  {done + 500} requests: {resident_mb():.1f} MB resident", flush=True)
                yield {"requests": done + 500, "unit": "MB resident", "value": f"{resident_mb():.1f}",
                       **circumstances(load)}  # fmt: skip


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


PARTS: Parts = {"edit": edit, "humaneval": humaneval, "memory": memory}


if __name__ == "__main__":
    run_parts("suffix_e2e", __doc__, PARTS, tokens=96)
