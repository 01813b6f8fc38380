"""What the loop needs of a target: one ragged forward, and a state that rolls back by length.

``specplug.models.runner.TargetRunner`` implements it for Hugging Face models, ``specplug.testing`` for toys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from specplug.trees import Tree
from specplug.types import Request

if TYPE_CHECKING:
    import torch

__all__ = ["Target", "TargetOutput"]


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """``logits``: ``[num_logits, vocab]`` of the rows asked for, float, raw. ``hidden_states``: tapped layer ->
    ``[num_query_tokens, hidden]`` for every query token of the step."""

    logits: torch.Tensor
    hidden_states: Mapping[int, torch.Tensor] = field(default_factory=dict)


class Target(Protocol):
    """Rows are numbered 0 .. num_rows - 1: ``acquire`` appends one, ``release`` moves the last into the hole."""

    vocab_size: int
    max_num_seqs: int
    max_model_len: int
    max_query_tokens: int
    """Most query tokens of one row in one forward: what prompt chunks are cut to."""
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: frozenset[int]
    hidden_size: int | None
    num_layers: int | None
    model: Any
    tokenizer: Any
    supports_trees: bool
    """Whether ``forward`` takes ``trees`` and there is ``compact``. Where it is false or missing the host verifies
    the first path of a tree only, and may leave ``trees`` out of the call."""

    def tap(self, layers: Sequence[int]) -> None:
        """Ask for ``hidden_states`` of these layers from the next forward on."""

    def acquire(self, request: Request) -> int:
        """Give the request a row: always the current number of rows. Its length starts at 0."""

    def release(self, row: int) -> int | None:
        """Free ``row``. The last row, if it is another, moves there: returns its old number, else None."""

    def rollback(self, row: int, length: int) -> None:
        """Forget everything past ``length`` tokens of ``row``; an absolute length, at most the current one."""

    def compact(self, rows: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let the token at position ``sources[i]`` of row ``rows[i]`` stand at its position ``targets[i]``.

        Moves accepted nodes of a tree, before ``rollback`` to their end: towards the front, all at once.
        """

    def forward(
        self,
        input_ids: torch.Tensor,
        num_query_tokens: Sequence[int],
        logits_indices: torch.Tensor,
        trees: Mapping[int, Tree] | None = None,
    ) -> TargetOutput:
        """Append ``num_query_tokens[row]`` tokens to each row (0 allowed) and run the target over all of them.

        ``input_ids``: ``[T]`` int64 on ``device``, rows in order; ``logits_indices``: int64, which of the T
        positions need logits, ascending. ``trees``: row -> the tree that its last ``len(tree)`` tokens form on the
        token before them; a node follows the tokens on its own path only, and the row is appended node by node.
        """
