from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specplug.draft_space import IdentityDraftSpace
from specplug.errors import ConfigError, PluginFaultError
from specplug.hooks import SessionHooks, hookimpl
from specplug.methods import PluginContext
from specplug.proposers import CompositeProposer
from specplug.proposers.composite import merge_drafts
from specplug.types import (
    Batch,
    Dense,
    Draft,
    LawSpan,
    OneHot,
    Request,
    Session,
    SessionSummary,
    StepOutcome,
    Verification,
)


class Child:
    """Answers with one list per row and writes down what it is asked."""

    def __init__(self, answer: list[list[int]] | None, plan: list[int] | None = None) -> None:
        self.answer = answer
        self.plan = plan
        self.calls: list[str] = []
        self.limits: list[list[int]] = []

    @hookimpl
    def specplug_propose(self, limits: Sequence[int]) -> Draft | None:
        self.limits.append(list(limits))
        return None if self.answer is None else Draft.from_lists(self.answer)

    @hookimpl
    def specplug_plan(self, batch: Batch) -> list[int] | None:
        return self.plan

    @hookimpl
    def specplug_start_session(self, session: Session) -> None:
        self.calls.append("start_session")

    @hookimpl
    def specplug_finish_session(self, summary: SessionSummary) -> None:
        self.calls.append("finish_session")

    @hookimpl
    def specplug_start_request(self, request: Request) -> None:
        self.calls.append(f"start {request.request_id}")

    @hookimpl
    def specplug_finish_request(self, request: Request, reason: str) -> None:
        self.calls.append(f"finish {request.request_id} {reason}")

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        self.calls.append("advance")

    @hookimpl
    def specplug_accept_metrics(self, outcome: StepOutcome) -> None:
        self.calls.append(f"metrics {outcome.step}")


def spans(draft: Draft) -> list[tuple[int, int, str]]:
    return [(span.start, span.stop, span.source) for span in draft.sources]


def test_each_row_takes_the_first_draft_that_is_not_empty(make_batch: Any) -> None:
    first, second = Child([[], [1, 2], []]), Child([[3], [4], []])
    draft = CompositeProposer([("a", first), ("b", second)]).propose(make_batch([[0]] * 3), [2, 2, 2])
    assert draft is not None
    assert draft.num_draft_tokens == (1, 2, 0)
    assert draft.draft_token_ids.tolist() == [3, 1, 2]
    assert spans(draft) == [(0, 1, "b"), (1, 3, "a")]
    assert second.limits == [[2, 0, 2]]


def test_nobody_is_asked_for_rows_that_have_a_draft(make_batch: Any) -> None:
    first, second = Child([[1], [2]]), Child([[3], [4]])
    draft = CompositeProposer([("a", first), ("b", second)]).propose(make_batch([[0]] * 2), [1, 1])
    assert draft is not None
    assert draft.draft_token_ids.tolist() == [1, 2]
    assert second.limits == []


def test_rows_without_a_limit_and_inside_their_prompt_stay_empty(make_batch: Any) -> None:
    greedy = Child([[1, 1], [2, 2], [3, 3]])
    batch = make_batch([[0, 0]] * 3, in_prompt=[2])
    draft = CompositeProposer([("a", greedy)]).propose(batch, [1, 0, 2])
    assert draft is not None
    assert (draft.num_draft_tokens, draft.draft_token_ids.tolist()) == ((1, 0, 0), [1])


def test_none_when_no_child_answers(make_batch: Any) -> None:
    composite = CompositeProposer([("a", Child(None)), ("b", Child(None))])
    assert composite.propose(make_batch([[0]]), [1]) is None


def test_a_request_may_name_its_method(make_batch: Any) -> None:
    first, second = Child([[1]] * 3), Child([[2]] * 3)
    batch = make_batch([[0]] * 3, speculation=[{}, {"method": "b"}, {"method": "c"}])
    composite = CompositeProposer([("a", first), ("b", second)])
    draft = composite.propose(batch, [1, 1, 1])
    assert draft is not None
    assert (draft.num_draft_tokens, draft.draft_token_ids.tolist()) == ((1, 1, 0), [1, 2])
    assert (first.limits, second.limits) == ([[1, 0, 0]], [[0, 1, 0]])
    assert composite.method_names == ("a", "b")


def test_laws_and_confidence_follow_their_rows() -> None:
    logits = torch.arange(6.0).reshape(2, 3)
    dense = Draft(torch.tensor([5, 6]), (1, 1), (LawSpan(0, 2, Dense(logits)),), (), torch.tensor([0.5, 0.6]))
    listed = Draft(torch.tensor([7]), (0, 1), (LawSpan(0, 1, OneHot()),), (), torch.tensor([0.7]))
    merged = merge_drafts([listed, dense], [1, 0])
    assert (merged.num_draft_tokens, merged.draft_token_ids.tolist()) == ((1, 1), [5, 7])
    first, second = merged.laws
    assert isinstance(first.law, Dense)
    assert first.law.draft_logits.tolist() == [[0.0, 1.0, 2.0]]
    assert isinstance(second.law, OneHot)
    assert merged.confidence is not None
    assert merged.confidence.tolist() == pytest.approx([0.5, 0.7])
    assert merge_drafts([listed, Draft.from_lists([[1], []])], [1, 0]).confidence is None


def test_parents_follow_their_rows() -> None:
    trees = Draft.from_trees([[5, 6, 7], []], [[-1, -1, 0], []])
    listed = Draft.from_lists([[], [1, 2]])
    merged = merge_drafts([listed, trees], [1, 0])
    assert (merged.num_draft_tokens, merged.draft_token_ids.tolist()) == ((3, 2), [5, 6, 7, 1, 2])
    assert merged.parents == (-1, -1, 0, -1, 0)
    assert merge_drafts([listed, trees], [0, 0]).parents is None


def test_every_other_hook_reaches_all_children_in_order(make_batch: Any) -> None:
    children = [Child(None, plan=[3, 1]), Child(None), Child(None, plan=[2, 5])]
    composite = CompositeProposer([("a", children[0]), ("b", children[1]), ("c", children[2])])
    hooks = SessionHooks([("hybrid", composite)], vocab_size=10, strict=True)
    batch = make_batch([[0], [1]])
    hooks.start_session(Session(10, 2, 16, 4))
    hooks.start_request(batch.requests[0])
    assert hooks.plan(batch, [9, 9]) == [2, 1]
    hooks.advance(batch)
    hooks.accept_metrics(StepOutcome(3, ()))
    hooks.finish_request(batch.requests[0], "stop")
    hooks.finish_session(SessionSummary(1, 1))
    expected = ["start_session", "start r0", "advance", "metrics 3", "finish r0 stop", "finish_session"]
    assert [child.calls for child in children] == [expected] * 3


def test_draft_space_and_verify_are_forwarded(make_batch: Any) -> None:
    space, verification = IdentityDraftSpace(4), Verification(torch.zeros(1, 1), torch.zeros(1))

    class Answers:
        @hookimpl
        def specplug_draft_space(self, draft: Any) -> IdentityDraftSpace | None:
            return space if draft == "mine" else None

        @hookimpl
        def specplug_verify(self, batch: Batch) -> Verification | None:
            return verification

    composite = CompositeProposer([("a", Child(None)), ("b", Answers())])
    assert composite.specplug_draft_space(None, "mine") is space
    assert composite.specplug_draft_space(None, "other") is None
    assert composite.specplug_verify(make_batch([[0]]), Draft.empty(1), torch.zeros(1, 4)) is verification


def test_no_plan_when_no_child_has_one(make_batch: Any) -> None:
    assert CompositeProposer([("a", Child(None))]).specplug_plan(make_batch([[0]])) is None


def test_a_wrong_count_of_rows_names_the_child(make_batch: Any) -> None:
    composite = CompositeProposer([("short", Child([[1]]))])
    with pytest.raises(ValueError, match="child 'short' drafted for 1 rows of a batch of 2"):
        composite.propose(make_batch([[0], [0]]), [1, 1])
    hooks = SessionHooks([("hybrid", composite)], vocab_size=10, strict=True)
    with pytest.raises(PluginFaultError):
        hooks.propose(make_batch([[0], [0]]), [1, 1])


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_children_need_different_names(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="children with different names"):
        CompositeProposer([(name, Child(None)) for name in names])


def test_children_are_created_through_the_context(make_batch: Any) -> None:
    asked: list[tuple[str, Mapping[str, Any]]] = []

    def create(method: str, options: Mapping[str, Any]) -> object:
        asked.append((method, options))
        return Child([[len(asked)]])

    session = Session(10, 1, 16, 2)
    context = PluginContext(session, SimpleNamespace(model=None, tokenizer=None), create, lambda draft: None)
    composite = CompositeProposer.from_methods(context, [("a", {"x": 1}), ("b", {})])
    assert asked == [("a", {"x": 1}), ("b", {})]
    draft = composite.propose(make_batch([[0]]), [1])
    assert draft is not None
    assert draft.draft_token_ids.tolist() == [1]


def test_a_wrapper_of_a_child_stays_with_that_child(make_batch: Any) -> None:
    class Cut(Child):
        @hookimpl(wrapper=True, specname="specplug_propose")
        def cut(self, batch: Batch, limits: Sequence[int]) -> Any:
            draft = yield
            return draft.truncate([1] * len(batch))

    composite = CompositeProposer([("a", Cut([[1, 2], []])), ("b", Child([[], [3, 4]]))])
    draft = composite.propose(make_batch([[0], [0]]), [2, 2])
    assert draft is not None
    assert draft.num_draft_tokens == (1, 2)
