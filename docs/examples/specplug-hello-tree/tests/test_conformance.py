from __future__ import annotations

from specplug.testing import ProposerConformance


class TestHelloTree(ProposerConformance):
    method = "hello_tree"


class TestHelloTreeOfLongPaths(ProposerConformance):
    method = "hello_tree"
    options = {"hello_tree_window": 1, "hello_tree_depth": 8}
