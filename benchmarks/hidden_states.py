"""What extracting hidden states costs decoding: with it and without it, in turn.

    python benchmarks/hidden_states.py [--model FOLDER] [--pairs 8] [--tokens 64]

Both engines run in their own processes and in turn (A B A B ...); the ratio is of neighbouring runs, with the 95 %
interval of its mean. The bar: at least 0.95 of plain decoding. Rows go to ``benchmarks/results/hidden_states.csv``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import circumstances, paired_ratio, wait_until_idle, write_csv
from peers.client import Peer
from prompts import benchmark_prompts, checksum

from specplug.demo.models import default_cache_dir, smollm2_path

BAR = 0.95


def measure(args: argparse.Namespace, plain: Peer, extracting: Peer, prompts: list[str], batch: int) -> dict[str, Any]:
    for peer in (plain, extracting):
        peer.run(prompts[:batch], 8, batch)
    load = wait_until_idle()
    speeds: dict[str, list[float]] = {"plain": [], "extracting": []}
    for _ in range(args.pairs):
        for name, peer in (("extracting", extracting), ("plain", plain)):
            speeds[name].append(peer.run(prompts, args.tokens, batch).tokens_per_s)
    ratio = paired_ratio(speeds["extracting"], speeds["plain"])
    print(f"  batch {batch}: extracting / plain {ratio}, bar {BAR}", flush=True)
    return {
        "batch": batch,
        "unit": "tokens/s",
        "extracting_median": f"{statistics.median(speeds['extracting']):.2f}",
        "plain_median": f"{statistics.median(speeds['plain']):.2f}",
        "ratio_median": f"{ratio.median:.3f}",
        "ratio_low": f"{ratio.low:.3f}",
        "ratio_high": f"{ratio.high:.3f}",
        "pairs": ratio.num_pairs,
        "prompts": checksum({"chat": prompts}),
        **circumstances(load, **extracting.about["versions"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="folder of the target; absent: the demo's small model")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    args.model = args.model or str(smollm2_path(default_cache_dir(os.environ)))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = benchmark_prompts(lambda text: len(tokenizer(text)["input_ids"]))["chat"]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        config = {"method": "extract_hidden_states", "extract_hidden_states_path": str(Path(folder) / "states")}
        options = ["--model", args.model]
        plain = stack.enter_context(Peer("plain", "specplug_peer.py", options))
        with_config = [*options, "--speculative-config", json.dumps(config)]
        extracting = stack.enter_context(Peer("extracting", "specplug_peer.py", with_config))
        rows = [
            measure(args, plain, extracting, prompts[:2], 1),
            measure(args, plain, extracting, prompts[:8], 8),
        ]
    print(write_csv("hidden_states", rows))


if __name__ == "__main__":
    main()
