"""Logits between the target's forward and verification: everything that depends on the text before a token.

Custom processors, logit bias, penalties, allowed ids, bad words and ``min_tokens``, in this order, at every row of the
expanded verify batch; temperature, top-k, top-p and min-p follow in the rule. One pass over the batch: edits of single
entries are gathered for all rows and applied at once.
"""

from __future__ import annotations

from specplug.host.processing.block import Block
from specplug.host.processing.pipeline import process_logits
from specplug.host.processing.request import RequestProcessing, build_processing

__all__ = ["Block", "RequestProcessing", "build_processing", "process_logits"]
