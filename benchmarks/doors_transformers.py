"""The transformers door on edit prompts, against ``generate``'s own prompt lookup.

    python benchmarks/doors_transformers.py [--model FOLDER] [--pairs 8] [--prompts 2] [--tokens 96]

Both at their best setting, batch 1 (the only one that prompt lookup takes), bfloat16. Engines run in turn (A B A B
...); the ratio is of neighbouring runs, with the 95 % interval of its mean. The bar is 1.3. Rows go to
``benchmarks/results/doors_transformers_edit.csv``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from host import LOOKUP_LENGTHS, Bench, Row, ngram, run_parts

OURS: dict[str, dict[str, Any]] = {
    "suffix K=16": {"method": "suffix", "num_speculative_tokens": 16},
    "suffix K=32": {"method": "suffix", "num_speculative_tokens": 32},
    "ngram K=16": ngram(16),
}


def edit(bench: Bench) -> Iterator[Row]:
    """Ours through the door, against prompt lookup."""
    prompts = bench.some("edit", 1)
    with ExitStack() as stack:
        ours = [
            stack.enter_context(bench.transformers(f"specplug door, {name}", "--specplug", json.dumps(config)))
            for name, config in OURS.items()
        ]
        lookups = [
            stack.enter_context(bench.transformers(f"transformers lookup K={k}", "--lookup", "--k", str(k)))
            for k in LOOKUP_LENGTHS
        ]
        best = bench.best(ours, prompts, 1)
        yield {"kind": "edit"} | bench.pairs(best, bench.best(lookups, prompts, 1), prompts, 1)


if __name__ == "__main__":
    run_parts("doors_transformers", __doc__, {"edit": edit}, tokens=96)
