"""Where nothing could compile the package, its tests are left out, and the first lines of the run say so."""

from __future__ import annotations

import importlib.util

IS_INSTALLED = importlib.util.find_spec("specplug_native") is not None
collect_ignore_glob = [] if IS_INSTALLED else ["test_*.py"]


def pytest_report_header() -> str | None:
    return None if IS_INSTALLED else "specplug-native is not installed: its tests are left out"
