"""Which implementation verifies on a device."""

from __future__ import annotations

from typing import Protocol

import torch

from specplug.types import Verification
from specplug.verify.inputs import VerifyInputs
from specplug.verify.torch_rules import TorchRules

__all__ = ["Verifier", "verifier_for"]


class Verifier(Protocol):
    """One implementation of all rules."""

    def verify(self, inputs: VerifyInputs) -> Verification:
        """Decide every row of checked ``inputs``."""


def verifier_for(device: torch.device) -> Verifier:
    """The implementation for logits on ``device``; it keeps buffers, so one object serves one thread."""
    return TorchRules()
