"""A plugin's fault stays its own: counted, logged once, detached where its state is unknown."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch

from specplug.errors import ConfigError, ModelError, PluginFaultError
from specplug.hooks import SessionHooks, hookimpl
from specplug.types import Batch, Draft, SessionSummary, StepOutcome, Verification

MakeBatch = Callable[[int], Batch]
MakeHooks = Callable[..., SessionHooks]
Logged = Callable[[], list[str]]
OUTCOME = StepOutcome(step=1, rows=())
VOID_HOOKS = ["start_session", "start_request", "advance", "accept_metrics"]


class Proposer:
    """Proposes [1] for every row; ``failing`` names the hook that raises."""

    def __init__(self, failing: str = "", error: BaseException | None = None) -> None:
        self._failing = failing
        self._error = error or ValueError("boom")
        self.calls: list[str] = []

    def _note(self, hook: str) -> None:
        self.calls.append(hook)
        if hook == self._failing:
            raise self._error

    @hookimpl
    def specplug_start_session(self, session: Any) -> None:
        self._note("start_session")

    @hookimpl
    def specplug_start_request(self, request: Any) -> None:
        self._note("start_request")

    @hookimpl
    def specplug_plan(self, batch: Batch) -> None:
        self._note("plan")

    @hookimpl
    def specplug_propose(self, batch: Batch) -> Draft:
        self._note("propose")
        return Draft.from_lists([[1]] * len(batch))

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        self._note("advance")

    @hookimpl
    def specplug_accept_metrics(self, outcome: StepOutcome) -> None:
        self._note("accept_metrics")

    @hookimpl
    def specplug_finish_request(self, request: Any, reason: str) -> None:
        self._note("finish_request")

    @hookimpl
    def specplug_finish_session(self, summary: SessionSummary) -> None:
        self._note("finish_session")


def run_step(hooks: SessionHooks, batch: Batch) -> Draft | None:
    limits = hooks.plan(batch, [2] * len(batch))
    draft = hooks.propose(batch, limits)
    hooks.advance(batch)
    hooks.accept_metrics(OUTCOME)
    return draft


def wrapper(body: Callable[[Any], Any], *, fail_first: bool = False) -> Any:
    """A propose wrapper that returns ``body(inner)``."""

    class Wrapper:
        num_calls = 0

        @hookimpl(wrapper=True)
        def specplug_propose(self, batch: Batch) -> Generator[None, Any, Any]:
            self.num_calls += 1
            if fail_first:
                raise ValueError("boom before")
            inner = yield
            return body(inner)

    return Wrapper()


def raises(error: BaseException) -> Callable[[Any], Any]:
    def body(inner: Any) -> Any:
        raise error

    return body


# --- plain implementations --------------------------------------------------------------------------------


def test_a_raising_proposer_is_detached_and_the_next_is_asked(
    make_hooks: MakeHooks, make_batch: MakeBatch, warnings_logged: Logged
) -> None:
    broken, other = Proposer("propose"), Proposer()
    hooks, batch = make_hooks(broken, other), make_batch(2)
    for _ in range(3):
        draft = run_step(hooks, batch)
        assert draft is not None
        assert draft.sources[0].source == "b"
    assert broken.calls == ["plan", "propose"]
    assert other.calls == ["plan", "propose", "advance", "accept_metrics"] * 3
    assert hooks.take_faults() == {"propose_raised:a": 1}
    assert hooks.take_faults() == {}
    assert hooks.faults == {"propose_raised:a": 1}
    assert hooks.names == ("b",)
    assert hooks.instance("a") is None
    (message,) = warnings_logged()
    for part in ('plugin "a" (dist-of-a 1.0)', "specplug_propose", "raised ValueError: boom", "detached"):
        assert part in message


@pytest.mark.parametrize("hook", [*VOID_HOOKS, "plan"])
def test_a_fault_in_any_hook_detaches_and_spares_the_others(
    make_hooks: MakeHooks, make_batch: MakeBatch, hook: str
) -> None:
    broken, other = Proposer(hook), Proposer()
    hooks, batch = make_hooks(broken, other), make_batch(1)
    call: dict[str, Any] = {"plan": lambda: hooks.plan(batch, [1])}
    call.get(hook, lambda: getattr(hooks, hook)(batch))()
    assert other.calls == [hook]
    run_step(hooks, batch)
    assert broken.calls == [hook]
    assert hooks.take_faults() == {f"{hook}_raised:a": 1}


def test_a_detached_instance_still_releases_what_it_took(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    broken = Proposer("propose")
    hooks, batch = make_hooks(broken), make_batch(1)
    run_step(hooks, batch)
    hooks.finish_request(batch.requests[0], "stop")
    hooks.finish_session(SessionSummary(num_steps=1, num_requests=1))
    assert broken.calls == ["plan", "propose", "finish_session"]


def test_a_raising_finish_session_is_recorded_and_runs_once(make_hooks: MakeHooks) -> None:
    broken, other = Proposer("finish_session"), Proposer()
    hooks = make_hooks(broken, other)
    hooks.finish_session(SessionSummary(num_steps=0, num_requests=0))
    assert (broken.calls, other.calls) == (["finish_session"], ["finish_session"])
    assert hooks.take_faults() == {"finish_session_raised:a": 1}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_interrupts_pass(make_hooks: MakeHooks, make_batch: MakeBatch, error: BaseException) -> None:
    entered: list[str] = []

    class Around:
        @hookimpl(wrapper=True)
        def specplug_propose(self) -> Generator[None, Any, Any]:
            try:
                return (yield)
            finally:
                entered.append("left")

    hooks = make_hooks(Around(), Proposer("propose", error))
    with pytest.raises(type(error)):
        hooks.propose(make_batch(1), [1])
    assert entered == ["left"]
    assert hooks.take_faults() == {}
    assert hooks.has_proposer


def test_a_wrapper_that_breaks_while_an_interrupt_passes_does_not_hide_it(
    make_hooks: MakeHooks, make_batch: MakeBatch
) -> None:
    class Around:
        @hookimpl(wrapper=True)
        def specplug_propose(self) -> Generator[None, Any, Any]:
            try:
                return (yield)
            finally:
                raise ValueError("boom while leaving")

    hooks = make_hooks(Around(), Proposer("propose", KeyboardInterrupt()), strict=True)
    with pytest.raises(KeyboardInterrupt):
        hooks.propose(make_batch(1), [1])
    assert hooks.take_faults() == {"propose_raised:a": 1}


def test_the_hosts_own_verifier_is_not_guarded(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    class Builtin:
        @hookimpl(trylast=True)
        def specplug_verify(self) -> Verification:
            raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError):
        make_hooks(Proposer(), verifier=Builtin()).verify(make_batch(1), Draft.empty(1), torch.zeros(1, 64))


# --- wrappers ---------------------------------------------------------------------------------------------


def test_a_wrapper_changes_the_answer(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    hooks = make_hooks(wrapper(lambda inner: inner.truncate([1, 0])), Proposer(), strict=True)
    draft = hooks.propose(make_batch(2), [2, 2])
    assert draft is not None
    assert draft.num_draft_tokens == (1, 0)
    assert [(span.stop, span.source) for span in draft.sources] == [(1, "b")]


@pytest.mark.parametrize("fail_first", [True, False], ids=["before", "after"])
def test_a_raising_wrapper_is_detached_and_the_inner_answer_stands(
    make_hooks: MakeHooks, make_batch: MakeBatch, fail_first: bool
) -> None:
    broken = wrapper(raises(ValueError("boom after")), fail_first=fail_first)
    hooks, batch = make_hooks(broken, Proposer()), make_batch(2)
    for _ in range(2):
        draft = hooks.propose(batch, [2, 2])
        assert draft is not None
        assert draft.num_draft_tokens == (1, 1)
    assert broken.num_calls == 1
    assert hooks.take_faults() == {"propose_raised:a": 1}
    assert hooks.has_proposer


def test_a_forgotten_return_keeps_the_inner_answer_and_the_wrapper(
    make_hooks: MakeHooks, make_batch: MakeBatch
) -> None:
    forgetful = wrapper(lambda inner: None)
    hooks, batch = make_hooks(forgetful, Proposer()), make_batch(1)
    assert all(hooks.propose(batch, [1]) is not None for _ in range(2))
    assert hooks.take_faults() == {"propose_no_return:a": 2}
    assert forgetful.num_calls == 2


def test_none_around_none_is_no_fault(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    hooks = make_hooks(wrapper(lambda inner: inner), strict=True)
    assert hooks.propose(make_batch(1), [1]) is None


def test_a_void_hooks_wrapper_may_return_nothing(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    class Around:
        @hookimpl(wrapper=True)
        def specplug_advance(self) -> Generator[None, Any, None]:
            yield

    make_hooks(Around(), Proposer(), strict=True).advance(make_batch(1))


@pytest.mark.parametrize("num_yields", [0, 2])
def test_a_wrapper_yields_exactly_once(make_hooks: MakeHooks, make_batch: MakeBatch, num_yields: int) -> None:
    class Odd:
        @hookimpl(wrapper=True)
        def specplug_propose(self) -> Generator[None, Any, Any]:
            for _ in range(num_yields):
                yield

    hooks = make_hooks(Odd(), Proposer())
    assert hooks.propose(make_batch(1), [1]) is not None
    assert hooks.take_faults() == {f"propose_{'no' if num_yields == 0 else 'second'}_yield:a": 1}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([[1], [1]], "propose_type:a"),
        (Draft.from_lists([[1]]), "propose_rows:a"),
        (Draft.from_lists([[64], [1]]), "propose_out_of_range:a"),
    ],
)
def test_a_wrappers_malformed_draft_is_its_own_fault(
    make_hooks: MakeHooks, make_batch: MakeBatch, answer: object, reason: str
) -> None:
    hooks = make_hooks(wrapper(lambda inner: answer), Proposer())
    draft = hooks.propose(make_batch(2), [2, 2])
    assert draft is not None
    assert draft.sources[0].source == "b"
    assert hooks.take_faults() == {reason: 1}


def test_ids_that_a_wrapper_changed_in_place_are_checked_again(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    def add(number: int) -> Any:
        return wrapper(lambda inner: inner.draft_token_ids.add_(number) is None or inner)

    hooks = make_hooks(add(5), Proposer())
    draft = hooks.propose(make_batch(1), [1])
    assert draft is not None
    assert draft.draft_token_ids.tolist() == [6]
    hooks = make_hooks(add(63), Proposer())
    assert hooks.propose(make_batch(1), [1]) is None
    assert hooks.take_faults() == {"propose_out_of_range:a": 1}


def spoil_ids(draft: Draft) -> None:
    draft.draft_token_ids.fill_(99)


def spoil_counts(draft: Draft) -> None:
    object.__setattr__(draft, "num_draft_tokens", (5,))


@pytest.mark.parametrize("spoil", [spoil_ids, spoil_counts])
@pytest.mark.parametrize("end", ["returns", "forgets", "raises", "yields again", "returns another type"])
def test_a_draft_that_a_wrapper_spoilt_is_dropped_however_it_ends(
    make_hooks: MakeHooks, make_batch: MakeBatch, spoil: Callable[[Draft], None], end: str
) -> None:
    class Spoils:
        @hookimpl(wrapper=True)
        def specplug_propose(self) -> Generator[None, Any, Any]:
            inner = yield
            spoil(inner)
            if end == "raises":
                raise ValueError("boom")
            if end == "yields again":
                yield
            return {"returns": inner, "returns another type": 3}.get(end)

    hooks = make_hooks(Spoils(), Proposer())
    assert hooks.propose(make_batch(1), [1]) is None
    what = "out_of_range" if spoil is spoil_ids else "count"
    assert hooks.take_faults()[f"propose_{what}:a"] == 1


def test_what_a_wrapper_does_to_a_draft_that_it_replaces_is_no_fault(
    make_hooks: MakeHooks, make_batch: MakeBatch
) -> None:
    hooks = make_hooks(wrapper(lambda inner: spoil_ids(inner) or Draft.from_lists([[3]])), Proposer(), strict=True)
    draft = hooks.propose(make_batch(1), [1])
    assert draft is not None
    assert draft.draft_token_ids.tolist() == [3]


def test_a_verification_that_a_wrapper_spoilt_is_made_again_without_it(
    make_hooks: MakeHooks, make_batch: MakeBatch
) -> None:
    class Spoils:
        @hookimpl(wrapper=True)
        def specplug_verify(self) -> Generator[None, Any, Any]:
            inner = yield
            inner.output_token_ids.fill_(99)
            return inner

    class Builtin:
        @hookimpl(trylast=True)
        def specplug_verify(self) -> Verification:
            return verification([[5]], [0])

    hooks = make_hooks(Spoils(), verifier=Builtin())
    for _ in range(2):
        assert hooks.verify(make_batch(1), Draft.empty(1), torch.zeros(1, 64)).output_token_ids.tolist() == [[5]]
    assert hooks.take_faults() == {"verify_value:a": 1}


def test_wrappers_never_see_a_malformed_draft(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    class Lists:
        @hookimpl
        def specplug_propose(self, batch: Batch) -> Any:
            return [[1]] * len(batch)

    seen: list[Any] = []
    hooks = make_hooks(wrapper(lambda inner: seen.append(inner) or inner), Lists())
    assert hooks.propose(make_batch(1), [1]) is None
    assert seen == [None]
    assert hooks.take_faults() == {"propose_type:b": 1}
    assert hooks.has_proposer  # dropped, not detached


def test_a_wrapper_of_plan_gets_and_returns_all_answers(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    def around(body: Callable[[Any], Any]) -> Any:
        class Around:
            @hookimpl(wrapper=True)
            def specplug_plan(self) -> Generator[None, Any, Any]:
                return body((yield))

        return Around()

    class Cap:
        @hookimpl
        def specplug_plan(self, batch: Batch) -> Sequence[int]:
            return [2] * len(batch)

    batch = make_batch(2)
    assert make_hooks(around(lambda answers: [*answers, [1, 3]]), Cap(), strict=True).plan(batch, [4, 4]) == [1, 2]
    in_place = lambda answers: answers.clear() or answers.append("x") or answers  # noqa: E731
    for bad in (lambda answers: [1, 1], lambda answers: (1,), lambda answers: None, in_place):
        hooks = make_hooks(around(bad), Cap())
        assert hooks.plan(batch, [4, 4]) == [2, 2]
        assert sum(hooks.take_faults().values()) == 1


# --- plan and draft_space answers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([1], "plan_rows:a"),
        ([1, -1], "plan_value:a"),
        ([1, 1.5], "plan_value:a"),
        ([1, None], "plan_value:a"),
        ("11", "plan_type:a"),
        (3, "plan_type:a"),
    ],
)
def test_a_bad_plan_is_ignored(make_hooks: MakeHooks, make_batch: MakeBatch, answer: object, reason: str) -> None:
    class Plan:
        @hookimpl
        def specplug_plan(self) -> Any:
            return answer

    hooks = make_hooks(Plan())
    assert hooks.plan(make_batch(2), [3, 3]) == [3, 3]
    assert hooks.take_faults() == {reason: 1}
    assert hooks.names == ("a",)


def test_a_bad_draft_space_is_ignored(make_hooks: MakeHooks) -> None:
    class Space:
        @hookimpl
        def specplug_draft_space(self) -> Any:
            return "identity"

    hooks = make_hooks(Space())
    assert hooks.draft_space(None, None) is None
    assert hooks.take_faults() == {"draft_space_type:a": 1}


# --- logging, strict, time --------------------------------------------------------------------------------


def test_each_reason_is_logged_once(make_hooks: MakeHooks, make_batch: MakeBatch, warnings_logged: Logged) -> None:
    hooks, batch = make_hooks(wrapper(lambda inner: None), wrapper(lambda inner: None), Proposer()), make_batch(1)
    for _ in range(5):
        hooks.propose(batch, [1])
    assert hooks.take_faults() == {"propose_no_return:a": 5, "propose_no_return:b": 5}
    assert len(warnings_logged()) == 2


@pytest.mark.parametrize("hook", [*VOID_HOOKS, "propose"])
def test_strict_raises_with_the_cause(make_hooks: MakeHooks, make_batch: MakeBatch, hook: str) -> None:
    error = ValueError("boom")
    hooks, batch = make_hooks(wrapper(lambda inner: inner), Proposer(hook, error), strict=True), make_batch(1)
    with pytest.raises(PluginFaultError) as caught:
        hooks.propose(batch, [1]) if hook == "propose" else getattr(hooks, hook)(batch)
    assert caught.value.__cause__ is error
    for part in ('plugin "b" (dist-of-b 1.0)', f"specplug_{hook}", "ValueError: boom", "detached"):
        assert part in str(caught.value)
    assert hooks.take_faults() == {f"{hook}_raised:b": 1}  # not laid at the wrapper's door


def test_strict_raises_for_wrappers_and_malformed_answers(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    for body in (raises(ValueError("boom")), lambda inner: None, lambda inner: 3):
        with pytest.raises(PluginFaultError, match='plugin "a"'):
            make_hooks(wrapper(body), Proposer(), strict=True).propose(make_batch(1), [1])


class Slow:
    """Sleeps while ``is_slow``."""

    is_slow = True

    @hookimpl
    def specplug_propose(self, batch: Batch) -> Draft:
        if self.is_slow:
            time.sleep(0.02)
        return Draft.from_lists([[1]] * len(batch))


def test_three_overruns_in_a_row_detach(make_hooks: MakeHooks, make_batch: MakeBatch, warnings_logged: Logged) -> None:
    hooks, batch = make_hooks(Slow(), time_limit_s=0.01), make_batch(1)
    drafts = [hooks.propose(batch, [1]) for _ in range(4)]
    assert [draft is not None for draft in drafts] == [True, True, True, False]
    assert hooks.take_faults() == {"propose_slow:a": 2, "propose_too_slow:a": 1}
    assert len(warnings_logged()) == 2
    assert not hooks.has_proposer


def test_overruns_must_be_in_a_row(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    slow = Slow()
    hooks, batch = make_hooks(slow, time_limit_s=0.01, strict=True), make_batch(1)
    for is_slow in (True, True, False, True, True, False):
        slow.is_slow = is_slow
        assert hooks.propose(batch, [1]) is not None
    assert hooks.take_faults() == {"propose_slow:a": 4}


def test_a_wrapper_answers_for_its_own_time_only(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    hooks, batch = make_hooks(wrapper(lambda inner: inner), Slow(), time_limit_s=0.01), make_batch(1)
    for _ in range(3):
        hooks.propose(batch, [1])
    assert hooks.names == ("a",)
    slow_wrapper = wrapper(lambda inner: time.sleep(0.02) or inner)
    hooks = make_hooks(slow_wrapper, Proposer(), time_limit_s=0.01)
    for _ in range(3):
        assert hooks.propose(batch, [1]) is not None
    assert hooks.names == ("b",)


# --- verifier plugins -------------------------------------------------------------------------------------


def verification(ids: Any, accepted: Any, **more: Any) -> Verification:
    return Verification(torch.tensor(ids, dtype=torch.int32), torch.tensor(accepted, dtype=torch.int32), **more)


GOOD = verification([[1, 5, -1], [2, -1, -1]], [1, 0])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (3, "verify_type:a"),
        (verification([[1, 5], [2, -1]], [1, 0]), "verify_shape:a"),
        (verification([[1, 5, -1]], [1]), "verify_shape:a"),
        (Verification(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32)), "verify_shape:a"),
        (Verification(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2)), "verify_shape:a"),
        (verification([[1, 5, -1], [2, -1, -1]], [1, 0], is_invalid=torch.zeros(2)), "verify_shape:a"),
        (verification([[1, 5, -1], [2, -1, -1]], [1, 0], accepted_draft_indices=torch.zeros(3)), "verify_shape:a"),
        (verification([[1, 5, -1], [2, -1, -1]], [1, 0], is_invalid=7), "verify_malformed:a"),
        (verification([[1, 5, -1], [2, 3, 4]], [1, 2]), "verify_value:a"),
        (verification([[1, 5, -1], [2, -1, -1]], [-1, 0]), "verify_value:a"),
        (verification([[1, -1, -1], [2, -1, -1]], [1, 0]), "verify_value:a"),
        (verification([[1, 64, -1], [2, -1, -1]], [1, 0]), "verify_value:a"),
        (ValueError("boom"), "verify_raised:a"),
    ],
)
def test_a_bad_verifier_is_detached_and_the_builtin_decides(
    make_hooks: MakeHooks, make_batch: MakeBatch, answer: object, reason: str
) -> None:
    class Bad:
        num_calls = 0

        @hookimpl
        def specplug_verify(self, batch: Batch, draft: Draft, target_logits: torch.Tensor) -> Any:
            self.num_calls += 1
            if isinstance(answer, Exception):
                raise answer
            return answer

    class Builtin:
        @hookimpl(trylast=True)
        def specplug_verify(self) -> Verification:
            return GOOD

    bad = Bad()
    hooks = make_hooks(bad, verifier=Builtin())
    draft, logits = Draft.from_lists([[1, 2], [3]]), torch.zeros(5, 64)
    assert all(hooks.verify(make_batch(2), draft, logits) is GOOD for _ in range(2))
    assert hooks.take_faults() == {reason: 1}
    assert bad.num_calls == 1


def test_off_the_cpu_a_verification_is_not_read(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    """The meta device has no values: any read would raise."""

    class OnDevice:
        @hookimpl
        def specplug_verify(self) -> Verification:
            return Verification(
                torch.zeros(1, 2, dtype=torch.int32, device="meta"), torch.zeros(1, dtype=torch.int32, device="meta")
            )

    make_hooks(OnDevice(), strict=True).verify(make_batch(1), Draft.from_lists([[1]]), torch.zeros(2, 64))


INVALID_ROW = verification([[1, 5, -1], [-1, -1, -1]], [1, 9], is_invalid=torch.tensor([False, True]))
TREE = verification([[1, 5, -1], [2, -1, -1]], [1, 0], accepted_draft_indices=torch.zeros(2, 2, dtype=torch.int64))


@pytest.mark.parametrize("answer", [GOOD, INVALID_ROW, TREE], ids=["chain", "invalid row", "tree"])
def test_good_verifications_pass(make_hooks: MakeHooks, make_batch: MakeBatch, answer: Verification) -> None:
    class Good:
        @hookimpl
        def specplug_verify(self) -> Verification:
            return answer

    hooks = make_hooks(Good(), strict=True)
    assert hooks.verify(make_batch(2), Draft.from_lists([[1, 2], [3]]), torch.zeros(5, 64)) is answer


@pytest.mark.parametrize("error", [ConfigError("cannot be"), ModelError("cannot be")])
def test_a_session_that_cannot_be_does_not_start(make_hooks: MakeHooks, error: Exception) -> None:
    """Raised on purpose before the first request: the user must hear it, not a log file."""

    class Maker:
        @hookimpl
        def specplug_draft_space(self) -> Any:
            raise error

    with pytest.raises(type(error), match="cannot be"):
        make_hooks(Proposer("start_session", error)).start_session(None)  # type: ignore[arg-type]
    with pytest.raises(type(error), match="cannot be"):
        make_hooks(Maker()).draft_space(None, None)
    hooks = make_hooks(Proposer("start_request", error))  # from here on a fault is the plugin's own
    hooks.start_request(None)  # type: ignore[arg-type]
    assert hooks.take_faults() == {"start_request_raised:a": 1}
