"""Custom logits processors of single requests: Python callables, one call a row."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from specplug.host.processing.block import Block
from specplug.sampling_params import LogitsProcessor

__all__ = ["CustomProcessors"]


class CustomProcessors:
    """One request's callables, in order; each gets what the one before returned."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = [(processor, _takes_prompt(processor)) for processor in processors]

    def apply(self, logits: torch.Tensor, block: Block) -> str | None:
        """Rewrite the block's rows in place; returns what went wrong, if anything did.

        A callable is the request's own code: whatever it raises ends that request only.
        """
        prompt_ids = block.token_ids[: block.num_prompt_tokens].tolist()
        output_ids = block.token_ids[block.num_prompt_tokens :].tolist()
        drafts = block.draft_ids.tolist()
        for number, index in enumerate(block.rows.tolist(), block.first):
            row = logits[index]
            for processor, takes_prompt in self._processors:
                text = [*output_ids, *drafts[:number]]
                try:
                    result = processor(list(prompt_ids), text, row) if takes_prompt else processor(text, row)
                except Exception as error:  # noqa: BLE001 - the request's own code
                    return f"logits_processors: {_name(processor)} raised {type(error).__name__}: {error}"
                if not isinstance(result, torch.Tensor) or result.shape != row.shape:
                    found = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
                    return f"logits_processors: {_name(processor)} returned {found}, not logits {list(row.shape)}"
                row.copy_(result)
        return None


def _name(processor: Any) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


def _takes_prompt(processor: LogitsProcessor) -> bool:
    """As in vLLM: a callable of three arguments gets the prompt first."""
    try:
        return len(inspect.signature(processor).parameters) == 3
    except (TypeError, ValueError):  # built-in callables may have no signature
        return False
