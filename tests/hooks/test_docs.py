"""The hook reference holds every hook, with its exact signature and all slots."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path
from typing import cast

import pytest

from specplug.hooks import ProcessManager, SessionHooks, specs
from specplug.hooks.contract import HOOK_ARGUMENTS
from specplug.methods import NoOptions, PluginConfig, PluginContext

REFERENCE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### `(specplug_\w+)(.*)`$", REFERENCE, re.MULTILINE)
SLOTS = ["When", "How often", "Mode", "Arguments", "Return", "None"]


@pytest.mark.parametrize("hook", HOOK_ARGUMENTS)
def test_every_hooks_exact_signature_is_a_heading(hook: str) -> None:
    signature = str(inspect.signature(getattr(specs, hook))).replace("'", "")
    assert (hook, signature) in HEADINGS


def test_nothing_else_is_a_heading() -> None:
    assert sorted(name for name, _ in HEADINGS) == sorted(HOOK_ARGUMENTS)


@pytest.mark.parametrize("hook", HOOK_ARGUMENTS)
def test_every_section_has_the_slots_in_order(hook: str) -> None:
    section = REFERENCE.split(f"### `{hook}(")[1].split("\n### ")[0].split("\n## ")[0]
    assert re.findall(r"^- \*\*([\w ]+):\*\*", section, re.MULTILINE) == SLOTS


@pytest.mark.parametrize("hook", HOOK_ARGUMENTS)
def test_the_mode_is_the_specs(hook: str) -> None:
    section = REFERENCE.split(f"### `{hook}(")[1]
    mode = re.search(r"\*\*Mode:\*\* ([\w ]+)", section)
    assert mode is not None
    is_first_result = getattr(specs, hook).specplug_spec["firstresult"]
    assert mode.group(1).startswith("first result" if is_first_result else "all")


def test_the_first_example_works() -> None:
    source = re.findall(r"```python\n(.*?)```", REFERENCE, re.DOTALL)[0]
    module = types.ModuleType("hello_of_the_docs")
    exec(compile(source, "docs/hooks.md", "exec"), vars(module))
    manager = ProcessManager(entry_points=[])
    assert manager.register(module) == ("hello",)
    context = cast(PluginContext, None)
    instance = manager.spec("hello").factory(PluginConfig("hello", 3, NoOptions()), context)
    assert SessionHooks([("hello", instance)], vocab_size=64).has_proposer


@pytest.mark.parametrize("hook", HOOK_ARGUMENTS)
def test_every_docstring_has_its_slots(hook: str) -> None:
    text = inspect.getdoc(getattr(specs, hook)) or ""
    needed = ["When:", "How often:", "Return:", *(["Arguments:"] if HOOK_ARGUMENTS[hook] else [])]
    assert [slot for slot in needed if slot not in text] == []
