"""What a draft model has read of every request: its rows, its cache, and how both follow the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specplug.draft_space import DraftSpace
from specplug.models.target import Target
from specplug.types import Request, TokenIds

__all__ = ["DraftCache", "Reading"]


@dataclass(slots=True)
class _Held:
    """One request's part of the cache."""

    row: int
    num_seen: int = 0
    """Tokens of the request's text when its context was last asked for."""
    num_context: int = 0
    """Leading entries of the cache that stand for that context."""
    drafted: Sequence[int] = ()
    """Draft ids of the entries behind them."""

    @property
    def length(self) -> int:
        return self.num_context + len(self.drafted)


@dataclass(slots=True)
class Reading:
    """What a request's next forward reads: ``token_ids`` after the ``num_past`` entries that its cache holds.

    ``num_logits``: the last so many of them are answered with logits. ``num_masks``: the last so many of them ask for a
    token and stand for none, so that their entries leave the cache with the next :meth:`DraftCache.open`.
    """

    request_id: str
    num_past: int
    token_ids: Sequence[int]
    num_logits: int = 1
    num_masks: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the context, once they are read."""
        return self.num_past + len(self.token_ids) - self.num_masks


class DraftCache:
    """A draft model's rows, by request, and the forward over them.

    The invariant: before a draft the cache holds a prefix of the request's context in draft ids, and one forward reads
    the rest. What is known of a row follows its forwards, so a step that was interrupted leaves entries that nothing is
    known of, never the reverse; ``open`` rolls them back. The rest is usually the newest token alone; after a draft
    that was accepted whole it is two tokens, since the last draft token was drawn and never read; after steps without a
    draft it is what came meanwhile.
    """

    def __init__(
        self,
        draft: Target,
        space: DraftSpace,
        *,
        before_read: Callable[[Sequence[Reading]], None] = lambda readings: None,
    ) -> None:
        """``before_read`` hears what the next forward reads, in its order; not of single draft tokens."""
        self.draft = draft
        self.space = space
        self._before_read = before_read
        self._held: dict[str, _Held] = {}
        self._unsettled: tuple[torch.Tensor, list[tuple[str, int, int]]] | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def row(self, request_id: str) -> int:
        """The request's row in the draft model; it changes when another request leaves."""
        return self._held[request_id].row

    def length(self, request_id: str) -> int:
        """Entries that the cache holds of a request."""
        self._settle()
        return self._held[request_id].length

    def num_seen(self, request_id: str) -> int:
        """How long the text was that :meth:`open` saw last of a request, 0 for one it does not know."""
        held = self._held.get(request_id)
        return 0 if held is None else held.num_seen

    def open(self, request: Request, token_ids: TokenIds) -> Reading:
        """Roll the request's row back to what still stands of it; what is left to read of ``token_ids``.

        That is at least the last token, so that there are logits after it; nothing for an empty context.
        """
        self._settle()
        held = self._held.get(request.request_id)
        if held is None:
            held = self._held[request.request_id] = _Held(self.draft.acquire(request))
        context = self.space.context(request.request_id, token_ids)
        ids = context.token_ids
        kept = _num_kept(held, ids, context.num_unchanged)
        kept = self._roll_back(request, held, kept)
        held.num_seen, held.num_context, held.drafted = len(token_ids), kept, ()
        return Reading(request.request_id, kept, ids[kept:])

    def _roll_back(self, request: Request, held: _Held, length: int) -> int:
        """``length``, or 0 where a sliding window has lost what the shorter text would see."""
        try:
            self.draft.rollback(held.row, length)
        except ValueError:
            self._release(held)
            held.row = self.draft.acquire(request)
            return 0
        return length

    def in_order(self, readings: Sequence[Reading]) -> list[Reading]:
        """The readings by ascending row, as a forward takes them; after the last ``open`` of the step."""
        return sorted(readings, key=lambda reading: self._held[reading.request_id].row)

    def read(self, readings: Sequence[Reading]) -> torch.Tensor:
        """Read it all, in chunks where it is long; logits ``[sum of num_logits, draft_vocab]``.

        ``readings``: of distinct requests, ``in_order``; each at least ``num_logits`` long.
        """
        most = self.draft.max_query_tokens
        while long := [reading for reading in readings if len(reading.token_ids) > most]:
            sizes = [min(most, len(reading.token_ids) - most) for reading in long]
            pairs = list(zip(long, sizes, strict=True))
            self._read([Reading(each.request_id, each.num_past, each.token_ids[:size], 0) for each, size in pairs])
            for each, size in pairs:
                each.num_past, each.token_ids = each.num_past + size, each.token_ids[size:]
        return self._read(readings)

    def _read(self, readings: Sequence[Reading]) -> torch.Tensor:
        self._before_read(readings)
        flat: list[int] = []
        positions: list[int] = []
        for each in readings:
            flat += each.token_ids
            positions += range(len(flat) - each.num_logits, len(flat))
        counts = [len(each.token_ids) for each in readings]
        input_ids = torch.tensor(flat, dtype=torch.int64, device=self.draft.device)
        logits = self._forward(input_ids, [each.request_id for each in readings], counts, positions)
        for each in readings:
            self._held[each.request_id].num_context = each.num_tokens
        return logits

    def append(self, token_ids: torch.Tensor, request_ids: Sequence[str]) -> torch.Tensor:
        """Feed one draft token ``[len(request_ids)]`` to each request, ``in_order``; logits, one row each.

        The step ends with :meth:`note_drafted`, which tells what was fed.
        """
        return self._forward(token_ids, request_ids, [1] * len(request_ids), range(len(request_ids)))

    def _forward(
        self, input_ids: torch.Tensor, request_ids: Sequence[str], counts: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor:
        num_query_tokens = [0] * len(self._held)
        for request_id, count in zip(request_ids, counts, strict=True):
            num_query_tokens[self._held[request_id].row] = count
        where = torch.tensor(positions, dtype=torch.int64, device=self.draft.device)
        return self.draft.forward(input_ids, num_query_tokens, where).logits

    def note_drafted(self, token_ids: torch.Tensor, spans: list[tuple[str, int, int]]) -> None:
        """What :meth:`append` fed in this step: per request the slice of ``token_ids``, draft ids.

        They stay on their device until they are compared with the text, in the next step.
        """
        self._unsettled = (token_ids, spans)

    def _settle(self) -> None:
        """Learn which draft tokens the rows hold, with one copy from the device."""
        if self._unsettled is not None:
            (token_ids, spans), self._unsettled = self._unsettled, None
            ids = token_ids.tolist()
            for request_id, start, stop in spans:
                if request_id in self._held:
                    self._held[request_id].drafted = ids[start:stop]

    def forget(self, request_id: str) -> None:
        """Free a request's row; unknown requests are ignored."""
        self.space.forget(request_id)
        if request_id in self._held:
            self._settle()
            self._release(self._held.pop(request_id))

    def _release(self, held: _Held) -> None:
        moved = self.draft.release(held.row)
        if moved is not None:
            next(each for each in self._held.values() if each.row == moved).row = held.row


def _num_kept(held: _Held, ids: Sequence[int], num_unchanged: int) -> int:
    """Leading entries that stand: of the context, and then of the draft tokens behind it."""
    kept = min(held.num_context, num_unchanged, len(ids))
    if kept == held.num_context:
        following = ids[kept : kept + len(held.drafted)]
        agree = (drafted == came for drafted, came in zip(held.drafted, following, strict=False))
        kept += next((place for place, is_equal in enumerate(agree) if not is_equal), len(following))
    return max(0, min(kept, len(ids) - 1))
