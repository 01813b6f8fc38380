"""PARD: the draft model reads the newest tokens and K - 1 masks, and answers K tokens in one forward.

Source: An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation" (2025). The masks'
entries count for nothing once the draft is made, so the cache holds committed tokens only, and a row whose draft was
accepted reads those tokens in the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specplug import Batch, ConfigError, PluginContext
from specplug.proposers.draft_cache import Reading
from specplug.proposers.draft_loading import load_draft
from specplug.proposers.draft_sampling import DraftSampler
from specplug.proposers.model_proposer import ModelProposer, Slots
from specplug_pard.features import TargetFeatures, load_features
from specplug_pard.options import PardOptions, mask_token

__all__ = ["PardProposer", "build"]


class PardProposer(ModelProposer):
    """``features``: a PARD-2 draft reads the target's hidden states too."""

    def __init__(
        self,
        draft: Any,
        context: PluginContext,
        *,
        mask_token_id: int,
        features: TargetFeatures | None = None,
        **how: Any,
    ) -> None:
        super().__init__(draft, context, **how)
        self.mask_token_id = mask_token_id
        self._features = features
        self.hidden_state_layers: tuple[int, ...] = () if features is None else features.layers

    def draw(self, rows: Sequence[Slots], sampler: DraftSampler) -> None:
        for row in rows:
            row.reading.token_ids = [*row.reading.token_ids, *[self.mask_token_id] * (row.count - 1)]
            row.reading.num_logits, row.reading.num_masks = row.count, row.count - 1
        logits = self.cache.read([row.reading for row in rows])
        self.choose(logits, [row.first + depth for row in rows for depth in range(row.count)], sampler)

    # --- PARD-2 -----------------------------------------------------------------------------------------------

    def before_read(self, readings: Sequence[Reading]) -> None:
        if self._features is not None:
            self._features.prepare(readings)

    def follow(self, batch: Batch) -> None:
        if self._features is not None:
            wanted = [row for row, request in enumerate(batch.requests) if self.drafts_for(request)]
            self._features.follow(batch, wanted)
        super().follow(batch)

    def forget(self, request_id: str) -> None:
        if self._features is not None:
            self._features.forget(request_id)
        super().forget(request_id)


def build(options: PardOptions, context: PluginContext, *, name: str) -> PardProposer:
    """The proposer of a checkpoint. Raises ``ConfigError`` for one that is no PARD draft of this target."""
    draft = load_draft(options, context)
    try:
        token_id = mask_token(draft.model.config.to_dict(), options.pard_mask_token_id)
    except ValueError as error:
        raise ConfigError(f'speculative_config.model="{options.model}": {error}') from error
    features = load_features(draft, Path(draft.model.name_or_path), context)
    if features is not None and options.use_heterogeneous_vocab:
        raise ConfigError(
            "speculative_config.use_heterogeneous_vocab: this PARD-2 draft reads the target's states token by token, "
            "so it needs the target's own tokens. Remove the key."
        )
    return PardProposer(
        draft,
        context,
        mask_token_id=token_id,
        features=features,
        name=name,
        is_probabilistic=options.draft_sample_method == "probabilistic",
        needs_other_vocabulary=options.use_heterogeneous_vocab,
    )
