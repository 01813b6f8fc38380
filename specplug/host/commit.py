"""Commit: the only place where a step's result reaches request state. One device-to-host copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specplug.host.request_state import RequestState
from specplug.trees import Tree
from specplug.types import Draft, RequestStep, SourceCount, Verification, cumulative

__all__ = ["Decided", "commit", "entries_to_move", "to_host"]

_NO_TOKEN_MESSAGE = (
    "no token could be chosen: the target's logits were NaN, or the request's parameters together rule out every "
    "token; its output up to here is kept"
)


@dataclass(frozen=True, slots=True)
class Decided:
    """Plain Python values of one verification: per row its output tokens, accepted count, validity.

    ``accepted_nodes``: of rows that were trees the accepted nodes from the root on, of others None.
    """

    output_token_ids: list[list[int]]
    num_accepted_tokens: list[int]
    is_invalid: list[bool]
    accepted_nodes: list[list[int] | None]


def to_host(verification: Verification, draft: Draft) -> Decided:
    """Copy a verification of ``draft`` off the device, in one transfer.

    A row whose accepted nodes are no path of its tree is invalid: nothing of it can be kept.
    """
    output = verification.output_token_ids
    accepted = verification.num_accepted_tokens.to(output.dtype).unsqueeze(1)
    invalid = verification.is_invalid
    flags = torch.zeros_like(accepted) if invalid is None else invalid.to(output.dtype).unsqueeze(1)
    parts = [accepted, flags, output]
    if draft.parents is not None and verification.accepted_draft_indices is not None:
        parts.append(verification.accepted_draft_indices.to(output.dtype))
    packed = torch.cat(parts, dim=1).tolist()
    trees, width = draft.trees(), 2 + output.shape[1]
    nodes = [None if tree is None else row[width : width + row[0]] for row, tree in zip(packed, trees, strict=True)]
    is_path = [tree is None or tree.has_path(path or []) for tree, path in zip(trees, nodes, strict=True)]
    return Decided(
        output_token_ids=[row[2 : 3 + row[0]] for row in packed],
        num_accepted_tokens=[row[0] for row in packed],
        is_invalid=[bool(row[1]) or not fits for row, fits in zip(packed, is_path, strict=True)],
        accepted_nodes=nodes,
    )


def entries_to_move(
    states: Sequence[RequestState], target_rows: Sequence[int], decided: Decided
) -> tuple[list[int], list[int], list[int]]:
    """What ``Target.compact`` has to move so that accepted nodes stand behind each other: rows, from, to.

    To be asked, and done, before :func:`commit`: an interrupt in between leaves the requests as they were.
    """
    rows: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for state, row, nodes, is_invalid in zip(
        states, target_rows, decided.accepted_nodes, decided.is_invalid, strict=True
    ):
        for depth, node in enumerate([] if nodes is None or is_invalid else nodes):
            if node != depth:
                rows.append(row)
                sources.append(state.num_tokens + node)
                targets.append(state.num_tokens + depth)
    return rows, sources, targets


def commit(
    states: Sequence[RequestState],
    draft: Draft,
    decided: Decided,
    *,
    default_source: str,
    skip_reasons: Sequence[str | None],
) -> list[RequestStep]:
    """Apply a verification to its requests: stop and length cuts, token append, new kept length.

    ``states``, ``draft`` and ``skip_reasons`` have the rows of ``decided``. Afterwards a row's
    ``num_computed_tokens`` is what the target's state must be rolled back to. Withdrawn requests are left as they
    are, and so are those with a position in their block where no token can be chosen: they go on without drafts.
    """
    starts, trees = cumulative(draft.num_draft_tokens), draft.trees()
    steps = []
    for row, state in enumerate(states):
        if state.is_withdrawn:
            continue
        num_draft_tokens, tree = draft.num_draft_tokens[row], trees[row]
        if decided.is_invalid[row] and num_draft_tokens:
            state.may_draft = False  # so it comes to the error where plain decoding does
            continue
        state.num_verify_steps += 1
        if decided.is_invalid[row]:
            state.num_computed_tokens = state.num_tokens
            state.finish("error", error=_NO_TOKEN_MESSAGE)
            steps.append(RequestStep(state.request_id, num_draft_tokens, 0, 0, 0, skip_reason=skip_reasons[row]))
            continue
        num_verified = decided.num_accepted_tokens[row]
        num_accepted, num_emitted = _commit_row(state, decided.output_token_ids[row], num_verified)
        row_draft = _RowDraft(starts[row], num_draft_tokens, tree, decided.accepted_nodes[row])
        sources = _source_counts(draft, row_draft, num_accepted, num_verified, default_source)
        steps.append(
            RequestStep(
                request_id=state.request_id,
                num_draft_tokens=row_draft.max_accepted,
                num_draft_nodes=num_draft_tokens,
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


@dataclass(frozen=True, slots=True)
class _RowDraft:
    """One row's slots of a draft, from ``start`` on, with what was accepted of its ``tree``, if it is one."""

    start: int
    num_nodes: int
    tree: Tree | None
    nodes: Sequence[int] | None

    @property
    def max_accepted(self) -> int:
        return self.num_nodes if self.tree is None else self.tree.max_depth

    def most_in(self, first: int, stop: int) -> int:
        """The most of its slots ``first`` to ``stop`` that could be accepted together."""
        if self.tree is None:
            return stop - first
        return int(self.tree.ancestry[:, first:stop].sum(1).max())

    def accepted_in(self, first: int, stop: int, num_accepted: int) -> int:
        """How many of its slots ``first`` to ``stop`` are among the ``num_accepted`` first accepted ones."""
        if self.nodes is None:
            return min(max(num_accepted - first, 0), stop - first)
        return sum(first <= node < stop for node in self.nodes[:num_accepted])


def _source_counts(
    draft: Draft, row: _RowDraft, num_accepted: int, num_verified: int, default_source: str
) -> tuple[SourceCount, ...]:
    """Attribute a row's draft tokens to their proposers. Of a tree path lengths count, for each source its own."""
    if not row.num_nodes:
        return ()
    if len(draft.sources) <= 1:
        source = draft.sources[0].source if draft.sources else default_source
        return (SourceCount(source, row.max_accepted, num_accepted, num_verified),)
    counts: list[SourceCount] = []
    for span in draft.sources:
        first, stop = max(span.start - row.start, 0), min(span.stop - row.start, row.num_nodes)
        if first < stop:
            accepted, verified = (row.accepted_in(first, stop, count) for count in (num_accepted, num_verified))
            counts.append(SourceCount(span.source, row.most_in(first, stop), accepted, verified))
    return tuple(counts)
