"""What heads keep of the target's hidden states, per request.

The host hands every kept position over once, in ``specplug_advance``: position t holds the state that read token t.
A head that drafts after the newest token (which the target has not read) starts from the state before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from specplug.errors import ModelError
from specplug.types import Batch

__all__ = ["LastStates", "final_norm", "joined_states"]


def joined_states(
    new_hidden_states: Mapping[int, tuple[torch.Tensor, ...]], layers: Sequence[int], row: int
) -> torch.Tensor:
    """A batch row's new states ``[new tokens, layers * hidden]``: the layers side by side, in the order given."""
    parts = [new_hidden_states[layer][row] for layer in layers]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def final_norm(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm between a causal LM's last decoder layer and its output head, which tapped states lack.

    Raises ModelError for a model that does not have it as ``get_decoder().norm``.
    """
    norm = getattr(model.get_decoder(), "norm", None)
    if not isinstance(norm, torch.nn.Module):
        raise ModelError(
            f'model type "{model.config.model_type}": its final norm cannot be found (get_decoder().norm), and the '
            "head was trained on normalised states; use a target such as Llama, Qwen, Mistral or Gemma 3"
        )
    return norm


class LastStates:
    """The state of the newest kept position of every request: all that a head without a cache of its own needs.

    Call :meth:`advance` in every step, drafting or not, and :meth:`forget` when a request finishes. A state stays
    until the next one comes, so steps without a draft and pauses lose nothing.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        """``layers``: which tapped layers are kept, side by side."""
        self.layers = tuple(layers)
        self._states: dict[str, torch.Tensor] = {}

    def advance(self, batch: Batch) -> None:
        """Take the newest position of every row that got new ones."""
        for row, token_ids in enumerate(batch.new_token_ids):
            if len(token_ids):
                last = {layer: (batch.new_hidden_states[layer][row][-1:],) for layer in self.layers}
                # a copy, since a slice would keep the states of the whole step
                self._states[batch.requests[row].request_id] = joined_states(last, self.layers, 0).clone()

    def forget(self, request_id: str) -> None:
        """Drop a request's state; unknown ids are ignored."""
        self._states.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def stack(self, request_ids: Sequence[str]) -> torch.Tensor:
        """``[requests, layers * hidden]`` in the order given. Raises KeyError for a request without a state."""
        return torch.cat([self._states[request_id] for request_id in request_ids])
