"""Read a folder of hidden states with speculators' own code; run by ``test_speculators`` where that is installed."""

from __future__ import annotations

import sys
from pathlib import Path

from hs_connectors import FileTransfer
from safetensors.torch import load_file
from speculators.data_generation.offline import (
    check_hidden_states,
    find_corrupt_hidden_state_indices,
    get_existing_hidden_state_indices,
)

folder = Path(sys.argv[1])
indices = get_existing_hidden_state_indices(folder)
if find_corrupt_hidden_state_indices(folder, indices):
    raise SystemExit("speculators finds some of the files damaged")
for index in indices:
    data = load_file(folder / f"hs_{index}.safetensors")
    check_hidden_states(data, data["token_ids"].tolist())
    cached = FileTransfer(folder).get_cached(index)
    if cached is None or cached.keys() != {"hidden_states", "token_ids"}:
        raise SystemExit(f"speculators' training reads {cached} for index {index}")
print(*indices)  # noqa: T201
