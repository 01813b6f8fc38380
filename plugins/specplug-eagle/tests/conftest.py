from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from specplug_eagle.testing import Tensors, write_head


@pytest.fixture
def make_head(tmp_path: Path) -> Callable[..., Path]:
    """``make_head(config, tensors)`` writes a checkpoint and returns its folder."""
    made: list[Path] = []

    def make(config: Mapping[str, Any], tensors: Tensors) -> Path:
        made.append(write_head(tmp_path / f"head{len(made)}", config, tensors))
        return made[-1]

    return make
