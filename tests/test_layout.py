"""The shape of the repository: who may import whom, what is public, what importing costs, what is documented."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "specplug"
MODULES = sorted(PACKAGE.rglob("*.py"))
IDS = [str(path.relative_to(ROOT)) for path in MODULES]

BASE = {"errors", "trees", "types", "methods", "sampling_params", "draft_space"}
CONFIG = BASE | {"config"}
HOOKS = CONFIG | {"hooks"}
MODELS = CONFIG | {"models"}
DRAFTING = HOOKS | {"models", "verify", "proposers"}
HOST = DRAFTING | {"tli", "verify", "metrics", "host"}
ALLOWED = {
    **dict.fromkeys(BASE, BASE),
    "config": CONFIG,
    "hooks": HOOKS,
    "models": MODELS,
    "proposers": DRAFTING,
    "tli": HOOKS | {"tli"},
    "verify": HOOKS | {"verify"},
    "metrics": BASE | {"hooks", "metrics"},
    "host": HOST,
    "demo": HOST | {"demo", "LLM"},
    "adapters": HOST | {"adapters", "LLM"},
    "cli": HOST | {"cli", "demo", "adapters", "LLM", "__version__"},
    "testing": HOST | {"testing", "LLM"},
    "__init__": HOST - {"config", "metrics", "proposers", "tli", "verify"},
}
"""Part -> parts it may import, annotations and ``TYPE_CHECKING`` blocks included."""

TORCH_FREE = [
    "specplug",
    "specplug.cli",
    "specplug.config",
    "specplug.draft_space",
    "specplug.errors",
    "specplug.hooks",
    "specplug.methods",
    "specplug.metrics",
    "specplug.metrics.acceptance",
    "specplug.proposers",
    "specplug.proposers.custom_class",
    "specplug.proposers.heads",
    "specplug.proposers.heads.files",
    "specplug.proposers.draft_model",
    "specplug.proposers.ngram",
    "specplug.sampling_params",
    "specplug.testing",
    "specplug.testing.pytest_plugin",
    "specplug.tli",
    "specplug.tli.plugin",
    "specplug.trees",
    "specplug.types",
]
SCRIPTS = ["scripts/bench", "scripts/check", "scripts/demo", "scripts/test", "scripts/test-vllm", ".ci/run"]


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(source: str) -> Iterator[str]:
    """Absolute names of what is imported anywhere in a module; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def misplaced_imports(part: str, source: str) -> list[str]:
    own = [name for name in imports_of(source) if name.startswith("specplug.")]
    return [name for name in own if name.split(".")[1] not in ALLOWED[part]]


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_imports_go_one_way(path: Path) -> None:
    assert part_of(path) in ALLOWED, "a new part: say in ALLOWED what it may import"
    source = path.read_text()
    assert not misplaced_imports(part_of(path), source)
    assert not [name for name in imports_of(source) if name.startswith(".")], "imports are absolute"


def test_the_import_check_sees_every_form_of_import() -> None:
    source = """
if TYPE_CHECKING:
    from specplug.host import LLM
def late():
    import specplug.cli
from specplug import host
from specplug.errors import ConfigError
"""
    assert sorted(misplaced_imports("config", source)) == ["specplug.cli", "specplug.host", "specplug.host.LLM"]


PLUGIN_SOURCES = [
    path for folder in ("plugins", "docs/examples") for path in (ROOT / folder).glob("*/specplug_*/**/*.py")
]
PLUGIN_MAY_IMPORT = (
    "specplug.adapters",
    "specplug.draft_space",
    "specplug.errors",
    "specplug.models",
    "specplug.proposers",
    "specplug.testing",
    "specplug.tli",
    "specplug.verify.BuiltinVerifier",
)


@pytest.mark.parametrize("path", PLUGIN_SOURCES, ids=lambda path: path.parent.name)
def test_plugins_import_public_names_only(path: Path) -> None:
    import specplug

    for name in imports_of(path.read_text()):
        if name.startswith("specplug."):
            assert name.startswith(PLUGIN_MAY_IMPORT) or name.removeprefix("specplug.") in specplug.__all__, name


@pytest.fixture(scope="module")
def loaded_by() -> dict[str, list[str]]:
    """Module -> the heavy packages that importing it, in a fresh process, loads."""
    code = """
import importlib, json, sys
name = sys.argv[1]
importlib.import_module(name)
print(json.dumps([heavy for heavy in ("torch", "transformers", "triton") if heavy in sys.modules]))
"""
    running = {
        name: subprocess.Popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE, cwd=ROOT)
        for name in TORCH_FREE
    }
    return {name: json.loads(process.communicate()[0] or '["failed"]') for name, process in running.items()}


@pytest.mark.parametrize("name", TORCH_FREE)
def test_importing_loads_no_torch(name: str, loaded_by: dict[str, list[str]]) -> None:
    assert loaded_by[name] == []


PUBLIC = [path for path in MODULES if "__all__" in path.read_text()]


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: module_name(path))
def test_public_names_are_sorted_and_exist(path: Path) -> None:
    if "triton" in path.read_text() and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    module = importlib.import_module(module_name(path))
    assert list(module.__all__) == sorted(set(module.__all__), key=sort_key)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def sort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions: ruff's isort-style order of ``__all__``."""
    is_constant = name.isupper() and len(name) > 1
    return (0 if is_constant else 1 if name[:1].isupper() else 2, name)


def test_the_package_exposes_exactly_its_public_names() -> None:
    import specplug

    submodules = {path.stem for path in PACKAGE.iterdir()}
    exposed = {name for name in vars(specplug) if name.isidentifier() and name[0] != "_"} - submodules
    # what a module needs at its own import, not what it offers
    own = {"annotations", "version", "PackageNotFoundError", "TYPE_CHECKING", "Any"}
    assert exposed - own - set(specplug.__all__) == set()


def test_every_module_and_public_function_says_what_it_is() -> None:
    missing = []
    for path in MODULES:
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            missing.append(module_name(path))
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("specplug_"):
                continue  # hooks are documented by their specifications
            if node.name in public_names(tree) and not ast.get_docstring(node):
                missing.append(f"{module_name(path)}.{node.name}")
    assert missing == []


def public_names(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def test_environment_variables_are_read_in_one_place_only() -> None:
    readers = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if part_of(path) not in {"cli", "adapters", "testing", "demo"}
        and re.search(r"os\.environ|getenv", path.read_text())
    }
    assert readers <= {"hooks/manager.py"}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "plugins").glob("*/README.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link and not (page.parent / link).exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_run_as_they_are(name: str) -> None:
    path = ROOT / name
    assert path.stat().st_mode & stat.S_IXUSR
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", path], check=True)


def test_nothing_names_this_machine() -> None:
    """Tracked text holds no path of a build machine and no package registry."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    words = re.compile(
        "|".join(["/wo" + "rk/", "/ro" + "ot/", "py" + r"pi\.org", "python" + r"hosted", "/opt/wh" + "eels"])
    )
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".png", ".npz", ".safetensors"} or not path.is_file() or os.path.islink(path):
            continue
        if words.search(path.read_text(errors="replace")):
            found.append(name)
    assert found == []
