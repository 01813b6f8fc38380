"""A proposer that drafts twice and then raises on purpose, as a class that vLLM can import."""

from __future__ import annotations

from specplug.adapters.vllm import CustomClassProposer
from specplug.hooks import process_manager
from specplug.proposers import RowProposer
from specplug.testing.proposers import as_method
from specplug.types import TokenIds


class RaisesLater(RowProposer):
    def __init__(self) -> None:
        self.num_drafts = 0

    def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
        self.num_drafts += 1
        if self.num_drafts > 3:  # the first draft is that of the warm-up
            raise RuntimeError("on purpose")
        return [token_ids[-1]] * limit


process_manager().register(as_method("raises_later", lambda context: RaisesLater()))


class Raising(CustomClassProposer):
    method = "raises_later"
