"""Trees for implementations that know chains only: every node's logit row becomes a request without drafts.

One chain-only launch then draws the target's token behind every node, with the noise of the node's depth; which nodes
are accepted is worked out from these tokens on their device, without waiting for it. The results are those of
``specplug.verify.reference``. It costs a draw behind every node where a walk would need one per accepted token, which
is free where rows run side by side; on the CPU ``specplug.verify.torch_rules`` walks instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from specplug.trees import ROOT, Tree, chain_parents, tree_of
from specplug.types import Verification, select_laws
from specplug.verify.inputs import RowInputs, VerifyInputs

__all__ = ["verify_trees"]

Ints = NDArray[np.int64]

_NO_TOKEN = -2
"""Neither an id nor the placeholder."""


def verify_trees(inputs: VerifyInputs, verify: Callable[[VerifyInputs], Verification]) -> Verification:
    """Decide checked ``inputs`` that hold trees by ``verify``, which is handed chains only."""
    trees = inputs.trees
    return _merge(inputs, trees, verify(_without_trees(inputs, trees)))


def _without_trees(inputs: VerifyInputs, trees: list[Tree | None]) -> VerifyInputs:
    """The same logit rows in the same order; draft tokens of chains only."""
    slots: list[int] = []
    counts: list[int] = []
    rows: list[RowInputs] = []
    for row, tree, (start, stop) in zip(inputs.rows, trees, pairwise(inputs.slot_starts), strict=True):
        if tree is None:
            slots += range(start, stop)
            counts.append(stop - start)
            rows.append(row)
        else:
            depths = (0, *tree.depths)
            counts += [0] * len(depths)
            rows += [replace(row, position=row.position + depth) for depth in depths]
    kept = torch.tensor(slots, dtype=torch.int64)
    ids = inputs.draft_token_ids
    return replace(
        inputs,
        draft_token_ids=ids if len(slots) == len(ids) else ids[kept.to(ids.device, non_blocking=True)],
        num_draft_tokens=tuple(counts),
        laws=tuple(select_laws(inputs.laws, slots)),
        rows=tuple(rows),
        parents=None,
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where things are, ``[batch, width]`` per node or ``[batch]``; padded nodes are their own kind of nothing.

    ``rows``: the chain-only row that holds a row's root; ``slots``: each node's draft token; ``parents``: each node's
    parent plus 1; ``is_node``: False for padding; ``is_tree``: per row.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    parents: torch.Tensor
    is_node: torch.Tensor
    is_tree: torch.Tensor


def _layout(inputs: VerifyInputs, trees: list[Tree | None], device: torch.device) -> _Layout:
    """Chains appear as trees, so that one rule finds the accepted nodes of all; one copy to the device."""
    batch, width = len(trees), max(1, *inputs.num_draft_tokens)
    table: Ints = np.zeros((batch, 2 + 3 * width), dtype=np.int64)
    first_row = 0
    for number, (tree, start) in enumerate(zip(trees, inputs.slot_starts, strict=False)):
        count = inputs.num_draft_tokens[number]
        shape = tree_of(chain_parents(count)) if tree is None else tree
        table[number, 0], table[number, 1] = first_row, tree is not None
        parts = table[number, 2:].reshape(3, width)
        parts[0, :count] = np.arange(start, start + count)
        parts[1, :count] = np.array(shape.parents, dtype=np.int64) - ROOT
        parts[2, :count] = 1
        first_row += 1 if tree is None else count + 1
    sent = torch.from_numpy(table).to(device, non_blocking=True)
    slots, parents, is_node = sent[:, 2:].view(batch, 3, width).unbind(1)
    return _Layout(sent[:, 0], slots, parents, is_node.bool(), sent[:, 1].bool())


def _merge(inputs: VerifyInputs, trees: list[Tree | None], flat: Verification) -> Verification:
    """Per row of ``inputs`` the descent of its tree or, of a chain, what ``flat`` says."""
    depth, device = inputs.max_depth, flat.output_token_ids.device
    layout = _layout(inputs, trees, device)
    drafts = inputs.draft_token_ids.to(device, torch.int64)[layout.slots]
    is_unusable = torch.zeros_like(flat.num_accepted_tokens) if flat.is_invalid is None else flat.is_invalid
    is_unusable = is_unusable.bool()
    # of a row without drafts the first token is what the target drew; nothing matches where it could not draw
    drawn = flat.output_token_ids[:, 0].to(torch.int64).masked_fill(is_unusable, _NO_TOKEN)
    behind_parents = drawn[layout.rows[:, None] + layout.parents * layout.is_tree[:, None]]
    nodes, num_accepted = _in_order(_accepted(layout, drafts == behind_parents, depth), depth)
    last_node = nodes.gather(1, (num_accepted[:, None] - 1).clamp(min=0))[:, 0]
    last_rows = layout.rows + torch.where(layout.is_tree & (num_accepted > 0), last_node + 1, 0)
    at = torch.arange(depth + 1, device=device)
    ids = pad(drafts.gather(1, nodes.clamp(min=0)), (0, 1))
    ids = torch.where(at == num_accepted[:, None], drawn[last_rows][:, None], ids)
    ids = torch.where(layout.is_tree[:, None], ids, _to_width(flat.output_token_ids, depth + 1)[layout.rows])
    counts = torch.where(layout.is_tree, num_accepted, flat.num_accepted_tokens[layout.rows])
    nodes = torch.where(layout.is_tree[:, None], nodes, at[:depth])
    is_invalid = is_unusable[last_rows]
    counts = counts.masked_fill(is_invalid, 0)
    ids = ids.masked_fill(is_invalid[:, None], 0)  # a row that needs unusable logits emits id 0 alone
    return Verification(
        output_token_ids=ids.masked_fill(at > counts[:, None], -1).to(torch.int32),
        num_accepted_tokens=counts.to(torch.int32),
        is_invalid=is_invalid,
        accepted_draft_indices=nodes.masked_fill(at[:depth] >= counts[:, None], -1).to(torch.int32),
    )


def _accepted(layout: _Layout, does_match: torch.Tensor, max_depth: int) -> torch.Tensor:
    """``[batch, width]`` bool: nodes that match, and whose whole path does; of siblings with one token the first."""
    batch, width = does_match.shape
    stands = layout.is_node & does_match
    is_earlier = torch.ones(width, width, dtype=torch.bool, device=stands.device).tril(-1)
    is_sibling = layout.parents[:, :, None] == layout.parents[:, None, :]
    stands &= ~(is_sibling & is_earlier & stands[:, None, :]).any(2)
    reached = torch.zeros(batch, width + 1, dtype=torch.bool, device=stands.device)
    reached[:, 0] = True
    for _ in range(max_depth):
        reached[:, 1:] = stands & reached.gather(1, layout.parents)
    return reached[:, 1:]


def _in_order(is_accepted: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The accepted nodes ``[batch, depth]``, ascending, padded with -1, and their number ``[batch]``."""
    width = is_accepted.shape[1]
    numbers = torch.where(is_accepted, torch.arange(width, device=is_accepted.device), width)
    nodes = numbers.sort(1).values[:, :depth]
    return torch.where(nodes < width, nodes, -1), is_accepted.sum(1)


def _to_width(ids: torch.Tensor, width: int) -> torch.Tensor:
    return pad(ids, (0, max(0, width - ids.shape[1])), value=-1)[:, :width]
