"""The conformance kit on every proposer of the package that ``tests/testing`` does not run it on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specplug.methods import NoOptions, PluginConfig, PluginContext
from specplug.proposers import CompositeProposer, RowProposer
from specplug.proposers.ngram import NgramOptions, NgramProposer
from specplug.proposers.vllm_shaped import VllmShapedProposer
from specplug.proposers.vllm_view import VllmConfigView
from specplug.testing.conformance import ProposerConformance
from specplug.types import TokenIds


class CopiesPair(RowProposer):
    """Proposes what followed the last token's last occurrence."""

    def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
        ids = token_ids.tolist()
        starts = [at + 1 for at, token in enumerate(ids[:-1]) if token == ids[-1]]
        return ids[starts[-1] :][:limit] if starts else []


class VllmCopiesPair:
    def __init__(self, vllm_config: Any) -> None:
        self.k = vllm_config.speculative_config.num_speculative_tokens

    def propose(self, sampled: Any, num_tokens: Any, token_ids: Any, slot_mappings: Any) -> list[list[int]]:
        return [self.row(token_ids[row, : num_tokens[row]].tolist()) if new else [] for row, new in enumerate(sampled)]

    def row(self, ids: Sequence[int]) -> list[int]:
        starts = [at + 1 for at, token in enumerate(ids[:-1]) if token == ids[-1]]
        return list(ids[starts[-1] :][: self.k]) if starts else []


def make_ngram(context: PluginContext) -> NgramProposer:
    options = NgramOptions(prompt_lookup_min=3, prompt_lookup_max=5)
    session = context.session
    return NgramProposer(
        options, num_speculative_tokens=session.num_speculative_tokens, max_model_len=session.max_model_len
    )


class TestRowProposer(ProposerConformance):
    def make_proposer(self, context: PluginContext) -> object:
        return CopiesPair()


class TestVllmShaped(ProposerConformance):
    def make_proposer(self, context: PluginContext) -> object:
        session = context.session
        config = PluginConfig("custom_class", session.num_speculative_tokens, NoOptions())
        return VllmShapedProposer(
            VllmCopiesPair(VllmConfigView(config, context)),
            name="VllmCopiesPair",
            num_speculative_tokens=session.num_speculative_tokens,
            max_num_seqs=session.max_num_seqs,
            max_model_len=session.max_model_len,
        )


class TestComposite(ProposerConformance):
    def make_proposer(self, context: PluginContext) -> object:
        return CompositeProposer([("ngram", make_ngram(context)), ("pair", CopiesPair())])
