"""A draft model that writes its draft token by token."""

from __future__ import annotations

from collections.abc import Sequence

from specplug.proposers.draft_sampling import DraftSampler
from specplug.proposers.model_proposer import ModelProposer, Slots

__all__ = ["AutoregressiveProposer"]


class AutoregressiveProposer(ModelProposer):
    """One forward of the draft for each draft position, over all rows that still draft.

    The first forward also reads what the cache lacks, so it costs no more than the others.
    """

    def draw(self, rows: Sequence[Slots], sampler: DraftSampler) -> None:
        logits = self.cache.read([row.reading for row in rows])
        chosen = self.choose(logits, [row.first for row in rows], sampler)
        drafting = list(rows)
        for depth in range(1, max(row.count for row in rows)):
            staying = [place for place, row in enumerate(drafting) if row.count > depth]
            if len(staying) < len(drafting):
                drafting, chosen = [drafting[place] for place in staying], chosen[staying]
            logits = self.cache.append(chosen, [row.request_id for row in drafting])
            chosen = self.choose(logits, [row.first + depth for row in drafting], sampler)
        fed = [(row.request_id, row.first, row.first + row.count - 1) for row in rows]
        self.cache.note_drafted(sampler.token_ids, fed)
