"""The pytest side of ``specplug.testing``: loaded by pytest's entry-point group ``pytest11``."""

from __future__ import annotations
