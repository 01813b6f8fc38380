"""What proposers with a draft model of their own share, however they draw: rows, contexts, laws, and the draft."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch

from specplug.draft_space import IdentityDraftSpace
from specplug.errors import ConfigError
from specplug.hooks.markers import hookimpl
from specplug.methods import PluginContext
from specplug.models.target import Target
from specplug.proposers.base import Proposer, rows_to_draft
from specplug.proposers.draft_cache import DraftCache, Reading
from specplug.proposers.draft_sampling import DraftRow, DraftSampler
from specplug.types import Batch, Draft, Request, SessionSummary, TokenIds, cumulative

__all__ = ["DRAFT_TOO_SHORT", "ModelProposer", "Slots"]

DRAFT_TOO_SHORT = "draft_len"
"""Why a row got no draft: its text is longer than the draft model's context."""
_READ_AHEAD = 32
"""Unread tokens from which a request is read outside its drafts. Fewer are read with the next draft, for free."""


class Slots:
    """The slots of one request in the draft that is being made."""

    def __init__(self, reading: Reading, first: int, count: int) -> None:
        self.reading = reading
        self.request_id = reading.request_id
        self.first = first
        self.count = count


class ModelProposer(Proposer):
    """A proposer whose drafts come from a causal LM with a cache of its own.

    Prompts are read in ``specplug_advance``, chunk by chunk as the target reads them, so that no step has a whole
    prompt to catch up with; short remainders are read with the next draft. A request that cannot be drafted for is not
    read at all. Subclasses write :meth:`draw`.
    """

    def __init__(
        self,
        draft: Target,
        context: PluginContext,
        *,
        name: str,
        is_probabilistic: bool = False,
        needs_other_vocabulary: bool = False,
    ) -> None:
        """``draft``: borrowed until the session ends. ``needs_other_vocabulary``: the identity will not do."""
        self.draft = draft
        self.name = name
        self.is_probabilistic = is_probabilistic
        self.laws: frozenset[str] = frozenset({"one_hot"})
        if is_probabilistic:
            self.laws |= {"dense", "indirect"}
        self._context = context
        self._needs_other_vocabulary = needs_other_vocabulary
        self._cache: DraftCache | None = None

    # --- the session ------------------------------------------------------------------------------------------

    @property
    def cache(self) -> DraftCache:
        """The draft's rows. Raises ``RuntimeError`` before the session started."""
        if self._cache is None:
            raise RuntimeError("the draft model is used from specplug_start_session on")
        return self._cache

    @hookimpl
    def specplug_start_session(self) -> None:
        space = self._context.draft_space(self.draft)
        if self._needs_other_vocabulary and type(space) is IdentityDraftSpace:
            raise ConfigError(
                "use_heterogeneous_vocab is on and no plugin maps the two vocabularies (tli was detached)"
            )
        self._cache = DraftCache(self.draft, space, before_read=self.before_read)

    @hookimpl
    def specplug_finish_session(self, summary: SessionSummary) -> None:
        close = getattr(self.draft, "close", None)
        if close is not None:
            close()

    @hookimpl
    def specplug_finish_request(self, request: Request) -> None:
        self.forget(request.request_id)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self.cache.forget(request_id)

    # --- following the text -----------------------------------------------------------------------------------

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        self.follow(batch)

    def follow(self, batch: Batch) -> None:
        """Read on where much is unread."""
        readings = []
        for row, request in enumerate(batch.requests):
            num_computed = batch.num_computed_tokens[row]
            num_unread = num_computed - self.cache.num_seen(request.request_id)
            if num_unread >= _READ_AHEAD and batch.remaining[row] > 1 and self.drafts_for(request):
                reading = self.cache.open(request, TokenIds(batch.token_ids[row].array[:num_computed]))
                if reading.num_tokens <= self.draft.max_model_len:
                    readings.append(reading)
        if readings:
            for reading in readings:
                reading.num_logits = 0
            self.cache.read(self.cache.in_order(readings))

    def before_read(self, readings: Sequence[Reading]) -> None:
        """The draft is about to read this, in this order, packed. For drafts that read more than token ids."""

    def drafts_for(self, request: Request) -> bool:
        """Whether the request's switches let this proposer draft for it."""
        switches = request.speculation
        return bool(switches.get("enabled", True)) and switches.get("method", self.name) == self.name

    # --- drafting ---------------------------------------------------------------------------------------------

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        """Raises whatever the draft model raises; the host then goes on without it."""
        counts = [0] * len(batch)
        readings: dict[int, Reading] = {}
        skip_reasons: list[str | None] = [None] * len(batch)
        for row in rows_to_draft(batch, limits):
            reading = self.cache.open(batch.requests[row], batch.token_ids[row])
            room = self.draft.max_model_len - reading.num_tokens + 1  # the last draft token is not read
            if not reading.token_ids:
                continue
            if room < 1:
                skip_reasons[row] = DRAFT_TOO_SHORT
                continue
            readings[row], counts[row] = reading, min(limits[row], room)
        draft = self._draft(batch, readings, counts) if readings else Draft.empty(len(batch))
        return replace(draft, skip_reasons=tuple(skip_reasons))

    def _draft(self, batch: Batch, readings: dict[int, Reading], counts: Sequence[int]) -> Draft:
        starts = cumulative(counts)
        slots = {reading.request_id: Slots(reading, starts[row], counts[row]) for row, reading in readings.items()}
        sampler = DraftSampler(
            [DraftRow.of(batch, row, counts[row]) for row in readings],
            is_probabilistic=self.is_probabilistic,
            device=self.draft.device,
            kernels=getattr(self.draft, "kernels", None),
        )
        with torch.inference_mode():
            self.draw([slots[each.request_id] for each in self.cache.in_order(list(readings.values()))], sampler)
            return self._finished(sampler, counts)

    @abstractmethod
    def draw(self, rows: Sequence[Slots], sampler: DraftSampler) -> None:
        """Read what the rows' ``reading`` says, and choose a token for each of their slots."""

    def choose(self, logits: torch.Tensor, slots: Sequence[int], sampler: DraftSampler) -> torch.Tensor:
        """Draft ids ``[len(slots)]`` from raw ``logits`` ``[len(slots), draft_vocab]``."""
        return sampler.choose(self.cache.space.restrict(logits), slots)

    def _finished(self, sampler: DraftSampler, counts: Sequence[int]) -> Draft:
        space, device = self.cache.space, self._context.target.device
        return Draft(
            draft_token_ids=space.to_target_ids(sampler.token_ids).to(device),
            num_draft_tokens=tuple(counts),
            laws=sampler.laws(space, device),
            confidence=sampler.confidence.to(device),
        )
