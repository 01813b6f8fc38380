"""Each hook through a session: who is called, in which order, how often, with what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specplug.draft_space import IdentityDraftSpace
from specplug.errors import PluginError
from specplug.hooks import ProcessManager, SessionHooks, hookimpl
from specplug.hooks.contract import HOOK_ARGUMENTS
from specplug.methods import MethodSpec
from specplug.types import Batch, Draft, Session, SessionSummary, StepOutcome, Verification

MakeBatch = Callable[[int], Batch]
MakeHooks = Callable[..., SessionHooks]


class Recorder:
    """Implements every void hook and notes its calls."""

    def __init__(self, log: list[tuple[str, str, object]], label: str) -> None:
        self._log = log
        self._label = label

    @hookimpl
    def specplug_start_session(self, session: Session) -> None:
        self._log.append((self._label, "start_session", session))

    @hookimpl
    def specplug_finish_session(self, summary: SessionSummary) -> None:
        self._log.append((self._label, "finish_session", summary))

    @hookimpl
    def specplug_start_request(self, request: Any) -> None:
        self._log.append((self._label, "start_request", request))

    @hookimpl
    def specplug_finish_request(self, request: Any, reason: str) -> None:
        self._log.append((self._label, "finish_request", (request, reason)))

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        self._log.append((self._label, "advance", batch))

    @hookimpl
    def specplug_accept_metrics(self, outcome: StepOutcome) -> None:
        self._log.append((self._label, "accept_metrics", outcome))


class Answers:
    """Answers plan, propose, verify and draft_space with what it was given."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.calls: Counter[str] = Counter()

    def _answer(self, hook: str) -> Any:
        self.calls[hook] += 1
        return self._answers.get(hook)

    @hookimpl
    def specplug_plan(self, batch: Batch) -> Any:
        return self._answer("plan")

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Any:
        return self._answer("propose")

    @hookimpl
    def specplug_verify(self, target_logits: torch.Tensor) -> Any:
        return self._answer("verify")

    @hookimpl
    def specplug_draft_space(self, draft: Any) -> Any:
        return self._answer("draft_space")


@pytest.fixture
def recorded(make_hooks: MakeHooks) -> tuple[SessionHooks, list[tuple[str, str, object]]]:
    log: list[tuple[str, str, object]] = []
    return make_hooks(Recorder(log, "first"), Recorder(log, "second"), strict=True), log


def ok_verification(num_rows: int, width: int) -> Verification:
    return Verification(torch.zeros(num_rows, width, dtype=torch.int32), torch.zeros(num_rows, dtype=torch.int32))


def test_hook_register() -> None:
    class Plugin:
        num_calls = 0

        @hookimpl
        def specplug_register(self) -> Any:
            self.num_calls += 1
            return (MethodSpec("one", "policy", lambda config, context: Answers()),)

    plugin, manager = Plugin(), ProcessManager(entry_points=[])
    assert manager.register(plugin) == ("one",)
    assert manager.spec("one") is manager.spec("one")
    assert plugin.num_calls == 1


@pytest.mark.parametrize("name", ["start_session", "start_request", "advance", "accept_metrics", "finish_session"])
def test_void_hooks_call_everybody_once_in_order(recorded: Any, name: str) -> None:
    hooks, log = recorded
    argument = SimpleNamespace()
    getattr(hooks, name)(argument)
    assert log == [("first", name, argument), ("second", name, argument)]


def test_hook_start_session(recorded: Any) -> None:
    session = Session(vocab_size=64, max_num_seqs=8, max_model_len=128, num_speculative_tokens=3)
    recorded[0].start_session(session)
    assert [entry[2] for entry in recorded[1]] == [session, session]


def test_hook_start_request(recorded: Any, make_batch: MakeBatch) -> None:
    request = make_batch(1).requests[0]
    recorded[0].start_request(request)
    assert [entry[2] for entry in recorded[1]] == [request, request]


def test_hook_finish_request(recorded: Any, make_batch: MakeBatch) -> None:
    request = make_batch(1).requests[0]
    recorded[0].finish_request(request, "abort")
    assert recorded[1] == [(label, "finish_request", (request, "abort")) for label in ("first", "second")]


def test_hook_advance(recorded: Any, make_batch: MakeBatch) -> None:
    batch = make_batch(2)
    recorded[0].advance(batch)
    assert [entry[2] for entry in recorded[1]] == [batch, batch]


def test_hook_accept_metrics(recorded: Any) -> None:
    outcome = StepOutcome(step=1, rows=())
    recorded[0].accept_metrics(outcome)
    assert [entry[2] for entry in recorded[1]] == [outcome, outcome]


def test_hook_finish_session(recorded: Any) -> None:
    recorded[0].finish_session(SessionSummary(num_steps=1, num_requests=2))
    assert [entry[1] for entry in recorded[1]] == ["finish_session"] * 2


def test_hook_draft_space(make_hooks: MakeHooks) -> None:
    space = IdentityDraftSpace(64)
    silent, answering, late = Answers(), Answers(draft_space=space), Answers(draft_space=IdentityDraftSpace(1))
    assert make_hooks(silent, answering, late, strict=True).draft_space(None, None) is space
    assert (silent.calls["draft_space"], late.calls["draft_space"]) == (1, 0)
    assert make_hooks(Answers()).draft_space(None, None) is None


def test_hook_plan(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    hooks = make_hooks(Answers(plan=[5, 1, 2]), Answers(), Answers(plan=(2, 9, 0)), strict=True)
    limits = [4, 4, 4]
    assert hooks.plan(make_batch(3), limits) == [2, 1, 0]
    assert limits == [4, 4, 4]
    assert make_hooks().plan(make_batch(3), limits) == limits


def test_hook_propose(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    silent, answering, late = (
        Answers(),
        Answers(propose=Draft.from_lists([[1], [2, 3]])),
        Answers(propose=Draft.empty(2)),
    )
    hooks = make_hooks(silent, answering, late, strict=True)
    draft = hooks.propose(make_batch(2), [2, 2])
    assert draft is not None
    assert (draft.draft_token_ids.tolist(), draft.num_draft_tokens) == ([1, 2, 3], (1, 2))
    assert [(span.start, span.stop, span.source) for span in draft.sources] == [(0, 3, "b")]
    assert (silent.calls["propose"], late.calls["propose"]) == (1, 0)


def test_an_empty_draft_is_an_answer(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    late = Answers(propose=Draft.from_lists([[1]]))
    draft = make_hooks(Answers(propose=Draft.empty(1)), late, strict=True).propose(make_batch(1), [2])
    assert draft is not None
    assert draft.num_slots == 0
    assert late.calls["propose"] == 0


def test_nobody_is_asked_when_every_limit_is_0(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    proposer = Answers(propose=Draft.from_lists([[1], [1]]))
    assert make_hooks(proposer).propose(make_batch(2), [0, 0]) is None
    assert proposer.calls["propose"] == 0


def test_hook_verify(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    class Builtin:
        @hookimpl(trylast=True)
        def specplug_verify(self, batch: Batch, draft: Draft) -> Verification:
            return builtin

    builtin, other = ok_verification(1, 2), ok_verification(1, 2)
    batch, draft, logits = make_batch(1), Draft.from_lists([[1]]), torch.zeros(2, 64)
    silent = Answers()
    assert make_hooks(silent, Answers(verify=other), verifier=Builtin()).verify(batch, draft, logits) is other
    assert make_hooks(Answers(), verifier=Builtin()).verify(batch, draft, logits) is builtin
    assert make_hooks(Builtin(), Answers(verify=other)).verify(batch, draft, logits) is other
    with pytest.raises(PluginError, match="no verifier answered"):
        make_hooks(Answers()).verify(batch, draft, logits)


@pytest.mark.parametrize(("size", "num_tokens"), [(1, 1), (2, 4), (8, 3), (32, 7)])
def test_the_number_of_hook_calls_does_not_depend_on_batch_or_draft(
    make_hooks: MakeHooks, make_batch: MakeBatch, size: int, num_tokens: int
) -> None:
    draft = Draft.from_lists([[1] * num_tokens] * size)
    hooks = make_hooks(Answers(propose=draft), Recorder([], "x"), Answers(verify=ok_verification(size, num_tokens + 1)))
    counts: Counter[str] = Counter()
    undo = hooks.plugin_manager.add_hookcall_monitoring(
        lambda hook, implementations, arguments: counts.update([hook]), lambda *arguments: None
    )
    batch = make_batch(size)
    hooks.propose(batch, hooks.plan(batch, [num_tokens] * size))
    hooks.verify(batch, draft, torch.zeros(1))
    hooks.advance(batch)
    hooks.accept_metrics(StepOutcome(step=1, rows=()))
    undo()
    assert counts == dict.fromkeys(
        ["specplug_plan", "specplug_propose", "specplug_verify", "specplug_advance", "specplug_accept_metrics"], 1
    )


def test_every_hook_has_a_test() -> None:
    names = {name.replace("specplug_", "test_hook_") for name in HOOK_ARGUMENTS}
    assert names <= set(globals())
