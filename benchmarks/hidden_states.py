"""What extracting hidden states costs decoding: with it and without it, in turn.

    python benchmarks/hidden_states.py [--model FOLDER] [--pairs 8] [--tokens 64]

Chat prompts, batch 1 and 8, as in ``host.py``. The bar: at least 0.95 of plain decoding. Rows go to
``benchmarks/results/hidden_states_decoding.csv``.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from host import Bench, Parts, Row, run_parts
from peers.client import Peer


class Extracting(Peer):
    """Begins with an empty folder: a file that is there already would be kept instead of written."""

    def __init__(self, model: str, folder: Path) -> None:
        self._folder = folder
        config = {"method": "extract_hidden_states", "extract_hidden_states_path": str(folder)}
        options = ["--model", model, "--speculative-config", json.dumps(config)]
        super().__init__("extracting", "specplug_peer.py", options)

    def restart(self) -> None:
        shutil.rmtree(self._folder)
        super().restart()


def decoding(bench: Bench) -> Iterator[Row]:
    """All layers that the plugin takes by default, of prompt and output tokens."""
    with (
        tempfile.TemporaryDirectory() as folder,
        bench.ours("plain") as plain,
        Extracting(bench.args.model, Path(folder) / "states") as extracting,
    ):
        for batch in (1, 8):
            yield {"kind": "chat"} | bench.pairs(extracting, plain, bench.some("chat", batch), batch)


PARTS: Parts = {"decoding": decoding}

if __name__ == "__main__":
    run_parts("hidden_states", __doc__, PARTS, tokens=64)
