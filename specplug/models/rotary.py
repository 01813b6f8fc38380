"""The rotary embedding in halves: what a step needs of its positions, worked out once and shared by all layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Embeddings", "RotaryTable", "Turn"]

Embeddings = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines ``[..., tokens, head_dim]``, as transformers' rotary embeddings return them."""


class Turn:
    """Turns queries or keys by the positions of one step's tokens."""

    __slots__ = ("cos", "half", "sin")

    def __init__(self, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
        """``[..., tokens, 1, head_dim]``; the sines of the first half are negated, which changes no bit."""
        self.cos, self.sin = cos, signed_sin
        self.half = cos.shape[-1] // 2

    @classmethod
    def of(cls, embeddings: Embeddings) -> Turn:
        """From what transformers' rotary embedding returned."""
        cos, sin = embeddings
        return cls(cos[..., None, :], _signed(sin)[..., None, :])

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """``[..., tokens, heads, head_dim]`` in and out."""
        return (heads * self.cos).add_(heads.roll(self.half, -1).mul_(self.sin))


class RotaryTable:
    """Cosines and sines of every position, looked up instead of computed in each step."""

    KINDS = ("default", "linear", "llama3", "yarn")
    """Kinds of rotary embedding that do not depend on how long the text has become."""

    def __init__(
        self,
        rotary: Callable[[torch.Tensor, torch.Tensor], Embeddings],
        num_positions: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``rotary``: transformers' rotary embedding, of one of the ``KINDS``."""
        like = torch.zeros(1, dtype=dtype, device=device)
        cos, sin = rotary(like, torch.arange(num_positions, device=device)[None])
        self.cos, self.signed_sin = cos[0, :, None], _signed(sin)[0, :, None]
        """``[positions, 1, head_dim]``; the sines of the first half are negated."""
        self._last: tuple[torch.Tensor, Turn] | None = None

    def __call__(self, position_ids: torch.Tensor) -> Turn:
        """At positions ``[1, tokens]``. Layer after layer asks with the same tensor."""
        if self._last is None or self._last[0] is not position_ids:
            places = position_ids[0]
            turn = Turn(self.cos.index_select(0, places), self.signed_sin.index_select(0, places))
            self._last = (position_ids, turn)
        return self._last[1]


def _signed(sin: torch.Tensor) -> torch.Tensor:
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
