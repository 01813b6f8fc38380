"""Instances of a session: names, order, ownership, and what the host asks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest

from specplug.errors import PluginError
from specplug.hooks import SessionHooks, hookimpl
from specplug.types import Batch, Draft, SessionSummary

MakeBatch = Callable[[int], Batch]
MakeHooks = Callable[..., SessionHooks]
SUMMARY = SessionSummary(num_steps=0, num_requests=0)


class Proposer:
    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        return Draft.from_lists([[1] * limit for limit in limits])


class Observer:
    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        return None


class Wrapper:
    """Notes when it is entered and left."""

    def __init__(self, log: list[str], label: str) -> None:
        self._log, self._label = log, label

    @hookimpl(wrapper=True)
    def specplug_propose(self) -> Generator[None, Any, Any]:
        self._log.append(f"{self._label} in")
        result = yield
        self._log.append(f"{self._label} out")
        return result


def test_wrappers_nest_in_configuration_order(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    log: list[str] = []
    hooks = make_hooks(Wrapper(log, "first"), Proposer(), Wrapper(log, "second"), strict=True)
    hooks.propose(make_batch(1), [1])
    assert log == ["first in", "second in", "second out", "first out"]


def test_add_first_puts_an_instance_in_front(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    log: list[str] = []
    hooks = make_hooks(Wrapper(log, "later"), Proposer(), strict=True)
    hooks.add_first("early", Wrapper(log, "early"))
    hooks.propose(make_batch(1), [1])
    assert log == ["early in", "later in", "later out", "early out"]
    assert hooks.names == ("early", "a", "b")
    with pytest.raises(PluginError, match="already has an instance of that name"):
        hooks.add_first("early", Observer())


def test_a_name_that_comes_twice_is_numbered() -> None:
    one, two = Observer(), Observer()
    hooks = SessionHooks([("cap", one), ("cap", two)], vocab_size=64)
    assert hooks.names == ("cap", "cap#2")
    assert (hooks.instance("cap"), hooks.instance("cap#2"), hooks.instance("other")) == (one, two, None)


def test_an_instance_is_never_shared(make_hooks: MakeHooks) -> None:
    shared = Observer()
    hooks = make_hooks(shared)
    with pytest.raises(PluginError, match="another live session"):
        make_hooks(Observer(), shared)
    hooks.finish_session(SUMMARY)
    again = make_hooks(shared)  # free once its session has ended
    assert again.instance("a") is shared


def test_an_instance_twice_in_one_session_is_refused() -> None:
    shared = Observer()
    with pytest.raises(PluginError, match="already belongs to this session"):
        SessionHooks([("one", shared), ("two", shared)], vocab_size=64)
    SessionHooks([("one", shared)], vocab_size=64)  # the refused session keeps nothing


def test_sharing_goes_by_identity_not_equality(make_hooks: MakeHooks) -> None:
    class Equal(Observer):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    make_hooks(Equal(), Equal(), strict=True)


def test_a_forgotten_session_frees_its_instances(make_hooks: MakeHooks) -> None:
    shared = Observer()
    hooks = make_hooks(shared)
    gone = weakref.ref(hooks)
    del hooks
    gc.collect()
    assert gone() is None
    make_hooks(shared)


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        (object(), "object object has no hooks; mark its methods with @hookimpl"),
        (Observer, "is a class"),
        (None, "is None"),
    ],
)
def test_what_is_not_an_instance_with_hooks_is_refused(make_hooks: MakeHooks, instance: object, expected: str) -> None:
    with pytest.raises(PluginError, match=expected):
        make_hooks(instance)


def test_the_hosts_verifier_is_checked_like_a_plugin(make_hooks: MakeHooks) -> None:
    class Misspelt:
        @hookimpl
        def specplug_verfy(self, batch: Batch) -> None:
            return None

    with pytest.raises(PluginError, match=r"the host's verifier: .*did you mean specplug_verify"):
        make_hooks(verifier=Misspelt())


def test_has_proposer(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    class Broken:
        @hookimpl
        def specplug_propose(self) -> None:
            raise ValueError("boom")

    assert not make_hooks(Wrapper([], "w"), Observer()).has_proposer
    hooks = make_hooks(Broken(), Proposer())
    assert hooks.has_proposer
    hooks.propose(make_batch(1), [1])
    assert hooks.has_proposer  # the other one is left
    alone = make_hooks(Broken())
    assert alone.has_proposer
    alone.propose(make_batch(1), [1])
    assert not alone.has_proposer


def test_without_plugins_nothing_happens(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    hooks, batch = make_hooks(), make_batch(2)
    assert hooks.plan(batch, [1, 2]) == [1, 2]
    assert hooks.propose(batch, [1, 2]) is None
    hooks.advance(batch)
    assert (hooks.take_faults(), hooks.names, hooks.has_proposer) == ({}, (), False)
