"""Which implementation verifies on a device."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch

from specplug.types import Verification
from specplug.verify.inputs import VerifyInputs
from specplug.verify.torch_rules import TorchRules

__all__ = ["Verifier", "say_once", "verifier_for"]

logger = logging.getLogger(__name__)


class Verifier(Protocol):
    """One implementation of all rules."""

    def verify(self, inputs: VerifyInputs) -> Verification:
        """Decide every row of checked ``inputs``."""


def verifier_for(device: torch.device) -> Verifier:
    """Triton kernels on CUDA and ROCm devices where Triton is installed, else the torch rules; says which, once.

    It keeps buffers: one object serves one thread.
    """
    if device.type != "cuda":
        say_once(f"verification runs in torch: device {device.type} has no Triton kernels")
        return TorchRules()
    if find_spec("triton") is None:
        say_once("verification runs in torch: Triton is not installed")
        return TorchRules()
    from specplug.verify.kernels.rules import TritonRules

    say_once(f"verification runs in Triton kernels on {device.type}")
    return TritonRules()


@cache
def say_once(line: str) -> None:
    """Log ``line``, once per process."""
    logger.info(line)
