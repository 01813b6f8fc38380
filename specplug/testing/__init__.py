"""Toy targets, test proposers and the conformance kit for plugin authors."""

from __future__ import annotations
