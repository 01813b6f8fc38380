"""What messages and pages tell people to install."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from specplug.errors import RequestError
from specplug.host import grammar

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("specplug", "docs", "plugins")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md")
]
BY_NAME = re.compile(r"pip install [^\n`#]*?(?<![\w./-])specplug")
"""specplug, an extra of it or a plugin of it, by its bare name."""


@pytest.mark.parametrize(
    ("advice", "is_wrong"),
    [
        ("pip install 'specplug[grammar]'", True),
        ("pip install specplug-mtp", True),
        ("pip install --upgrade specplug`", True),
        ("pip install . ./plugins/specplug-pard    # from a checkout", False),
        ("pip install '.[demo]' in a checkout of specplug", False),
        ("pip install xgrammar", False),
    ],
)
def test_the_pattern_tells_names_from_folders(advice: str, is_wrong: bool) -> None:
    assert bool(BY_NAME.search(advice.split(" in a ")[0])) == is_wrong


def test_nothing_of_ours_is_installed_by_its_name() -> None:
    """specplug and its plugins are on no registry: a package of such a name there would be a stranger's."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in [*FILES, ROOT / "README.md"]
        for line in path.read_text(encoding="utf-8").splitlines()
        if BY_NAME.search(line.split(" in a checkout")[0])
    ]
    assert not found


def test_structured_outputs_name_the_package_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"needs xgrammar: pip install xgrammar$"):
        grammar._xgrammar()
