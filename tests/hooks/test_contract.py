"""What pluggy accepts without a word and the contract does not."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pluggy
import pytest

from specplug.errors import PluginError
from specplug.hooks import hookimpl
from specplug.hooks.contract import HOOK_ARGUMENTS, find_implementations, new_plugin_manager, register_checked


def refusal(plugin: object) -> str:
    with pytest.raises(PluginError) as caught:
        find_implementations(plugin, 'plugin "x"')
    return str(caught.value)


def test_a_good_object_gives_its_implementations() -> None:
    class Good:
        specplug_note = "data may carry the prefix"

        @hookimpl
        def specplug_advance(self, batch: Any) -> None:
            return None

        @hookimpl(wrapper=True)
        def specplug_propose(self) -> Any:
            return (yield)

    found = find_implementations(Good(), "x")
    assert [(each.hook, each.is_wrapper) for each in found] == [("specplug_advance", False), ("specplug_propose", True)]


def test_an_unmarked_override_is_refused() -> None:
    class Base:
        @hookimpl
        def specplug_propose(self, batch: Any) -> None:
            return None

    class Override(Base):
        def specplug_propose(self, batch: Any) -> None:
            return None

    assert new_plugin_manager().register(Override()) is not None  # pluggy drops it without a word
    text = refusal(Override())
    assert text.startswith('plugin "x"')
    assert "specplug_propose is not marked" in text
    assert "@hookimpl" in text


@pytest.mark.parametrize(
    "value",
    [
        property(lambda self: None),
        functools.partial(print, 1),
        staticmethod(lambda batch: None),
        3,
    ],
    ids=["property", "partial", "staticmethod", "data"],
)
def test_a_hook_name_on_anything_unmarked_is_refused(value: object) -> None:
    plugin = type("Odd", (), {"specplug_propose": value})()
    assert "specplug_propose is not marked" in refusal(plugin)


def test_a_property_is_refused_without_being_read() -> None:
    class Odd:
        @property
        def specplug_propose(self) -> None:
            raise AssertionError("read")

    assert "not marked" in refusal(Odd())


def test_the_prefix_is_reserved_but_imports_may_carry_it() -> None:
    module = types.ModuleType("fake_plugin")
    module.specplug_other = types.ModuleType("specplug_other")  # type: ignore[attr-defined]
    assert find_implementations(module, "x") == ()
    module.specplug_helper = lambda: None  # type: ignore[attr-defined]
    assert "reserved" in refusal(module)


def test_a_misspelt_hook_names_the_closest() -> None:
    class Misspelt:
        @hookimpl
        def specplug_propse(self, batch: Any) -> None:
            return None

    assert "specplug_propse is not a hook; did you mean specplug_propose?" in refusal(Misspelt())


def test_a_misspelt_specname_is_found_too() -> None:
    class Misspelt:
        @hookimpl(specname="specplug_advanced")
        def follow(self, batch: Any) -> None:
            return None

    assert "did you mean specplug_advance?" in refusal(Misspelt())


def test_an_optional_hook_of_a_newer_contract_is_ignored() -> None:
    class Newer:
        @hookimpl(optionalhook=True)
        def specplug_from_the_future(self, anything: Any) -> None:
            return None

    assert find_implementations(Newer(), "x") == ()


def test_a_class_is_refused() -> None:
    class Plugin:
        @hookimpl
        def specplug_advance(self, batch: Any) -> None:
            return None

    assert "is a class; give an instance: Plugin(...)" in refusal(Plugin)


def test_none_is_refused() -> None:
    assert "None" in refusal(None)


def _default(self: Any, batch: Any, limits: Any = None) -> None: ...
def _star(self: Any, *batch: Any) -> None: ...
def _keywords(self: Any, **arguments: Any) -> None: ...
def _keyword_only(self: Any, *, batch: Any) -> None: ...
def _unknown(self: Any, batch: Any, limit: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_default, "\"limits: 'Any' = None\" has a default"),
        (_star, "\"*batch: 'Any'\" never receives anything"),
        (_keywords, "\"**arguments: 'Any'\" never receives anything"),
        (_keyword_only, "never receives anything"),
        (_unknown, 'unknown argument "limit"'),
    ],
)
def test_parameters_that_pluggy_would_not_fill_are_refused(function: Callable[..., None], expected: str) -> None:
    plugin = type("Odd", (), {"specplug_propose": hookimpl(function)})()
    text = refusal(plugin)
    assert expected in text
    assert "allowed: batch, limits" in text


def test_wrappers_yield_and_others_do_not() -> None:
    class Odd:
        @hookimpl(wrapper=True)
        def specplug_propose(self) -> None:
            return None

        @hookimpl
        def specplug_plan(self) -> Any:
            yield

        @hookimpl
        async def specplug_advance(self) -> None:
            return None

        @hookimpl(hookwrapper=True)
        def specplug_verify(self) -> Any:
            yield

    text = refusal(Odd())
    assert "specplug_propose is marked wrapper=True but does not yield" in text
    assert "specplug_plan yields but is not marked wrapper=True" in text
    assert "specplug_advance is async" in text
    assert "specplug_verify: hookwrapper=True is the old kind" in text


def test_proposing_and_wrapping_takes_two_objects() -> None:
    class Both:
        @hookimpl
        def specplug_propose(self) -> None:
            return None

        @hookimpl(wrapper=True, specname="specplug_propose")
        def trim(self) -> Any:
            return (yield)

    assert "both implements and wraps specplug_propose" in refusal(Both())


def test_one_hook_twice_is_refused() -> None:
    class Twice:
        @hookimpl
        def specplug_plan(self) -> None:
            return None

        @hookimpl(specname="specplug_plan")
        def also(self) -> None:
            return None

    assert "specplug_plan is implemented 2 times" in refusal(Twice())


def test_what_pluggy_refuses_is_a_plugin_error() -> None:
    class Plugin:
        @hookimpl
        def specplug_advance(self, batch: Any) -> None:
            return None

    manager = new_plugin_manager()
    register_checked(manager, Plugin(), "one")
    with pytest.raises(PluginError, match="one") as caught:
        register_checked(manager, Plugin(), "one")
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_pending_check_backs_up_our_own() -> None:
    class Misspelt:
        @hookimpl
        def specplug_propse(self, batch: Any) -> None:
            return None

    with pytest.raises(PluginError) as caught:
        register_checked(new_plugin_manager(), Misspelt(), "x")
    assert isinstance(caught.value.__cause__, pluggy.PluginValidationError)


def test_every_hook_of_the_contract_is_known() -> None:
    assert list(HOOK_ARGUMENTS) == [
        "specplug_register",
        "specplug_start_session",
        "specplug_finish_session",
        "specplug_draft_space",
        "specplug_start_request",
        "specplug_finish_request",
        "specplug_plan",
        "specplug_propose",
        "specplug_verify",
        "specplug_advance",
        "specplug_accept_metrics",
    ]
    assert HOOK_ARGUMENTS["specplug_verify"] == ("batch", "draft", "target_logits")
    assert sys.modules["specplug.hooks.specs"].specplug_plan.__doc__
