"""The arguments of the hook call that is under way, which the checks of its answers need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specplug.types import Batch, Draft

__all__ = ["CurrentCall"]

_NO_BATCH = Batch(requests=(), token_ids=(), num_computed_tokens=(), remaining=(), num_verify_steps=())


@dataclass(slots=True)
class CurrentCall:
    """Set by the session before each call; a guard passes on only what its function asked for."""

    batch: Batch = _NO_BATCH
    limits: Sequence[int] = ()
    draft: Draft | None = None
