"""Text to train on that lies on any machine: this interpreter's standard library and its documentation.

The prompts have the styles of the benchmarks' and the demo's, and none of their content: the modules that the
benchmarks edit, and HumanEval, stay out. One prompt in sixteen is held out.
"""

from __future__ import annotations

import ast
import errno
import html.entities
import http
import os
import pydoc
import random
import signal
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

from prompts import EDITS

from specplug.demo.prompts import Prompt

__all__ = ["HELD_OUT_EVERY", "TrainingPrompt", "natural_texts", "training_prompts"]

HELD_OUT_EVERY = 16
MOST_FILE_BYTES = 60_000
_TEST_MODULES = frozenset(module.partition(".")[0] for module, _, _ in EDITS)
_LEFT_OUT = frozenset(("test", "tests", "idle_test", "site-packages", "lib2to3", "idlelib", "pydoc_data", "encodings"))

QUESTIONS = (
    "What is {} used for?", "Explain {} in simple words.", "How does {} work?", "What should a beginner know about {}?",
    "What are the advantages and the drawbacks of {}?", "Give me three tips about {}.", "Write a short text about {}.",
    "How can I learn more about {}?", "What is the history of {}?", "Why is {} important?",
    "Write a short story about {}.", "Which mistakes do people make with {}?",
)  # fmt: skip
SUBJECTS = (
    "bread baking", "a compass", "photosynthesis", "a bicycle", "the water cycle", "chess", "a vegetable garden",
    "recursion", "electricity", "the printing press", "a good night's sleep", "public libraries", "volcanoes",
    "a budget", "sailing", "the human heart", "tea", "clouds", "a hash table", "glass", "maps", "public speaking",
    "salt", "the steam engine", "a job interview", "earthquakes", "honey", "a telescope", "friendship", "steel",
    "writing letters", "the seasons", "unit tests", "a river", "painting a room", "penguins", "coffee", "gravity",
    "learning a language", "the internet", "cooking rice", "a thunderstorm", "meditation", "a sundial", "trains",
    "saving energy", "a database index", "music theory", "knots", "the Roman roads", "wool", "a first aid kit",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """``text``: rendered, chat template included. ``num_output_tokens``: how far the target is asked to continue."""

    text: str
    num_output_tokens: int
    is_held_out: bool


def natural_texts() -> Iterator[str]:
    """Sources of the standard library and the language reference, in a fixed shuffled order."""
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in _source_files()]
    texts += list(topics.topics.values())
    random.Random(1).shuffle(texts)
    yield from texts


def training_prompts(tokenizer: object, count: int) -> list[TrainingPrompt]:
    """``count`` different prompts, kinds in turn, so that any prefix of them is a fair sample.

    Held-out prompts use the code of modules that no other prompt uses.
    """
    modules = list(_modules())
    random.Random(2).shuffle(modules)
    num_held_out = -(-len(modules) // HELD_OUT_EVERY)
    streams = {
        True: _mixed(tokenizer, modules[:num_held_out], seed=3),
        False: _mixed(tokenizer, modules[num_held_out:], seed=4),
    }
    found: dict[str, TrainingPrompt] = {}
    while len(found) < count:
        is_held_out = len(found) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        text, num_output_tokens = next(streams[is_held_out])
        found.setdefault(text, TrainingPrompt(text, num_output_tokens, is_held_out))
    return list(found.values())


def _mixed(tokenizer: object, modules: Sequence[list[Piece]], seed: int) -> Iterator[tuple[str, int]]:
    """Rendered prompts and how far to continue them, kinds in turn."""
    makers = []
    for number, maker in enumerate(_MAKERS):
        chance = random.Random(100 * seed + number)
        makers.append(maker(chance.sample(modules, len(modules)), chance))
    while True:
        for made in makers:
            prompt, num_output_tokens = next(made)
            yield prompt.render(tokenizer), num_output_tokens


# --- what there is --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """A function or class with a docstring. ``head``: up to the end of the docstring."""

    module: str
    name: str
    source: str
    head: str
    doc: str
    names: tuple[str, ...]


def _source_files() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_left_out = parts[0] in _TEST_MODULES or set(parts) & _LEFT_OUT
        if not is_left_out and path.stat().st_size <= MOST_FILE_BYTES:
            yield path


def _modules() -> Iterator[list[Piece]]:
    """The pieces of each module that has some."""
    for path in _source_files():
        text = path.read_text(encoding="utf-8", errors="ignore")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        if pieces := list(_pieces(path.stem, text, tree)):
            yield pieces


def _pieces(module: str, text: str, tree: ast.Module) -> Iterator[Piece]:
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or not (doc := ast.get_docstring(node)):
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        head = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
        names = () if isinstance(node, ast.ClassDef) else tuple(argument.arg for argument in node.args.args)
        yield Piece(module, node.name, source, head, doc, tuple(name for name in names if name not in ("self", "cls")))


# --- prompts --------------------------------------------------------------------------------------------------

Made = Iterator[tuple[Prompt, int]]


def _endless(modules: Sequence[list[Piece]], fits: Callable[[Piece], bool], chance: random.Random) -> Iterator[Piece]:
    """One piece of each module in turn, for ever."""
    while True:
        for pieces in modules:
            if fitting := [piece for piece in pieces if fits(piece)]:
                yield chance.choice(fitting)


def _edits(modules: Sequence[list[Piece]], chance: random.Random) -> Made:
    """Repeat a file with a small change: as the demo asks it in a chat, and as text to continue."""
    for piece in _endless(modules, lambda piece: 200 <= len(piece.source) <= 800 and bool(piece.names), chance):
        name = chance.choice(piece.names)
        change = chance.choice((
            f"the parameter `{name}` renamed to `{name}_value`", f"every `{name}` renamed to `{name[0]}1`",
            f"the function `{piece.name}` renamed to `{piece.name}_new`", "a type hint added to every parameter",
            "the docstring removed",
        ))  # fmt: skip
        num_output_tokens = min(160, len(piece.source) // 4)
        if chance.random() < 0.5:
            text = f"Repeat this file with {change}, and everything else unchanged:\n```\n{piece.source.strip()}\n```"
            yield Prompt("edit", text, opening="```\n"), num_output_tokens
        else:
            text = (
                f"Here is the file {piece.module}.py:\n```python\n{piece.source}\n```\n\n"
                f"The whole file {piece.module}.py again, with {change}, everything else unchanged:\n```python\n"
            )
            yield Prompt("edit", text, is_chat=False), num_output_tokens


def _functions(modules: Sequence[list[Piece]], chance: random.Random) -> Made:
    """A function's head and docstring, to be completed."""
    imports = ("", "", "from typing import List\n\n\n", "import math\n\n\n", "from typing import List, Optional\n\n\n")
    for piece in _endless(modules, lambda piece: 120 <= len(piece.head) <= 700 and bool(piece.names), chance):
        if piece.head.startswith("def "):
            yield Prompt("function", f"{chance.choice(imports)}{piece.head}\n", is_chat=False), 96


def _chats(modules: Sequence[list[Piece]], chance: random.Random) -> Made:
    """Questions about everyday things, about words of the language reference, and about functions."""
    words = sorted(word.lower() for word in pydoc.Helper.topics if word.isalpha())
    pieces = _endless(modules, lambda piece: not piece.name.startswith("_"), chance)
    while True:
        subject = chance.choice((
            chance.choice(SUBJECTS), chance.choice(SUBJECTS), f"{chance.choice(words)} in Python",
            f"`{next(pieces).name}`",
        ))  # fmt: skip
        question = chance.choice(QUESTIONS).format(subject)
        if chance.random() < 0.5:
            yield Prompt("chat", question), 112
        else:
            yield Prompt("chat", f"Question: {question}\n\nAnswer:", is_chat=False), 112


def _summaries(_modules: Sequence[list[Piece]], chance: random.Random) -> Made:
    """Paragraphs of the language reference, to be summarised or copied from."""
    paragraphs = [
        " ".join(paragraph.split())
        for text in topics.topics.values()
        for paragraph in text.split("\n\n")
        if 250 <= len(paragraph) <= 700 and "   >>>" not in paragraph
    ]
    requests = (
        "Summarise this text in two sentences.", "What does this text say?", "List the main points of this text.",
        "Repeat the first two sentences of this text.",
    )  # fmt: skip
    while True:
        text = chance.choice(paragraphs)
        if chance.random() < 0.6:
            yield Prompt("summarise", f"{text}\n\n{chance.choice(requests)}"), 72
        else:
            yield Prompt("summarise", f"Report: {text}\n\nSummary of the report in two sentences:\n", is_chat=False), 72


def _extracts(modules: Sequence[list[Piece]], chance: random.Random) -> Made:
    """Facts to copy out of tables and sentences that the standard library knows."""
    tables = list(_tables())
    while True:
        title, keys, rows = chance.choice(tables)
        chosen = chance.sample(rows, min(len(rows), chance.randint(3, 6)))
        lines = "\n".join(",".join(row) for row in chosen)
        table = f"{','.join(keys)}\n{lines}"
        sentences = " ".join(f"{' and '.join(f'{k} {v}' for k, v in zip(keys, row, strict=True))}." for row in chosen)
        if chance.random() < 0.25:
            ask = "Write the facts of this text as a JSON list of objects with the keys"
            text = f"{title}: {sentences}\n\n{ask} {', '.join(keys)}."
            yield Prompt("extract", text, opening=f'```json\n[\n  {{"{keys[0]}":'), 104
        else:
            ask = chance.choice((
                "The same table as a JSON list, one object per line:\n[\n",
                "Each row on its own line, with a number:\n1.",
                f"The rows sorted by {chance.choice(keys)}, in the same CSV form:\n{','.join(keys)}\n",
            ))  # fmt: skip
            yield Prompt("extract", f"{title}:\n{table}\n\n{ask}", is_chat=False), 104


def _tables() -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    codes = [(str(status.value), status.name.lower(), status.phrase) for status in http.HTTPStatus]
    yield "Status codes", ("code", "name", "phrase"), codes
    errors = [(str(number), name, os.strerror(number)) for number, name in errno.errorcode.items()]
    yield "Error numbers", ("number", "name", "meaning"), errors
    signals = [(str(int(number)), number.name, signal.strsignal(number) or "") for number in signal.Signals]
    yield "Signals", ("number", "signal", "meaning"), signals
    entities = [(name, str(number)) for name, number in html.entities.name2codepoint.items()]
    yield "Entities", ("entity", "codepoint"), entities
    modules = [(name, str(len(name)), name[0]) for name in sorted(sys.stdlib_module_names) if name.isalpha()]
    yield "Modules", ("module", "length", "letter"), modules


_MAKERS: tuple[Callable[[Sequence[list[Piece]], random.Random], Made], ...] = (
    _functions, _edits, _chats, _functions, _extracts, _chats, _edits, _summaries,
)  # fmt: skip
