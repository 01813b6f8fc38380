"""The pytest side of ``specplug.testing``, loaded through pytest's entry-point group ``pytest11``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specplug.hooks import ProcessManager


@pytest.fixture
def process_manager() -> Iterator[ProcessManager]:
    """A process manager of this test alone, with nothing registered: no entry points, no environment.

    Register plugins with ``process_manager.register(...)`` and hand it to ``specplug.LLM(..., manager=...)``.
    """
    yield ProcessManager(entry_points=())
