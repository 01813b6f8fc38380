"""Every distribution of the repository, built once per session; and an environment to install wheels into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {
    "specplug": ROOT,
    **{path.parent.name: path.parent for path in sorted((ROOT / "plugins").glob("*/pyproject.toml"))},
    **{path.parent.name: path.parent for path in sorted((ROOT / "docs/examples").glob("*/pyproject.toml"))},
}
COMPILED = {path.parent.name for path in ROOT.glob("plugins/*/CMakeLists.txt")}
HAS_COMPILER = any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++")))


@pytest.fixture(scope="session")
def distributions() -> dict[str, Path]:
    """Distribution name -> its folder."""
    return DISTRIBUTIONS


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Distribution name -> its wheel and its sdist; without a compiler, of those that need none."""
    out = tmp_path_factory.mktemp("dist")
    found = {}
    for name, folder in DISTRIBUTIONS.items():
        if name in COMPILED and not HAS_COMPILER:
            continue
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out / name), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (wheel,) = (out / name).glob("*.whl")
        (sdist,) = (out / name).glob("*.tar.gz")
        found[name] = (wheel, sdist)
    return found


@pytest.fixture
def native_wheel(built: dict[str, tuple[Path, Path]]) -> Path:
    """specplug-native's wheel; the test is skipped where nothing compiles it."""
    if "specplug-native" not in built:
        pytest.skip("no C++ compiler")
    return built["specplug-native"][0]


class Environment:
    """A fresh virtual environment: our distributions only if installed there, their dependencies borrowed."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        site_packages = Path(self._output("import sysconfig; print(sysconfig.get_path('purelib'))"))
        borrowed = folder / "borrowed"
        borrowed.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if "specplug" not in path.name.lower() and path.suffix != ".pth":
                (borrowed / path.name).symlink_to(path)
        (site_packages / "borrowed.pth").write_text(f"{borrowed}\n")
        self.site_packages = site_packages

    def install(self, *wheels: Path) -> None:
        """Install wheels and nothing else."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--no-index", "--disable-pip-version-check", *wheels], check=True)

    def run(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, away from the checkout."""
        program = str(self.python.parent / arguments[0])
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SPECPLUG_"))}
        return subprocess.run(
            [program, *arguments[1:]],
            capture_output=True,
            text=True,
            cwd=cwd or self.site_packages.parent,
            env={**clean, "OMP_NUM_THREADS": "1"},
            check=False,
        )

    def _output(self, code: str) -> str:
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.strip()


@pytest.fixture
def environment(tmp_path: Path) -> Callable[..., Environment]:
    """``environment(*wheels)``: a fresh one with these installed."""

    def make(*wheels: Path) -> Environment:
        fresh = Environment(tmp_path / "env")
        fresh.install(*wheels)
        return fresh

    return make
