from __future__ import annotations

from specplug.testing import ProposerConformance


class TestHello(ProposerConformance):
    method = "hello"


class TestHelloWithALongWindow(ProposerConformance):
    method = "hello"
    options = {"hello_window": 4}
