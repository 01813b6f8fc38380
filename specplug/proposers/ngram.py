"""The built-in method ``ngram``: copy what followed the last tokens where they occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specplug.hooks.markers import hookimpl
from specplug.methods import Capabilities, MethodSpec, PluginConfig, PluginContext
from specplug.proposers.backoff import BackOff, load_of
from specplug.proposers.base import Proposer, rows_to_draft
from specplug.proposers.index import SequenceIndex, TokenIndex
from specplug.types import Batch, Draft, Request, TokenIds

__all__ = ["DEFAULT_LOOKUP", "NgramOptions", "NgramProposer"]

SPECPLUG_API = (1, 0)

DEFAULT_LOOKUP = 5
"""Both lookup bounds, when neither is given (vLLM's default)."""

MAX_TOKENS_PER_STEP = 4096
"""Tokens of one request that are indexed in one step (about 8 ms), so that a long prompt never stalls the batch."""


class NgramOptions(BaseModel):
    """The keys of ``ngram``. One lookup bound given: the other is the same; neither: both are 5."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt_lookup_min: int = Field(
        default=DEFAULT_LOOKUP, ge=1, description="Shortest match to draft from, in tokens (not given: same as max)."
    )
    prompt_lookup_max: int = Field(
        default=DEFAULT_LOOKUP,
        ge=1,
        description="Longest match that is looked for, in tokens (not given: same as min).",
    )
    ngram_backoff: bool = Field(
        default=True,
        description="Draft only what is likely to pay in a batch of this size; false drafts all, as vLLM does.",
    )

    @model_validator(mode="before")
    @classmethod
    def _mirror_missing_bound(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        shortest, longest = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
        either = longest if shortest is None else shortest
        bounds = {
            "prompt_lookup_min": either if shortest is None else shortest,
            "prompt_lookup_max": either if longest is None else longest,
        }
        given = {key: value for key, value in values.items() if key not in bounds}
        return given if either is None else given | bounds

    @model_validator(mode="after")
    def _bounds_in_order(self) -> NgramOptions:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} is above prompt_lookup_max={self.prompt_lookup_max}. "
                "They are the shortest and longest match; the draft length is num_speculative_tokens. "
                f"Write prompt_lookup_max={self.prompt_lookup_min} or more, or a lower prompt_lookup_min"
            )
        return self


@dataclass(slots=True)
class _RequestState:
    index: TokenIndex
    back_off: BackOff | None


class NgramProposer(Proposer):
    """vLLM's V1 ``ngram``: the longest match wins, among its occurrences the earliest.

    A request's text is indexed as it comes, its prompt in chunks as the host computes them; at most
    ``MAX_TOKENS_PER_STEP`` tokens a step, and a row whose index lags behind its text gets no draft.
    """

    def __init__(
        self,
        options: NgramOptions,
        *,
        num_speculative_tokens: int,
        max_model_len: int,
        device: str = "cpu",
        name: str = "ngram",
    ) -> None:
        self.options = options
        self.num_speculative_tokens = num_speculative_tokens
        self.max_model_len = max_model_len
        self.device = device
        self.name = name
        self._states: dict[str, _RequestState] = {}

    @hookimpl
    def specplug_start_request(self, request: Request) -> None:
        self._states.pop(request.request_id, None)
        self._state(request.request_id)

    @hookimpl
    def specplug_finish_request(self, request: Request) -> None:
        self._states.pop(request.request_id, None)

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        """Index prompts while they are computed, so that the first draft need not wait."""
        for request_id, token_ids, num_computed in zip(
            batch.request_ids, batch.token_ids, batch.num_computed_tokens, strict=True
        ):
            state = self._states.get(request_id)
            if state is not None:
                _catch_up(state.index, token_ids, num_computed)

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        drafts: list[list[int]] = [[] for _ in batch.requests]
        rates = [BackOff.FIRST_RATE] * len(batch)
        for row in rows_to_draft(batch, limits):
            state = self._state(batch.request_ids[row])
            token_ids = batch.token_ids[row]
            _catch_up(state.index, token_ids, len(token_ids))
            draft = self._look_up(state.index, token_ids, limits[row])
            if state.back_off is not None:
                match_length = state.index.match_length
                state.back_off.review(token_ids)
                state.back_off.note(draft, len(token_ids), match_length)
                rates[row] = state.back_off.rate(match_length)
            drafts[row] = draft
        if self.options.ngram_backoff:
            lengths = load_of(batch, self.device).lengths(rates, list(map(len, drafts)))
            drafts = [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]
        return Draft.from_lists(drafts, source=self.name)

    def _look_up(self, index: TokenIndex, token_ids: TokenIds, limit: int) -> list[int]:
        if len(index) < len(token_ids) or index.match_length < self.options.prompt_lookup_min:
            return []
        room = min(limit, self.num_speculative_tokens, self.max_model_len - len(token_ids))
        return index.copy(index.match_end + 1, room) if room > 0 else []

    def _state(self, request_id: str) -> _RequestState:
        state = self._states.get(request_id)
        if state is None:
            back_off = BackOff() if self.options.ngram_backoff else None
            index = SequenceIndex(self.options.prompt_lookup_max)
            state = self._states[request_id] = _RequestState(index, back_off)
        return state


def _catch_up(index: TokenIndex, token_ids: TokenIds, num_tokens: int) -> None:
    """Index ``token_ids`` up to ``num_tokens``, or as far as one step allows."""
    num_indexed = len(index)
    if num_indexed < num_tokens:
        index.append(token_ids[num_indexed : min(num_tokens, num_indexed + MAX_TOKENS_PER_STEP)])


def _build(config: PluginConfig, context: PluginContext) -> NgramProposer:
    return NgramProposer(
        cast(NgramOptions, config.options),
        num_speculative_tokens=config.num_speculative_tokens,
        max_model_len=context.session.max_model_len,
        device=context.session.device,
        name=config.name,
    )


@hookimpl
def specplug_register() -> Sequence[MethodSpec]:
    return [
        MethodSpec(
            name="ngram",
            kind="proposer",
            factory=_build,
            options=NgramOptions,
            capabilities=Capabilities(laws=frozenset({"one_hot"}), deterministic=True, causality="H"),
            summary="Copies what followed the last tokens where they occurred before in prompt or output.",
        )
    ]
