"""The table of what each door supports, and the pages of the doors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specplug.adapters.support import DOORS, methods, needs_of, support_table, supports
from specplug.config.known_methods import KNOWN_METHODS
from specplug.hooks import process_manager

PAGES = Path(__file__).resolve().parents[2] / "docs" / "doors"


def test_the_page_holds_the_generated_table() -> None:
    assert support_table() in (PAGES / "README.md").read_text()


def test_every_door_has_a_page_that_is_linked() -> None:
    linked = set(re.findall(r"\]\((\w+\.md)\)", (PAGES / "README.md").read_text()))
    assert linked == {path.name for path in PAGES.glob("*.md")} - {"README.md"}


def test_the_table_has_every_method_that_a_plugin_serves() -> None:
    folders = {path.name for path in (PAGES.parents[1] / "plugins").iterdir()} | {"specplug"}
    assert set(methods()) == {name for name, known in KNOWN_METHODS.items() if known.package in folders}


def test_the_untested_door_is_not_in_the_table() -> None:
    assert "SGLang" not in support_table()
    assert "contract-tested, not run in a server" in (PAGES / "sglang.md").read_text()


def test_token_doors_serve_what_needs_tokens_only() -> None:
    llama = next(door for door in DOORS if door.name == "llama-cpp-python")
    served = {method for method in methods() if supports(llama, method)}
    assert served == {"ngram", "suffix", "custom_class"}


@pytest.mark.parametrize("method", KNOWN_METHODS)
def test_needs_agree_with_what_the_plugin_says(method: str) -> None:
    manager = process_manager()
    if method not in manager.names():
        pytest.skip(f"{method} is not installed")
    capabilities = manager.spec(method).capabilities
    if capabilities.hidden_state_layers:
        assert "hidden_states" in needs_of(method)
    if capabilities.needs_draft_model and KNOWN_METHODS[method].model == "draft":
        assert "tokenizer" in needs_of(method)
