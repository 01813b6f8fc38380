"""The networks: EAGLE's, which predicts the target's next state, and EAGLE-3's, which reads states of several layers.

EAGLE (Li et al., 2024): ``fc([embedding(x_{t+1}); f_t])`` through decoder layers, the first without a norm before its
attention, gives the next feature; the target's output head reads it as it is. EAGLE-3 (Li et al., 2025): the states
of three layers through ``fc`` are the feature; the first layer attends over ``[norm(embedding); norm(feature)]``, and
later steps read the layers' own output in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from specplug.models.cache import RaggedCache
from specplug.models.runner import layer_windows
from specplug.models.step_plan import StepPlan
from specplug.proposers.heads.layers import DecoderLayer, Norm, Norms, RotaryTable, Shape
from specplug_eagle.checkpoint import HeadConfig

__all__ = ["Eagle3Head", "EagleHead", "Map"]

Map: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class _Body(torch.nn.Module):
    """What both have: layers, positions, and the way in and out, which may be the target's.

    ``embed``: target ids ``[T]`` to embeddings ``[T, hidden]``; ``output``: ``[n, hidden]`` to raw logits. They are
    no submodules, since they may belong to the target.
    """

    rotary: RotaryTable

    def __init__(self, config: HeadConfig, body: Any, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        self.layers = layers
        self.windows: Sequence[int | None] = layer_windows(body)
        self.embed: Map = _missing
        self.output: Map = _missing

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Raw logits ``[n, draft_vocab]`` of what ``run`` returned."""
        logits = self.output(outputs)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale


def _missing(tensor: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the head has not been given its embeddings and output head")


class EagleHead(_Body):
    """EAGLE's. Features are the target's last, normalised states; its own outputs take their place."""

    def __init__(self, config: HeadConfig, body: Any, layers: tuple[int, ...], *, has_bias: bool, norm: Map) -> None:
        """``norm``: the target's final norm; ``body``: transformers' config of the layers."""
        super().__init__(config, body, layers)
        self._norm = [norm]  # in a list, since it is the target's module
        shape = Shape.of(body)
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=has_bias)
        self.blocks = torch.nn.ModuleList(
            DecoderLayer(shape, normalises_input=index > 0) for index in range(config.num_layers)
        )

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """The target's last layer ``[T, hidden]``, normalised."""
        return self._norm[0](states)

    def run(self, token_ids: torch.Tensor, features: torch.Tensor, step: StepPlan, cache: RaggedCache) -> torch.Tensor:
        """See ``specplug.proposers.heads.reader.Head``."""
        rotary = self.rotary(step.position_ids[0])
        states: torch.Tensor = self.fc(torch.cat((self.embed(token_ids), features), -1))
        for index, block in enumerate(self.blocks):
            states = block(states, rotary, step, cache, index)
        return states


class Eagle3Head(_Body):
    """EAGLE-3's; ``norm_output`` (3.1): what is fed back is normalised."""

    fc: torch.nn.Linear
    input_norm: Norm | None

    def __init__(self, config: HeadConfig, body: Any, layers: tuple[int, ...], *, norm: Map | None = None) -> None:
        """``norm``: the target's final norm, for a head that reads its last state in place of several layers."""
        super().__init__(config, body, layers)
        self._norm = [norm]
        eps, hidden = body.rms_norm_eps, config.hidden_size
        if config.uses_layers:
            width = config.num_inputs * config.target_hidden_size
            self.fc = torch.nn.Linear(width, hidden, bias=False)
            self.input_norm = Norm(width, eps) if config.norm_before_fc else None
            num_norms = config.num_inputs if config.fc_norm else 0
            self.fc_norm = torch.nn.ModuleList(Norm(config.target_hidden_size, eps) for _ in range(num_norms))
        self.input_norms = Norms(2, hidden, eps)  # of the embedding and of the feature, in one operation
        self.blocks = torch.nn.ModuleList(
            DecoderLayer(Shape.of(body, input_size=2 * hidden if index == 0 else hidden), normalises_input=index > 0)
            for index in range(config.num_layers)
        )
        self.norm = Norm(hidden, eps)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """The target's layers side by side ``[T, layers * target hidden]`` as one feature ``[T, hidden]``."""
        norm = self._norm[0]
        if not self.config.uses_layers:
            return states if norm is None else norm(states)
        if self.input_norm is not None:
            states = self.input_norm(states)
        if len(self.fc_norm):
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([each(part) for each, part in zip(self.fc_norm, parts, strict=True)], -1)
        projected: torch.Tensor = self.fc(states)
        return projected

    def run(self, token_ids: torch.Tensor, features: torch.Tensor, step: StepPlan, cache: RaggedCache) -> torch.Tensor:
        """See ``specplug.proposers.heads.reader.Head``."""
        rotary = self.rotary(step.position_ids[0])
        first: Any
        first, *others = self.blocks
        normed = self.input_norms(torch.stack((self.embed(token_ids), features), 1))
        residual = normed[:, 1] if self.config.norm_before_residual else features
        states: torch.Tensor = first.finish(residual, normed.flatten(1), rotary, step, cache, 0)
        for index, block in enumerate(others, start=1):
            states = block(states, rotary, step, cache, index)
        return self.norm(states) if self.config.norm_output else states

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Raw logits ``[n, draft_vocab]`` of what ``run`` returned."""
        return super().logits(outputs if self.config.norm_output else self.norm(outputs))
