from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from specplug_medusa.sample import write_sample


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write heads with random weights to a folder of that name."""

    def run(name: str = "heads", tensors: Any = None, **config: Any) -> Path:
        return write_sample(tmp_path / name, tensors, **config)

    return run
