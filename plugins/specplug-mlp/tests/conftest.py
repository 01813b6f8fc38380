from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from specplug_mlp.sample import write_sample


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write a speculator with random weights to a folder of that name."""

    def run(name: str = "speculator", tensors: Any = None, **config: Any) -> Path:
        return write_sample(tmp_path / name, tensors, **config)

    return run
