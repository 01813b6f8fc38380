"""Back-off in front of any proposer, for servers where a draft costs something whatever its length."""

from __future__ import annotations

import math
from collections.abc import Generator

from specplug.adapters.prices import Prices
from specplug.hooks.markers import hookimpl
from specplug.proposers.backoff import BackOff, expected_accepted
from specplug.types import Batch, Draft, Request, cumulative

__all__ = ["StandDown"]


class StandDown:
    """A wrapper around ``specplug_propose``: a draft is cut to what is likely to pay, and dropped if nothing is.

    What a draft costs is told by ``prices``; what it spares is the number of its tokens that are accepted, in steps of
    plain decoding both. The chance of a token is that of the request's earlier drafts, the dropped ones included, so a
    request drafts again as soon as its drafts would have hit.
    """

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._back_offs: dict[str, BackOff] = {}

    @hookimpl
    def specplug_start_request(self, request: Request) -> None:
        self._back_offs[request.request_id] = BackOff()

    @hookimpl
    def specplug_finish_request(self, request: Request) -> None:
        self._back_offs.pop(request.request_id, None)

    @hookimpl(wrapper=True)
    def specplug_propose(self, batch: Batch) -> Generator[None, Draft | None, Draft | None]:
        draft = yield
        if draft is None:
            return None
        draft = draft.to_chains()  # a server that takes tokens takes no trees
        ids, starts = draft.draft_token_ids.tolist(), cumulative(draft.num_draft_tokens)
        kept = []
        for row, (request_id, token_ids) in enumerate(zip(batch.request_ids, batch.token_ids, strict=True)):
            back_off = self._back_offs[request_id]
            back_off.review(token_ids)
            own = ids[starts[row] : starts[row + 1]]
            back_off.note(own, len(token_ids))
            kept.append(self._length(back_off.rate(), len(own)))
        return draft.truncate(kept)

    def _length(self, rate: float, num_drafted: int) -> int:
        """How many of the tokens are likely enough, if all of them together pay for the draft."""
        prices = self._prices
        num_tokens = min(num_drafted, int(math.log(prices.token) / math.log(rate)))
        num_expected = expected_accepted(rate, num_tokens)
        return num_tokens if num_expected > prices.draft + prices.token * num_tokens else 0
