"""The command line: ``specplug generate | plugins | explain | demo``. Importing it imports no torch."""

from __future__ import annotations

from specplug.cli.app import app, main

__all__ = ["app", "main"]
