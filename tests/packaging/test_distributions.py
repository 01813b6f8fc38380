"""What the built wheels and sdists hold and declare."""

from __future__ import annotations

import configparser
import platform
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

Built = dict[str, tuple[Path, Path]]


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def read(wheel: Path, ending: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(f".dist-info/{ending}"))
        return archive.read(name).decode()


def entry_points(wheel: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser()
    parser.read_string(read(wheel, "entry_points.txt"))
    return {section: dict(parser[section]) for section in parser.sections()}


def test_the_core_wheel_holds_the_core_and_nothing_else(built: Built, distributions: dict[str, Path]) -> None:
    wheel, _ = built["specplug"]
    names = names_in(wheel)
    assert {name.split("/")[0] for name in names} == {"specplug", "specplug-0.1.0.dist-info"}
    root = distributions["specplug"]
    sources = {str(path.relative_to(root)) for path in (root / "specplug").rglob("*.py")}
    assert sources <= set(names)
    assert "specplug/py.typed" in names
    assert not [name for name in names if Path(name).name.startswith("test_") or "__pycache__" in name]


def test_the_core_sdist_holds_no_plugin_and_no_test(built: Built) -> None:
    _, sdist = built["specplug"]
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    tops = {name.split("/")[0] for name in names}
    assert tops == {"specplug", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO", ".gitignore"}


def test_the_core_declares_its_entry_points(built: Built) -> None:
    found = entry_points(built["specplug"][0])
    assert found["specplug"] == {
        "acceptance": "specplug.metrics.acceptance",
        "custom_class": "specplug.proposers.custom_class",
        "draft_model": "specplug.proposers.draft_model",
        "ngram": "specplug.proposers.ngram",
        "tli": "specplug.tli.plugin",
    }
    assert found["console_scripts"] == {"specplug": "specplug.cli:main"}
    assert found["pytest11"] == {"specplug": "specplug.testing.pytest_plugin"}


def test_the_core_declares_what_it_needs(built: Built) -> None:
    metadata = HeaderParser().parsestr(read(built["specplug"][0], "METADATA"))
    assert (metadata["Name"], metadata["License-Expression"]) == ("specplug", "Apache-2.0")
    needed = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    always = {need.name for need in needed if "extra" not in str(need.marker or "")}
    assert always == {
        "numpy", "pluggy", "pydantic", "pyyaml", "safetensors", "torch", "transformers", "triton", "typer",
    }  # fmt: skip
    assert set(metadata.get_all("Provides-Extra")) == {"metrics", "report", "grammar", "demo", "dev"}
    assert "from specplug import LLM, SamplingParams" in metadata.get_payload()
    transformers = next(need for need in needed if need.name == "transformers")
    assert all(version in transformers.specifier for version in ("5.16.0", "5.19.0", "5.24.0"))


def test_licence_text_travels(built: Built) -> None:
    wheel, _ = built["specplug"]
    assert "Apache License" in read(wheel, "licenses/LICENSE")


def test_each_plugin_names_what_it_brings_and_a_range_of_the_core(built: Built) -> None:
    for name in set(built) - {"specplug"}:
        wheel, sdist = built[name]
        package = name.replace("-", "_")
        assert {top.split("/")[0].split("-")[0] for top in names_in(wheel)} == {package}
        assert set(entry_points(wheel)) == {"specplug.kernels" if name == "specplug-native" else "specplug"}, name
        metadata = HeaderParser().parsestr(read(wheel, "METADATA"))
        core = next(need for need in map(Requirement, metadata.get_all("Requires-Dist")) if need.name == "specplug")
        assert "==" not in str(core.specifier)
        assert "<" in str(core.specifier)
        with tarfile.open(sdist) as archive:
            assert any("/tests/test_" in member for member in archive.getnames()), f"{name}: tests travel in the sdist"


def test_every_distribution_has_its_papers(distributions: dict[str, Path]) -> None:
    for name, folder in distributions.items():
        if folder.parent.name == "examples":
            continue
        readme, changes = (folder / file for file in ("README.md", "CHANGELOG.md"))
        assert readme.read_text().startswith(f"# {name}\n"), name
        assert changes.read_text().startswith(f"# Changelog of {name}\n\n## Unreleased\n\n"), name
        assert (folder / "LICENSE").read_text() == (distributions["specplug"] / "LICENSE").read_text(), name


def test_licence_text_travels_with_every_plugin(built: Built, distributions: dict[str, Path]) -> None:
    for name in set(built) - {"specplug"}:
        if distributions[name].parent.name == "plugins":
            assert "Apache License" in read(built[name][0], "licenses/LICENSE"), name


def test_the_compiled_wheel_serves_every_python_of_its_machine(native_wheel: Path) -> None:
    names = names_in(native_wheel)
    assert {"specplug_native/_kernels.abi3.so", "specplug_native/py.typed"} <= set(names)
    assert not [name for name in names if name.endswith((".cpp", ".h", ".txt")) and ".dist-info" not in name]
    tag = native_wheel.stem.split("-", 2)[2]
    assert tag.startswith("py3-none-")
    if sys.platform == "linux":
        assert tag == f"py3-none-linux_{platform.machine()}"
    assert entry_points(native_wheel)["specplug.kernels"] == {"native": "specplug_native:kernels"}


def test_the_compiled_sdist_holds_its_sources(native_wheel: Path, built: Built) -> None:
    with tarfile.open(built["specplug-native"][1]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"CMakeLists.txt", "src/support.cpp", "src/decoder.cpp", "CHANGELOG.md", "LICENSE"} <= names
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.parametrize("pin", ["torch==2.13.0", "transformers==5.19.*"])
def test_development_pins(distributions: dict[str, Path], pin: str) -> None:
    lines = (distributions["specplug"] / "requirements-dev.txt").read_text().splitlines()
    assert lines[0] == "-e .[dev]", "the root first: older pip fails otherwise"
    assert pin in lines


def test_the_root_configures_all_tests(distributions: dict[str, Path]) -> None:
    with (distributions["specplug"] / "pyproject.toml").open("rb") as file:
        options = tomllib.load(file)["tool"]["pytest"]["ini_options"]
    assert options["testpaths"] == ["tests", "plugins"]
    assert options["filterwarnings"][0] == "error"
    assert "--import-mode=importlib" in options["addopts"]
