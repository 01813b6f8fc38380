"""Token-id workloads for suffix drafting, from texts that every machine with Python has.

A byte-level BPE is trained on the standard library and the system's documentation, so that ids look like a language
model's. Requests of a workload run in order. They depend on the Python version and on the documentation installed, so
compare drafters on one machine only. ``versions`` downloads two releases each of six small packages with pip.
"""

from __future__ import annotations

import ast
import json
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["WORKLOADS", "Workload", "load", "load_bulk"]

SEED = 1234
STDLIB = Path(sysconfig.get_paths()["stdlib"])
RELEASES = [
    ("requests", "2.28.2", "2.31.0"),
    ("click", "8.0.4", "8.1.7"),
    ("attrs", "22.2.0", "23.2.0"),
    ("werkzeug", "2.2.3", "2.3.8"),
    ("httpx", "0.24.1", "0.25.2"),
    ("jinja2", "3.0.3", "3.1.3"),
]
WORKLOADS = {
    "edit": "a file of the standard library, and the same with scripted edits",
    "versions": "a file of an old release of a package, and of a newer one",
    "agent": "a history, and a thought with a tool call whose arguments come from real files",
    "extract": "a source file, and a JSON list of its functions",
    "rollouts": "synthetic: sixteen samples of one answer with branches",
    "prose": "documentation, continued",
}

Text = tuple[str, str]


class Workload(NamedTuple):
    """A request: prompt and output token ids."""

    prompt: list[int]
    output: list[int]


def load(folder: Path, name: str) -> list[Workload]:
    """The requests of a workload in ``folder``, which is filled first if it is empty; ``[]`` if it could not be had."""
    _ensure(folder)
    path = folder / f"{name}.jsonl"
    if not path.exists():
        return []
    with path.open() as file:
        rows = [json.loads(line) for line in file]
    return [Workload(row["prompt"], row["response"]) for row in rows]


def load_bulk(folder: Path) -> np.ndarray[Any, np.dtype[np.int32]]:
    """6.5 million tokens of mixed text."""
    _ensure(folder)
    bulk: np.ndarray[Any, np.dtype[np.int32]] = np.load(folder / "bulk.npy")
    return bulk


def _ensure(folder: Path) -> None:
    if (folder / "bulk.npy").exists():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    print(f"making workloads in {folder}: a minute or two", file=sys.stderr)
    sources = [(str(path.relative_to(STDLIB)), _read(path)) for path in _stdlib_files(tests=False)]
    tests = [_read(path) for path in _stdlib_files(tests=True)]
    docs = _documentation()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text for _, text in sources] + docs, trainer)
    _write_workloads(folder, tokenizer, sources, docs or tests)
    mixed = tests + [text for _, text in sources] + docs
    random.Random(SEED).shuffle(mixed)
    ids: list[int] = []
    for encoded in tokenizer.encode_batch(mixed):
        ids.extend(encoded.ids)
        if len(ids) > 6_500_000:
            break
    np.save(folder / "bulk.npy", np.asarray(ids, dtype=np.int32))


def _write_workloads(folder: Path, tokenizer: Any, sources: list[Text], docs: list[str]) -> None:
    chance = random.Random(SEED)
    large = [text for _, text in sources if len(text) > 6000]
    files = [(name, text) for name, text in sources if 4000 < len(text) < 60_000]
    texts = {
        "edit": _edits(large, chance, 40),
        "agent": _agent(files, chance, 8, 12),
        "extract": _extraction(files, chance, 60),
        "prose": _prose(docs, chance, 40),
        "versions": _versions(chance, 40),
    }
    kept: list[Workload] = []
    for name, pairs in texts.items():
        requests = [
            Workload(tokenizer.encode(prompt).ids[-16000:], tokenizer.encode(output).ids[:4000])
            for prompt, output in pairs
        ]
        if name in ("extract", "prose"):
            kept += requests
        _write(folder / f"{name}.jsonl", requests)
    _write(folder / "rollouts.jsonl", list(_rollouts(kept, chance, 12, 16)))


def _write(path: Path, requests: list[Workload]) -> None:
    if requests:
        lines = (json.dumps({"prompt": prompt, "response": output}) for prompt, output in requests)
        path.write_text("".join(f"{line}\n" for line in lines))


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="ignore")
    except OSError:
        return ""


def _stdlib_files(*, tests: bool) -> list[Path]:
    found = []
    for path in sorted(STDLIB.rglob("*.py")):
        parts = path.relative_to(STDLIB).parts
        if "site-packages" in parts or "lib2to3" in parts:
            continue
        if tests == any(part in parts for part in ("test", "tests", "idle_test")):
            found.append(path)
    return found


def _documentation(limit: int = 6_000_000) -> list[str]:
    root = Path("/usr/share/doc")
    texts: list[str] = []
    total = 0
    for path in sorted(root.rglob("*")) if root.is_dir() else []:
        if path.is_file() and path.suffix in ("", ".txt", ".md", ".rst") and path.stat().st_size < 400_000:
            text = _read(path)
            if "\0" not in text:
                texts.append(text)
                total += len(text)
                if total > limit:
                    break
    return texts


# --- the texts ----------------------------------------------------------------------------------------------


def _edit(text: str, donor: str, chance: random.Random) -> str:
    """Rename one identifier; drop, insert or change a few lines."""
    names = re.findall(r"\b[a-z_][a-z0-9_]{4,}\b", text)
    if names:
        old = chance.choice(sorted(set(names)))
        text = re.sub(rf"\b{re.escape(old)}\b", old + chance.choice(["_new", "2", "_value", "_ex"]), text)
    lines = text.split("\n")
    other = [line for line in donor.split("\n") if line.strip()]
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(lines))
        drawn = chance.random()
        if drawn < 0.35 and len(lines) > 12:
            del lines[at : at + chance.randint(1, 3)]
        elif drawn < 0.75 and other:
            start = chance.randrange(len(other))
            lines[at:at] = other[start : start + chance.randint(1, 4)]
        else:
            lines[at] = re.sub(r"\d+", lambda found: str(int(found.group()) + 1), lines[at]) + "  # changed"
    return "\n".join(lines)


def _edits(texts: list[str], chance: random.Random, count: int) -> Iterator[Text]:
    for _ in range(count):
        lines = chance.choice(texts).split("\n")
        size = chance.randint(60, 220)
        start = chance.randrange(max(1, len(lines) - size))
        old = "\n".join(lines[start : start + size])
        new = _edit(old, chance.choice(texts), chance)
        yield (
            f"Apply the requested change and return the whole file.\n```python\n{old}\n```\n",
            f"```python\n{new}\n```\n",
        )


_THOUGHTS = (
    "I need to look at the file first to understand how {name} works.",
    "Let me open {file} and check the definition of {name}.",
    "The function {name} is where the problem is. I will change it so the new case is handled.",
    "Now I will replace the old code of {name} with a version that handles the edge case.",
    "The edit was applied. Let me run the tests to make sure that nothing else broke.",
    "The tests pass for {name}. I will look at the next place that uses it.",
)


def _agent(files: list[Text], chance: random.Random, num_sessions: int, num_turns: int) -> Iterator[Text]:
    for _ in range(num_sessions):
        file, text = chance.choice(files)
        lines = text.split("\n")
        history = (
            "You are a coding agent. Reply with a thought and one JSON tool call.\n"
            "Tools: view(path, start, end), str_replace(path, old_str, new_str), run(cmd).\n"
            f"Task: fix the reported problem in {file}.\n"
        )
        position = 0
        for turn in range(num_turns):
            call, seen = _tool_call(turn % 3, file, lines[position : position + 40], position, text, chance)
            name = (re.findall(r"def (\w+)", "\n".join(lines[position : position + 40])) or ["main"])[0]
            thought = chance.choice(_THOUGHTS).format(name=name, file=file)
            output = f"<think>\n{thought}\n</think>\n<tool_call>\n{json.dumps(call)}\n</tool_call>\n"
            yield history[-24000:], output
            history += f"assistant: {output}tool: {seen}\n"
            if turn % 3 == 2:
                position = (position + 40) % max(1, len(lines) - 40)


def _tool_call(
    kind: int, file: str, part: list[str], position: int, text: str, chance: random.Random
) -> tuple[dict[str, Any], str]:
    """A call (look, replace, run the tests in turn) and what the tool answers."""
    if kind == 0:
        arguments: dict[str, Any] = {"path": file, "start": position + 1, "end": position + 40}
        return {"name": "view", "arguments": arguments}, _numbered(part, position)
    if kind == 1:
        at = chance.randrange(max(1, len(part) - 14)) if part else 0
        old = "\n".join(part[at : at + chance.randint(4, 14)])
        new = _edit(old, text, chance)
        arguments = {"path": file, "old_str": old, "new_str": new}
        said = f"The file {file} has been edited. Here's the result of running `cat -n` on a snippet:\n"
        return {"name": "str_replace", "arguments": arguments}, said + _numbered(new.split("\n"), position + at)
    arguments = {"cmd": f"python -m pytest -x -q tests/test_{file.split('/')[-1]}"}
    return {"name": "run", "arguments": arguments}, f"{chance.randint(3, 40)} passed in {chance.random():.2f}s"


def _numbered(lines: list[str], position: int) -> str:
    return "\n".join(f"{position + 1 + number:6d}\t{line}" for number, line in enumerate(lines))


def _extraction(files: list[Text], chance: random.Random, count: int) -> Iterator[Text]:
    for file, text in chance.sample(files, len(files)):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        if len(functions) < 4:
            continue
        functions = sorted(functions, key=lambda node: node.lineno)[:14]
        first, last = functions[0].lineno - 1, functions[-1].end_lineno or functions[-1].lineno
        last = min(last, functions[0].lineno + 240)
        found = [_describe(node) for node in functions if node.lineno <= last]
        source = "\n".join(text.split("\n")[first:last])
        answer = json.dumps({"file": file, "functions": found}, indent=2)
        yield f"List the functions of {file} as JSON.\n```python\n{source}\n```\n", f"```json\n{answer}\n```\n"
        count -= 1
        if not count:
            return


def _describe(node: ast.FunctionDef) -> dict[str, Any]:
    return {
        "function": node.name,
        "line": node.lineno,
        "args": [argument.arg for argument in node.args.args],
        "returns_value": any(isinstance(each, ast.Return) and each.value for each in ast.walk(node)),
        "summary": (ast.get_docstring(node) or "").split("\n")[0],
    }


def _prose(texts: list[str], chance: random.Random, count: int) -> Iterator[Text]:
    pool = [text for text in texts if 3000 < len(text) < 200_000 and text.count("\n\n") > 8]
    for text in chance.sample(pool, min(count, len(pool))):
        start = chance.randrange(max(1, len(text) - 2500))
        yield text[start : start + 600], text[start + 600 : start + 2200]


def _versions(chance: random.Random, count: int) -> list[Text]:
    pairs: list[Text] = []
    for package, old, new in RELEASES:
        before, after = _release(package, old), _release(package, new)
        for name, text in sorted(after.items()):
            earlier = before.get(name)
            if earlier and earlier != text and 1500 < len(text) < 14000:
                prompt = f"Update {name} to the new release.\n```python\n{earlier}\n```\n"
                pairs.append((prompt, f"```python\n{text}\n```\n"))
    chance.shuffle(pairs)
    return pairs[:count]


def _release(package: str, version: str) -> dict[str, str]:
    """The modules of a release; none where it cannot be downloaded."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "-q", "download", "--no-deps", "--only-binary=:all:", "-d", folder]
        done = subprocess.run([*command, f"{package}=={version}"], capture_output=True, check=False)
        if done.returncode:
            return {}
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".py")]
            return {name: wheel.read(name).decode("utf-8", "ignore") for name in names}


def _rollouts(
    requests: list[Workload], chance: random.Random, num_prompts: int, num_samples: int
) -> Iterator[Workload]:
    """Samples of one answer that branch at about one position in eight: the token itself, another, or two inserted,
    with weights 70, 20 and 10."""
    for prompt, output in chance.sample(requests, min(num_prompts, len(requests))):
        base = output[:500]
        branches = {
            at: (chance.randrange(300, 30000), [chance.randrange(300, 30000) for _ in range(2)])
            for at in range(len(base))
            if chance.random() < 0.125
        }
        for _ in range(num_samples):
            sample: list[int] = []
            for at, token_id in enumerate(base):
                drawn = chance.random() if at in branches else 0.0
                if drawn < 0.7:
                    sample.append(token_id)
                elif drawn < 0.9:
                    sample.append(branches[at][0])
                else:
                    sample += [token_id, *branches[at][1]]
            yield Workload(prompt, sample)
