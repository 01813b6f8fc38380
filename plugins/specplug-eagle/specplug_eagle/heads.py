"""The networks: EAGLE's, which predicts the target's next state, and EAGLE-3's, which reads states of several layers.

EAGLE (Li et al., 2024): ``fc([embedding(x_{t+1}); f_t])`` through decoder layers, the first without a norm before its
attention, gives the next feature; the target's output head reads it as it is. EAGLE-3 (Li et al., 2025): the states
of three layers through ``fc`` are the feature; the first layer attends over ``[norm(embedding); norm(feature)]``, and
later steps read the layers' own output in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from specplug.models.cache import RaggedCache
from specplug.models.kernels import Chain, ChainParts, Kernels
from specplug.models.rotary import RotaryTable
from specplug.models.runner import layer_windows
from specplug.models.step_plan import StepPlan
from specplug.proposers.heads.layers import DecoderLayer, Map, Norm, Shape, bound_linear
from specplug_eagle.checkpoint import HeadConfig

__all__ = ["Eagle3Head", "EagleHead"]


class _Body(torch.nn.Module):
    """What both have: layers, positions, and the way in and out, which may be the target's.

    ``embed``: target ids ``[T]`` to embeddings ``[T, hidden]``; ``output``: ``[n, hidden]`` to raw logits. They are
    no submodules, since they may belong to the target. Once the weights are final, :meth:`bind` comes before the rest.
    """

    blocks: torch.nn.ModuleList
    rotary: RotaryTable

    def __init__(self, config: HeadConfig, body: Any, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        self.layers = layers
        self.windows: Sequence[int | None] = layer_windows(body)
        self.kernels: Kernels | None = None
        self.chain: Chain | None = None
        self.embed: Map = _missing
        self.output: Map = _missing

    def bind(self, kernels: Kernels | None = None) -> None:
        """Look the parts up that every token needs; again whenever one was replaced.

        ``kernels``: to be used where they can run all layers; the plain weights of these are let go.
        """
        self._blocks: list[Any] = list(self.blocks)
        compiled = [None if kernels is None else block.compiled(kernels, self.rotary) for block in self._blocks]
        self.kernels = None if None in compiled else kernels
        for block, layer in zip(self._blocks, compiled, strict=True):
            block.bind(self.rotary, self.kernels, layer if self.kernels else None)

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

    def bind(self, kernels: Kernels | None = None) -> None:
        super().bind(kernels)
        self._fc: Map = bound_linear(self.fc, self.kernels)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """The target's last layer ``[T, hidden]``, normalised."""
        return self._norm[0](states)

    def run(self, token_ids: torch.Tensor, features: torch.Tensor, step: StepPlan, cache: RaggedCache) -> torch.Tensor:
        """See ``specplug.proposers.heads.reader.Head``."""
        states = self._fc(torch.cat((self.embed(token_ids), features), -1))
        for block, layer in zip(self._blocks, cache.ragged_layers, strict=True):
            states = block.step(states, step, layer)
        return states


class Eagle3Head(_Body):
    """EAGLE-3's; ``norm_output`` (3.1): what is fed back is normalised."""

    def __init__(self, config: HeadConfig, body: Any, layers: tuple[int, ...], *, norm: Map | None = None) -> None:
        """``norm``: the target's final norm, for a head that reads its last state in place of several layers."""
        super().__init__(config, body, layers)
        self._target_norm = [norm]
        eps, hidden = body.rms_norm_eps, config.hidden_size
        if config.uses_layers:
            width = config.num_inputs * config.target_hidden_size
            self.fc = torch.nn.Linear(width, hidden, bias=False)
            self.input_norm = Norm(width, eps) if config.norm_before_fc else None
            num_norms = config.num_inputs if config.fc_norm else 0
            self.fc_norm = torch.nn.ModuleList(Norm(config.target_hidden_size, eps) for _ in range(num_norms))
        self.embedding_norm = Norm(hidden, eps)
        self.feature_norm = Norm(hidden, eps)
        self.blocks = torch.nn.ModuleList(
            DecoderLayer(Shape.of(body, input_size=2 * hidden if index == 0 else hidden), normalises_input=index > 0)
            for index in range(config.num_layers)
        )
        self.norm = Norm(hidden, eps)

    def bind(self, kernels: Kernels | None = None) -> None:
        super().bind(kernels)
        config, kernels = self.config, self.kernels
        if config.uses_layers:
            self._fc: Map = bound_linear(self.fc, kernels)
            self._before_fc = self.input_norm.bound(kernels) if self.input_norm is not None else None
            self._part_norms = [cast(Norm, norm).bound(kernels) for norm in self.fc_norm]
        self._embedding_norm, self._feature_norm = self.embedding_norm.bound(kernels), self.feature_norm.bound(kernels)
        self._norm = self.norm.bound(kernels)

    def bind_chain(self, embeddings: torch.Tensor, target_ids: torch.Tensor | None) -> None:
        """Let installed kernels draft in one call, where they can; once ``embed`` and ``output`` are final."""
        if self.kernels is None or len(self._blocks) > 1 or self.config.logit_scale != 1.0:
            return
        is_plain = self.config.uses_layers and self._before_fc is None and not self._part_norms
        self.chain = self.kernels.chain(
            ChainParts(
                features=self._fc if is_plain else self.features,
                layer=self._blocks[0].compiled_layer,
                embeddings=embeddings,
                embedding_norm=self._embedding_norm,
                feature_norm=self._feature_norm,
                output_norm=self._norm,
                adds_to_norm=self.config.norm_before_residual,
                feeds_back_norm=self.config.norm_output,
                output=self.output,
                target_ids=target_ids,
            )
        )

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """The target's layers side by side ``[T, layers * target hidden]`` as one feature ``[T, hidden]``."""
        if not self.config.uses_layers:
            norm = self._target_norm[0]
            return states if norm is None else norm(states)
        if self._before_fc is not None:
            states = self._before_fc(states)
        if self._part_norms:
            parts = states.chunk(len(self._part_norms), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self._part_norms, parts, strict=True)], -1)
        return self._fc(states)

    def run(self, token_ids: torch.Tensor, features: torch.Tensor, step: StepPlan, cache: RaggedCache) -> torch.Tensor:
        """See ``specplug.proposers.heads.reader.Head``."""
        normed = self._feature_norm(features)
        joined = torch.cat((self._embedding_norm(self.embed(token_ids)), normed), -1)
        residual = normed if self.config.norm_before_residual else features
        states: torch.Tensor = self._blocks[0].finish(residual, joined, step, cache.ragged_layers[0])
        for block, layer in zip(self._blocks[1:], cache.ragged_layers[1:], strict=True):
            states = block.step(states, step, layer)
        return self._norm(states) if self.config.norm_output else states

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Raw logits ``[n, draft_vocab]`` of what ``run`` returned."""
        return super().logits(outputs if self.config.norm_output else self._norm(outputs))
