"""Finding, loading, refusing and reporting plugins."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specplug.errors import PluginConflictError, PluginError, PluginLoadError, PluginNotFoundError
from specplug.hooks import ProcessManager, hookimpl, process_manager
from specplug.methods import MethodSpec

Install = Callable[..., Path]
Source = Callable[..., str]


def make_plugin(*names: str, api: object = (1, 0)) -> Any:
    class Plugin:
        SPECPLUG_API = api
        num_calls = 0

        @hookimpl
        def specplug_register(self) -> Any:
            self.num_calls += 1
            return [MethodSpec(name=name, kind="policy", factory=lambda config, context: object()) for name in names]

    return Plugin()


def entry(name: str, value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name=name, value=value, group="specplug")


# --- discovery --------------------------------------------------------------------------------------------


def test_names_are_found_without_importing(install: Install, plugin_source: Source) -> None:
    install("fake-one", "1.2", {"one": "fake_one", "uno": "fake_one"}, {"fake_one": plugin_source("one", "uno")})
    manager = ProcessManager()
    assert {"one", "uno"} <= set(manager.names())
    assert {"one", "uno"} <= set(manager.methods)
    assert "one" in manager.methods
    assert manager.methods.get("none-such") is None
    assert "fake_one" not in sys.modules
    assert manager.methods["one"].name == "one"
    assert "fake_one" in sys.modules


def test_other_groups_are_not_ours(install: Install) -> None:
    install("fake-other", "1.0", {"other": "fake_other"}, group="something.else")
    assert "other" not in ProcessManager().names()


def test_only_what_is_asked_for_is_imported(install: Install, plugin_source: Source) -> None:
    modules = {"fake_one": plugin_source("one"), "fake_two": "raise RuntimeError('not asked for')"}
    install("fake-both", "1.0", {"one": "fake_one", "two": "fake_two"}, modules)
    assert ProcessManager().spec("one").kind == "proposer"
    assert "fake_two" not in sys.modules


def test_a_plugin_with_two_methods_is_registered_once(install: Install, plugin_source: Source) -> None:
    install("fake-one", "1.2", {"one": "fake_one", "uno": "fake_one"}, {"fake_one": plugin_source("one", "uno")})
    manager = ProcessManager()
    assert [manager.spec(name).name for name in ("one", "uno", "one")] == ["one", "uno", "one"]
    assert len(sys.modules["fake_one"].calls) == 1


def test_an_entry_point_may_name_an_object(install: Install, plugin_source: Source) -> None:
    source = plugin_source("one").replace("@hookimpl\ndef specplug_register():", "def register():") + (
        "class Plugin:\n    @hookimpl\n    def specplug_register(self):\n        return register()\nplugin = Plugin()\n"
    )
    install("fake-one", "1.2", {"one": "fake_one:plugin"}, {"fake_one": source})
    assert ProcessManager().spec("one").name == "one"


# --- B156 and copies --------------------------------------------------------------------------------------


def test_B156_two_distributions_with_one_name(install: Install, plugin_source: Source) -> None:
    install("fake-one", "1.2", {"both": "fake_one"}, {"fake_one": plugin_source("both")}, site="first")
    install(
        "fake-two", "3.4", {"both": "fake_two", "fine": "fake_two"}, {"fake_two": plugin_source("fine")}, site="second"
    )
    manager = ProcessManager()
    assert manager.spec("fine").name == "fine"  # a conflict costs only its own name
    with pytest.raises(PluginConflictError) as caught:
        manager.spec("both")
    assert isinstance(caught.value, ValueError)
    for part in ("fake-one 1.2", "fake-two 3.4", "fake_one", "fake_two", "pip uninstall"):
        assert part in str(caught.value)
    assert "fake_one" not in sys.modules
    report = next(each for each in manager.report() if each.name == "both")
    assert (report.status, report.distribution, report.version) == ("failed", "fake-two, fake-one", "3.4, 1.2")


def test_B156_two_versions_of_one_distribution_in_one_folder(install: Install) -> None:
    install("fake-one", "1.2", {"both": "fake_one"})
    install("fake-one", "1.3", {"both": "fake_one"})
    with pytest.raises(PluginConflictError) as caught:
        ProcessManager().spec("both")
    for part in ("fake-one 1.2", "fake-one 1.3", "stale", "--force-reinstall fake-one"):
        assert part in str(caught.value)


def test_the_same_metadata_seen_twice_counts_once(install: Install, plugin_source: Source) -> None:
    install("fake-one", "1.2", {"one": "fake_one"}, {"fake_one": plugin_source("one")}, site="first")
    install("Fake_One", "1.2", {"one": "fake_one"}, site="second")
    assert ProcessManager().spec("one").name == "one"


def test_an_older_copy_further_along_the_path_is_shadowed(install: Install, plugin_source: Source) -> None:
    later = install(
        "fake-one", "1.1", {"one": "fake_one"}, {"fake_one": "raise RuntimeError('shadowed')"}, site="later"
    )
    install("fake-one", "1.2", {"one": "fake_one"}, {"fake_one": plugin_source("one")}, site="earlier")
    report = next(each for each in ProcessManager().report() if each.name == "one")
    assert (report.status, report.version) == ("available", "1.2")
    assert report.reason == f"shadows fake-one 1.1 in {later}"


def test_entry_points_without_a_distribution() -> None:
    manager = ProcessManager(entry_points=[entry("one", "fake_a"), entry("one", "fake_a"), entry("two", "fake_a")])
    assert manager.names() == ("one", "two")
    with pytest.raises(PluginLoadError, match="unknown distribution"):
        manager.spec("one")


def test_a_distribution_without_metadata_still_counts(install: Install, plugin_source: Source) -> None:
    folder = install("fake-one", "1.2", {"one": "fake_one"}, {"fake_one": plugin_source("one")})
    (folder / "fake_one-1.2.dist-info" / "METADATA").unlink()
    assert ProcessManager().spec("one").name == "one"


def test_a_strangers_broken_entry_points_are_skipped(
    install: Install, plugin_source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    folder = install("fake-one", "1.2", {"one": "fake_one"}, {"fake_one": plugin_source("one")})
    install("fake-broken", "0.9", {})
    (folder / "fake_broken-0.9.dist-info" / "entry_points.txt").write_text("[console_scripts]\nno equals sign\n")
    assert ProcessManager().spec("one").name == "one"
    assert str(folder) in caplog.records[0].getMessage()


# --- B154 -------------------------------------------------------------------------------------------------


def _names_in_child(queue: Any) -> None:
    manager = process_manager()
    first = manager.names()
    manager.spec("one")
    manager.spec("one")
    queue.put((first, manager.names(), len(sys.modules["fake_one"].calls)))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # other tests have started threads
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_B154_children_find_the_same_plugins(install: Install, plugin_source: Source, how: str) -> None:
    folder = install("fake-one", "1.2", {"one": "fake_one"}, {"fake_one": plugin_source("one")})
    expected = ProcessManager().names()
    if how == "spawn":
        script = (
            "import sys\nfrom specplug.hooks import process_manager as m\nassert m() is m()\n"
            "first = m().names(); m().spec('one'); m().spec('one')\n"
            "print(list(first) == list(m().names()), len(sys.modules['fake_one'].calls), *first)"
        )
        path = os.pathsep.join([str(folder), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == ["True", "1", *expected]
        return
    process_manager.cache_clear()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_names_in_child, args=(queue,))
    child.start()
    found = queue.get(timeout=60)
    child.join()
    process_manager.cache_clear()
    assert found == (expected, expected, 1)


def test_B154_registering_twice_counts_once() -> None:
    manager = ProcessManager(entry_points=[])
    plugin = make_plugin("one", "two")
    assert manager.register(plugin) == ("one", "two")
    assert manager.register(plugin) == ("one", "two")
    assert manager.names() == ("one", "two")
    assert plugin.num_calls == 1


# --- B155 -------------------------------------------------------------------------------------------------


def test_B155_unknown_name_lists_close_ones(install: Install, plugin_source: Source) -> None:
    install("fake-one", "1.2", {"ngrams": "fake_one"}, {"fake_one": plugin_source("ngrams")})
    with pytest.raises(PluginNotFoundError) as caught:
        ProcessManager().spec("ngarms")
    text = str(caught.value)
    assert isinstance(caught.value, LookupError)
    assert 'no plugin "ngarms"' in text
    assert "Installed: " in text
    assert "Did you mean ngrams" in text


@pytest.mark.parametrize(
    "source", ["import no_such_module_anywhere", "raise ValueError('boom')", "import sys; sys.exit(3)"]
)
def test_B155_broken_import_names_distribution_and_cause(install: Install, source: str) -> None:
    install("fake-broken", "0.9", {"broken": "fake_broken"}, {"fake_broken": source})
    with pytest.raises(PluginLoadError) as caught:
        ProcessManager().spec("broken")
    assert isinstance(caught.value, ImportError)
    assert 'plugin "broken" (fake-broken 0.9) failed to import (fake_broken)' in str(caught.value)
    assert caught.value.__cause__ is not None
    assert str(caught.value.__cause__) in str(caught.value)


def test_B155_a_missing_attribute_is_a_load_error(install: Install) -> None:
    install("fake-broken", "0.9", {"broken": "fake_broken:plugin"}, {"fake_broken": ""})
    with pytest.raises(PluginLoadError, match="plugin"):
        ProcessManager().spec("broken")


def test_an_interrupt_during_import_passes(install: Install) -> None:
    install("fake-slow", "0.9", {"slow": "fake_slow"}, {"fake_slow": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        ProcessManager().spec("slow")


# --- what a plugin must be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "expected"),
    [
        ("", "does not state the hook contract"),
        ("SPECPLUG_API = (2, 0)", "needs hook contract 2.0, this specplug has 1.0; upgrade specplug"),
        ("SPECPLUG_API = (1, 1)", "needs hook contract 1.1, this specplug has 1.0; upgrade specplug"),
        ("SPECPLUG_API = (0, 9)", "was written for hook contract 0.9, this specplug has 1.0; upgrade the plugin"),
        ("SPECPLUG_API = '1.0'", "SPECPLUG_API is '1.0'"),
        ("SPECPLUG_API = (1, 0, 0)", "write (major, minor)"),
    ],
)
def test_contract_versions(install: Install, plugin_source: Source, api: str, expected: str) -> None:
    install("fake-one", "1.2", {"one": "fake_one"}, {"fake_one": plugin_source("one", api=api)})
    with pytest.raises(PluginLoadError) as caught:
        ProcessManager().spec("one")
    assert expected in str(caught.value)
    assert 'plugin "one" (fake-one 1.2)' in str(caught.value)


def test_the_entry_name_must_be_among_the_methods(install: Install, plugin_source: Source) -> None:
    install("fake-one", "1.2", {"one": "fake_one"}, {"fake_one": plugin_source("other")})
    with pytest.raises(PluginLoadError, match=r'describes other, but not "one"'):
        ProcessManager().spec("one")


REGISTER = "from specplug.hooks import hookimpl\nfrom specplug.methods import MethodSpec\nSPECPLUG_API = (1, 0)\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1", "has no specplug_register"),
        ("def specplug_register(): return []", "specplug_register is not marked"),
        ("@hookimpl\ndef specplug_register(): return None", "specplug_register returned None"),
        ("@hookimpl\ndef specplug_register(): return {}", "specplug_register returned dict"),
        ("@hookimpl\ndef specplug_register(): return [3]", "returned int among its methods"),
        ("@hookimpl\ndef specplug_register(): raise ValueError('boom')", "specplug_register raised ValueError: boom"),
        ("@hookimpl\ndef specplug_registr(): return []", "did you mean specplug_register?"),
        ("@hookimpl\ndef specplug_register(): return [MethodSpec('one', 'proposer', 3)]", "factory"),
        ("@hookimpl\ndef specplug_register(): return [MethodSpec('one', 'drafter', print)]", "has kind 'drafter'"),
        ("@hookimpl\ndef specplug_register(): return [MethodSpec('one', 'policy', print, options=int)]", "pydantic"),
        ("@hookimpl\ndef specplug_register(): return [MethodSpec('one', 'policy', print)] * 2", "twice"),
        (
            "@hookimpl\ndef specplug_register(): return []\n@hookimpl\ndef specplug_propose(batch): return None",
            "implements specplug_propose beside specplug_register, where they are never called",
        ),
    ],
)
def test_what_a_plugin_module_must_not_be(install: Install, source: str, expected: str) -> None:
    install("fake-one", "1.2", {"one": "fake_one"}, {"fake_one": REGISTER + source})
    with pytest.raises(PluginLoadError) as caught:
        ProcessManager().spec("one")
    assert expected in str(caught.value)
    assert "fake-one 1.2" in str(caught.value)


# --- direct registration ----------------------------------------------------------------------------------


def test_direct_registration_of_one_method() -> None:
    manager = ProcessManager(entry_points=[])
    assert manager.register(make_plugin("one", "two"), name="two", distribution="notebook", version="1") == ("two",)
    assert manager.names() == ("two",)
    assert manager.describe("two") == "notebook 1"
    with pytest.raises(PluginLoadError, match=r'not "three"'):
        manager.register(make_plugin("one"), name="three")


def test_direct_registration_refuses_a_taken_name() -> None:
    manager = ProcessManager(entry_points=[entry("one", "fake_a")])
    with pytest.raises(PluginConflictError, match="unknown distribution"):
        manager.register(make_plugin("zero", "one"))
    assert manager.names() == ("one",)  # nothing of the refused plugin stays
    manager.register(make_plugin("two"))
    with pytest.raises(PluginConflictError, match="an object registered before"):
        manager.register(make_plugin("two"))


def test_direct_registration_checks_a_stated_version() -> None:
    with pytest.raises(PluginLoadError, match="upgrade specplug"):
        ProcessManager(entry_points=[]).register(make_plugin("one", api=(9, 0)))
    assert ProcessManager(entry_points=[]).register(make_plugin("one", api=None)) == ("one",)


# --- allow and block --------------------------------------------------------------------------------------


def test_allow_and_block_lists() -> None:
    entries = [entry(name, "fake_a") for name in ("one", "two", "three")]
    manager = ProcessManager(allow=["one", "two", "gone"], block=["two"], entry_points=entries)
    assert manager.names() == ("one",)
    assert "two" not in manager.methods
    with pytest.raises(PluginNotFoundError, match="SPECPLUG_DISABLE"):
        manager.spec("two")
    with pytest.raises(PluginNotFoundError, match="SPECPLUG_PLUGINS"):
        manager.spec("three")
    statuses = {each.name: each.status for each in manager.report()}
    assert statuses == {"one": "failed", "two": "blocked", "three": "blocked", "gone": "failed"}
    assert "not installed" in manager.report()[-1].reason


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    process_manager.cache_clear()
    try:
        monkeypatch.setenv("SPECPLUG_PLUGINS", "ngram, nothing")
        monkeypatch.setenv("SPECPLUG_DISABLE", "ngram")
        monkeypatch.setenv("SPECPLUG_TRACE", "1")
        manager = process_manager()
        assert manager.names() == ()
        assert manager.trace
        monkeypatch.setenv("SPECPLUG_DISABLE", "")
        assert process_manager() is manager
        process_manager.cache_clear()
        monkeypatch.setenv("SPECPLUG_TRACE", "0")
        assert not process_manager().trace
    finally:
        process_manager.cache_clear()


# --- report -----------------------------------------------------------------------------------------------


def test_the_report_describes_everything_and_isolates_failures(install: Install) -> None:
    good = REGISTER + (
        "from pydantic import BaseModel, Field\n"
        "class Options(BaseModel):\n    good_depth: int = Field(3, description='how deep')\n    good_path: str\n"
        "class Made:\n    @hookimpl\n    def specplug_propose(self, batch): return None\n"
        "def make(config, context) -> Made: return Made()\n"
        "@hookimpl\ndef specplug_register():\n"
        "    return [MethodSpec('good', 'proposer', make, options=Options, summary='does good')]\n"
    )
    modules = {"fake_good": good, "fake_bad": "raise ValueError('boom')"}
    install("fake-mixed", "2.0", {"bad": "fake_bad", "good": "fake_good"}, modules)
    manager = ProcessManager(allow=["bad", "good"])
    reports = {each.name: each for each in manager.report()}
    assert reports["bad"].status == "failed"
    assert "boom" in reports["bad"].reason
    one = reports["good"]
    assert (one.kind, one.distribution, one.version, one.status) == ("proposer", "fake-mixed", "2.0", "available")
    assert (one.hooks, one.summary) == (("specplug_propose",), "does good")
    depth, path = one.options
    assert (depth.name, depth.type, depth.default, depth.is_required, depth.description) == (
        "good_depth",
        "int",
        3,
        False,
        "how deep",
    )
    assert path.is_required
    manager.spec("good")
    assert next(each for each in manager.report() if each.name == "good").status == "loaded"
    json.dumps([dataclasses.asdict(each) for each in manager.report()])


def test_hooks_of_a_class_as_factory_and_of_an_unknown_one() -> None:
    class Made:
        @hookimpl
        def specplug_advance(self, batch: Any) -> None:
            return None

    class Plugin:
        @hookimpl
        def specplug_register(self) -> Any:
            return [
                MethodSpec("known", "observer", Made),
                MethodSpec("unknown", "observer", lambda config, context: Made()),
            ]

    manager = ProcessManager(entry_points=[])
    manager.register(Plugin())
    assert {each.name: each.hooks for each in manager.report()} == {"known": ("specplug_advance",), "unknown": ()}


def test_errors_share_one_base() -> None:
    with pytest.raises(PluginError):
        ProcessManager(entry_points=[]).spec("x")


def test_importing_the_hooks_does_not_import_torch() -> None:
    script = "import sys, specplug.hooks; specplug.hooks.ProcessManager().names(); assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
