"""Commit: the only place where a step's result reaches request state. One device-to-host copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specplug.host.request_state import RequestState
from specplug.types import Draft, RequestStep, SourceCount, Verification, cumulative

__all__ = ["Committed", "commit", "to_host"]

_NO_TOKEN_MESSAGE = (
    "no token could be chosen: the target's logits were NaN, or the request's parameters together rule out every "
    "token; its output up to here is kept"
)


@dataclass(frozen=True, slots=True)
class Committed:
    """Plain Python values of one verification: per row its output tokens, accepted count, validity."""

    output_token_ids: list[list[int]]
    num_accepted_tokens: list[int]
    is_invalid: list[bool]


def to_host(verification: Verification) -> Committed:
    """Copy a verification off the device, in one transfer."""
    output = verification.output_token_ids
    accepted = verification.num_accepted_tokens.to(output.dtype).unsqueeze(1)
    invalid = verification.is_invalid
    flags = torch.zeros_like(accepted) if invalid is None else invalid.to(output.dtype).unsqueeze(1)
    packed = torch.cat([accepted, flags, output], dim=1).tolist()
    return Committed(
        output_token_ids=[row[2 : 3 + row[0]] for row in packed],
        num_accepted_tokens=[row[0] for row in packed],
        is_invalid=[bool(row[1]) for row in packed],
    )


def commit(
    states: Sequence[RequestState],
    draft: Draft,
    verification: Verification,
    *,
    default_source: str,
    skip_reasons: Sequence[str | None],
) -> list[RequestStep]:
    """Apply a verification to its requests: stop and length cuts, token append, new kept length.

    ``states``, ``draft`` and ``skip_reasons`` have the verification's rows. Afterwards a row's
    ``num_computed_tokens`` is what the target's state must be rolled back to. Withdrawn requests are left as they
    are, and so are those with a position in their block where no token can be chosen: they go on without drafts.
    """
    host = to_host(verification)
    starts = cumulative(draft.num_draft_tokens)
    steps = []
    for row, state in enumerate(states):
        if state.is_withdrawn:
            continue
        num_draft_tokens = draft.num_draft_tokens[row]
        if host.is_invalid[row] and num_draft_tokens:
            state.may_draft = False  # so it comes to the error where plain decoding does
            continue
        state.num_verify_steps += 1
        if host.is_invalid[row]:
            state.num_computed_tokens = state.num_tokens
            state.finish("error", error=_NO_TOKEN_MESSAGE)
            steps.append(RequestStep(state.request_id, num_draft_tokens, 0, 0, 0, skip_reason=skip_reasons[row]))
            continue
        num_verified = host.num_accepted_tokens[row]
        num_accepted, num_emitted = _commit_row(state, host.output_token_ids[row], num_verified)
        sources = _source_counts(draft, starts[row], num_draft_tokens, num_accepted, num_verified, default_source)
        steps.append(
            RequestStep(
                request_id=state.request_id,
                num_draft_tokens=num_draft_tokens,
                num_verified_accepted_tokens=num_verified,
                num_accepted_tokens=num_accepted,
                num_emitted_tokens=num_emitted,
                sources=sources,
                skip_reason=skip_reasons[row],
            )
        )
    return steps


def _commit_row(state: RequestState, output_token_ids: list[int], num_verified: int) -> tuple[int, int]:
    """Cut, append, and set the kept length; returns committed accepted and emitted counts."""
    cut = state.cut(output_token_ids)
    num_read = state.num_tokens + num_verified  # positions whose token stands and was read in this forward
    state.append(output_token_ids[: cut.num_kept])
    state.num_computed_tokens = min(num_read, state.num_tokens)
    num_accepted = min(num_verified, cut.num_kept)
    if cut.finish_reason is not None:
        state.num_discarded_tokens = num_verified - num_accepted
        state.finish(cut.finish_reason, cut.stop_reason)
    return num_accepted, cut.num_kept


def _source_counts(
    draft: Draft, start: int, num_draft_tokens: int, num_accepted: int, num_verified: int, default_source: str
) -> tuple[SourceCount, ...]:
    """Attribute a row's draft tokens to their proposers; accepted tokens are the row's leading ones."""
    if not num_draft_tokens:
        return ()
    if len(draft.sources) <= 1:
        source = draft.sources[0].source if draft.sources else default_source
        return (SourceCount(source, num_draft_tokens, num_accepted, num_verified),)
    counts = []
    for span in draft.sources:
        first, stop = max(span.start, start), min(span.stop, start + num_draft_tokens)
        if first < stop:
            offset, size = first - start, stop - first
            accepted = min(max(num_accepted - offset, 0), size)
            verified = min(max(num_verified - offset, 0), size)
            counts.append(SourceCount(span.source, size, accepted, verified))
    return tuple(counts)
