"""A proposer made of proposers: the base of hybrids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import pluggy

from specplug.draft_space import DraftSpace
from specplug.errors import ConfigError
from specplug.hooks import specs
from specplug.hooks.markers import PROJECT, hookimpl
from specplug.methods import PluginContext
from specplug.proposers.base import Proposer, rows_to_draft
from specplug.trees import chain_parents
from specplug.types import (
    Batch,
    Draft,
    LawSpan,
    Request,
    Session,
    SessionSummary,
    SourceSpan,
    StepOutcome,
    Verification,
)

if TYPE_CHECKING:
    import torch

__all__ = ["CompositeProposer"]


class CompositeProposer(Proposer):
    """Holds child proposers and asks them in order: each row takes the first draft that is not empty.

    Every hook but ``specplug_propose`` is forwarded to all children. A request whose switches name a ``method``
    is drafted by that child only, and by nobody if no child has that name (see ``method_names``). A child that
    raises takes the composite with it. Override ``propose`` for another choice; ``ask_child`` and
    ``merge_drafts`` are the pieces.
    """

    def __init__(self, children: Sequence[tuple[str, object]]) -> None:
        """``children``: method name and instance, the first to be asked first.

        Raises ``ConfigError`` for no children or for two of one name.
        """
        names = [name for name, _ in children]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"a composite needs children with different names; got {names}")
        self.method_names = tuple(names)
        self._children = dict(children)
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(specs)
        for name, child in reversed(children):  # pluggy asks the last registered first
            self._manager.register(child, name)
        self._propose = {name: self._propose_caller(name) for name in names}

    @classmethod
    def from_methods(
        cls, context: PluginContext, methods: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> CompositeProposer:
        """Build the children with ``context.create``: ``[("ngram", {"prompt_lookup_max": 3}), ...]``."""
        return cls([(name, context.create(name, options)) for name, options in methods])

    def _propose_caller(self, name: str) -> pluggy.HookCaller:
        others = [child for other, child in self._children.items() if other != name]
        return self._manager.subset_hook_caller("specplug_propose", remove_plugins=others)

    # --- drafting -----------------------------------------------------------------------------------------

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft | None:
        undrafted = rows_to_draft(batch, limits)
        drafts: list[Draft] = []
        chosen = [0] * len(batch)
        for name in self.method_names:
            allowed = _limits_for(name, batch, limits, undrafted)
            draft = self.ask_child(name, batch, allowed) if any(allowed) else None
            if draft is None:
                continue
            for row in undrafted:
                if draft.num_draft_tokens[row]:
                    chosen[row] = len(drafts)
            undrafted = [row for row in undrafted if not draft.num_draft_tokens[row]]
            drafts.append(draft)
        return merge_drafts(drafts, chosen) if drafts else None

    def ask_child(self, name: str, batch: Batch, limits: Sequence[int]) -> Draft | None:
        """One child's draft, cut to ``limits``, its source named; None if it has no answer.

        Raises ``ValueError`` when it does not draft for exactly the rows of ``batch``.
        """
        draft: Draft | None = self._propose[name](batch=batch, limits=limits)
        if draft is None:
            return None
        if len(draft.num_draft_tokens) != len(batch):
            raise ValueError(
                f"child {name!r} drafted for {len(draft.num_draft_tokens)} rows of a batch of {len(batch)}; "
                "a draft has one count per row, 0 allowed"
            )
        draft = draft.truncate(limits)
        if draft.sources or not draft.num_slots:
            return draft
        return replace(draft, sources=(SourceSpan(0, draft.num_slots, name),))

    # --- every other hook goes to all children ------------------------------------------------------------

    @hookimpl
    def specplug_start_session(self, session: Session) -> None:
        self._manager.hook.specplug_start_session(session=session)

    @hookimpl
    def specplug_finish_session(self, summary: SessionSummary) -> None:
        self._manager.hook.specplug_finish_session(summary=summary)

    @hookimpl
    def specplug_draft_space(self, target: Any, draft: Any) -> DraftSpace | None:
        space: DraftSpace | None = self._manager.hook.specplug_draft_space(target=target, draft=draft)
        return space

    @hookimpl
    def specplug_start_request(self, request: Request) -> None:
        self._manager.hook.specplug_start_request(request=request)

    @hookimpl
    def specplug_finish_request(self, request: Request, reason: str) -> None:
        self._manager.hook.specplug_finish_request(request=request, reason=reason)

    @hookimpl
    def specplug_plan(self, batch: Batch) -> list[int] | None:
        answers: list[Sequence[int]] = self._manager.hook.specplug_plan(batch=batch)
        return [min(row) for row in zip(*answers, strict=True)] if answers else None

    @hookimpl
    def specplug_verify(self, batch: Batch, draft: Draft, target_logits: torch.Tensor) -> Verification | None:
        verification: Verification | None = self._manager.hook.specplug_verify(
            batch=batch, draft=draft, target_logits=target_logits
        )
        return verification

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        self._manager.hook.specplug_advance(batch=batch)

    @hookimpl
    def specplug_accept_metrics(self, outcome: StepOutcome) -> None:
        self._manager.hook.specplug_accept_metrics(outcome=outcome)


def _limits_for(name: str, batch: Batch, limits: Sequence[int], rows: Sequence[int]) -> list[int]:
    """The limits of ``rows``, 0 elsewhere and where the request names another method."""
    allowed = [0] * len(batch)
    for row in rows:
        if batch.requests[row].speculation.get("method", name) == name:
            allowed[row] = limits[row]
    return allowed


def merge_drafts(drafts: Sequence[Draft], chosen: Sequence[int]) -> Draft:
    """Row ``r`` of ``drafts[chosen[r]]`` for every row, with its laws, sources and confidence.

    The drafts are for the same batch. Confidence is kept when every draft states it.
    """
    if len(drafts) == 1:
        return drafts[0]
    stacked = _stack(drafts)
    batch_size = len(chosen)
    return stacked.select_rows([number * batch_size + row for row, number in enumerate(chosen)])


def _stack(drafts: Sequence[Draft]) -> Draft:
    """The rows of all drafts below each other."""
    import torch

    laws: list[LawSpan] = []
    sources: list[SourceSpan] = []
    start = 0
    for draft in drafts:
        laws.extend(LawSpan(start + span.start, start + span.stop, span.law) for span in draft.laws)
        sources.extend(SourceSpan(start + span.start, start + span.stop, span.source) for span in draft.sources)
        start += draft.num_slots
    device = drafts[0].draft_token_ids.device
    confidences = [draft.confidence for draft in drafts if draft.confidence is not None]
    return Draft(
        draft_token_ids=torch.cat([draft.draft_token_ids.to(device) for draft in drafts]),
        num_draft_tokens=tuple(count for draft in drafts for count in draft.num_draft_tokens),
        laws=tuple(laws),
        sources=tuple(sources),
        confidence=torch.cat(confidences) if len(confidences) == len(drafts) else None,
        parents=_stacked_parents(drafts),
        skip_reasons=_stacked_reasons(drafts),
    )


def _stacked_reasons(drafts: Sequence[Draft]) -> tuple[str | None, ...]:
    if not any(draft.skip_reasons for draft in drafts):
        return ()
    return tuple(reason for draft in drafts for reason in draft.skip_reasons or (None,) * len(draft.num_draft_tokens))


def _stacked_parents(drafts: Sequence[Draft]) -> tuple[int, ...] | None:
    if all(draft.parents is None for draft in drafts):
        return None
    parents: list[int] = []
    for draft in drafts:
        as_chains = chain.from_iterable(map(chain_parents, draft.num_draft_tokens))
        parents += as_chains if draft.parents is None else draft.parents
    return tuple(parents)
