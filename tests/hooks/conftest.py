"""Batches without a host, and installed distributions without an installer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specplug.hooks import SessionHooks
from specplug.sampling_params import SamplingParams
from specplug.types import Batch, Request, TokenIds

VOCAB_SIZE = 64


@pytest.fixture
def make_batch() -> Callable[[int], Batch]:
    """``make_batch(n)``: a decoding batch of ``n`` rows with ids "r0", "r1", ..."""

    def make(size: int) -> Batch:
        ids = TokenIds(np.arange(5, dtype=np.int32))
        greedy = SamplingParams(temperature=0.0)
        requests = tuple(Request(f"r{row}", ids, greedy, seed=row) for row in range(size))
        return Batch(requests, (ids,) * size, (4,) * size, (10,) * size, (0,) * size)

    return make


@pytest.fixture
def make_hooks() -> Callable[..., SessionHooks]:
    """``make_hooks(plugin, ...)``: a session over plugins named "a", "b", ... in configuration order."""

    def make(*plugins: object, **options: Any) -> SessionHooks:
        named = [(chr(ord("a") + number), plugin) for number, plugin in enumerate(plugins)]
        options.setdefault("describe", lambda name: f"dist-of-{name} 1.0")
        return SessionHooks(named, vocab_size=VOCAB_SIZE, **options)

    return make


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The messages that the logger "specplug" was given so far."""
    caplog.set_level(logging.WARNING, logger="specplug")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "specplug"]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """``install(distribution, version, {entry: value}, {module: source}, site=...)`` onto the import path."""
    before = set(sys.modules)

    def run(
        distribution: str,
        version: str,
        entries: dict[str, str],
        modules: dict[str, str] | None = None,
        *,
        site: str = "site",
        group: str = "specplug",
    ) -> Path:
        folder = tmp_path / site
        if str(folder) not in sys.path:
            folder.mkdir(exist_ok=True)
            monkeypatch.syspath_prepend(str(folder))
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for name, source in (modules or {}).items():
            (folder / f"{name}.py").write_text(source)
        return folder

    yield run
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]


@pytest.fixture
def plugin_source() -> Callable[..., str]:
    """``plugin_source("hello", ...)``: the text of a plugin module with those methods."""

    def make(*names: str, api: str = "SPECPLUG_API = (1, 0)", kind: str = "proposer") -> str:
        return f"""
from specplug.hooks import hookimpl
from specplug.methods import MethodSpec
{api}
class Made:
    @hookimpl
    def specplug_propose(self, batch):
        return None
calls = []
@hookimpl
def specplug_register():
    calls.append(1)
    return [MethodSpec(name=name, kind="{kind}", factory=lambda config, context: Made()) for name in {_listed(names)}]
"""

    return make


def _listed(names: Sequence[str]) -> str:
    return repr(list(names))
