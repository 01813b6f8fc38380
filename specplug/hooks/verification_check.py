"""The check of what a verifier plugin returns; the built-in verifier is not checked at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specplug.hooks.faults import Malformed
from specplug.hooks.step import CurrentCall
from specplug.types import Verification

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
        self._check_shapes(answer, counts)
        if answer.output_token_ids.device.type == "cpu" and answer.num_accepted_tokens.device.type == "cpu" and counts:
            self._check_values(answer, counts)
        return answer

    def _check_shapes(self, answer: Verification, counts: tuple[int, ...]) -> None:
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

    def _check_values(self, answer: Verification, counts: tuple[int, ...]) -> None:
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

    def _is_integer(self, value: Any) -> bool:
        tensor: type[torch.Tensor] = self._torch.Tensor
        if not isinstance(value, tensor):
            return False
        return not (value.is_floating_point() or value.is_complex() or value.dtype == self._torch.bool)


def _described(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", "")
    return type(value).__name__ if shape is None else f"{str(dtype).removeprefix('torch.')} {list(shape)}"
