"""The check of what a verifier plugin returns; the built-in verifier is not checked at run time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specplug.hooks.faults import Malformed
from specplug.hooks.step import CurrentCall
from specplug.trees import Tree
from specplug.types import Draft, Verification, cumulative

if TYPE_CHECKING:
    import torch

__all__ = ["VerificationCheck"]

_ADVICE = "the built-in verifier decides instead"


class VerificationCheck:
    """Shapes and dtypes always; values where reading them does not wait for a device."""

    def __init__(self, call: CurrentCall, *, vocab_size: int) -> None:
        import torch

        self._call = call
        self._vocab_size = vocab_size
        self._torch = torch

    def __call__(self, answer: Any, plugin: str) -> Verification:
        """The verification, unchanged. Raises ``Malformed``."""
        if not isinstance(answer, Verification):
            raise Malformed("type", f"returned {type(answer).__name__}, not a Verification", _ADVICE)
        draft = self._call.draft
        counts = () if draft is None else draft.num_draft_tokens
        trees = [] if draft is None else draft.trees()
        depths = [count if tree is None else tree.max_depth for count, tree in zip(counts, trees, strict=True)]
        self._check_shapes(answer, depths)
        if answer.output_token_ids.device.type == "cpu" and answer.num_accepted_tokens.device.type == "cpu" and counts:
            self._check_values(answer, depths)
        if draft is not None and draft.parents is not None:
            self._check_paths(answer, draft, trees)
        return answer

    def _check_shapes(self, answer: Verification, counts: Sequence[int]) -> None:
        num_rows, min_width = len(counts), max(counts, default=0) + 1
        ids, accepted = answer.output_token_ids, answer.num_accepted_tokens
        if not self._is_integer(ids) or ids.dim() != 2 or ids.shape[0] != num_rows or ids.shape[1] < min_width:
            seen = f"output_token_ids is {_described(ids)}, expected int [{num_rows}, {min_width}]"
            raise Malformed("shape", seen, _ADVICE)
        if not self._is_integer(accepted) or tuple(accepted.shape) != (num_rows,):
            raise Malformed(
                "shape", f"num_accepted_tokens is {_described(accepted)}, expected int [{num_rows}]", _ADVICE
            )
        invalid = answer.is_invalid
        if invalid is not None and (invalid.dtype != self._torch.bool or tuple(invalid.shape) != (num_rows,)):
            raise Malformed("shape", f"is_invalid is {_described(invalid)}, expected bool [{num_rows}]", _ADVICE)
        indices = answer.accepted_draft_indices
        if indices is not None and (not self._is_integer(indices) or indices.dim() != 2 or len(indices) != num_rows):
            seen = f"accepted_draft_indices is {_described(indices)}, expected int [{num_rows}, max_depth]"
            raise Malformed("shape", seen, _ADVICE)

    def _check_values(self, answer: Verification, counts: Sequence[int]) -> None:
        torch = self._torch
        ids, accepted = answer.output_token_ids, answer.num_accepted_tokens
        is_valid = torch.ones(len(counts), dtype=torch.bool)
        if answer.is_invalid is not None:
            is_valid = ~answer.is_invalid.cpu()
        is_bad = (accepted < 0) | (accepted > torch.tensor(counts))
        if (is_bad & is_valid).any().item():
            seen = f"num_accepted_tokens {accepted.tolist()[:8]} for {list(counts[:8])} draft tokens"
            raise Malformed("value", seen, _ADVICE)
        is_emitted = torch.arange(ids.shape[1])[None, :] <= accepted[:, None]
        is_out = is_emitted & is_valid[:, None] & ((ids < 0) | (ids >= self._vocab_size))
        if is_out.any().item():
            seen = f"emits id {ids[is_out][0].item()}, the vocabulary has {self._vocab_size} tokens"
            raise Malformed("value", seen, _ADVICE)

    def _check_paths(self, answer: Verification, draft: Draft, trees: Sequence[Tree | None]) -> None:
        """Accepted nodes must be a path of their row's tree, and the output what stands on it."""
        indices = answer.accepted_draft_indices
        if indices is None or indices.shape[1] < max((tree.max_depth for tree in trees if tree is not None), default=0):
            seen = f"accepted_draft_indices is {_described(indices)} for a draft with trees"
            raise Malformed("shape", seen, f"{_ADVICE}; give the accepted nodes of every row, [batch, max_depth]")
        if any(each.device.type != "cpu" for each in (indices, answer.output_token_ids, answer.num_accepted_tokens)):
            return  # the host looks at them once they are copied
        ids, starts = draft.draft_token_ids.tolist(), cumulative(draft.num_draft_tokens)
        rows = zip(trees, indices.tolist(), answer.output_token_ids.tolist(), answer.num_accepted_tokens, strict=True)
        for row, (tree, nodes, output, count) in enumerate(rows):
            is_dropped = answer.is_invalid is not None and bool(answer.is_invalid[row])
            if tree is None or is_dropped:
                continue
            path = nodes[: int(count)]
            if not tree.has_path(path):
                raise Malformed(
                    "value", f"accepts the nodes {path} of row {row}, which are no path of its tree", _ADVICE
                )
            tokens = [ids[starts[row] + node] for node in path]
            if output[: len(path)] != tokens:
                seen = f"emits {output[: len(path)]} for the accepted nodes {path} of row {row}, which hold {tokens}"
                raise Malformed("value", seen, _ADVICE)

    def _is_integer(self, value: Any) -> bool:
        tensor: type[torch.Tensor] = self._torch.Tensor
        if not isinstance(value, tensor):
            return False
        return not (value.is_floating_point() or value.is_complex() or value.dtype == self._torch.bool)


def _described(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", "")
    return type(value).__name__ if shape is None else f"{str(dtype).removeprefix('torch.')} {list(shape)}"
