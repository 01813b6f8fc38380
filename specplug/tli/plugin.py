"""The plugin ``tli``: what ``use_heterogeneous_vocab`` activates."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from specplug.draft_space import DraftSpace
from specplug.errors import ModelError, SpecplugError
from specplug.hooks.markers import hookimpl
from specplug.methods import Capabilities, MethodSpec, PluginConfig, PluginContext

__all__ = ["TliPlugin", "open_space"]

SPECPLUG_API = (1, 0)

LEAST_SHARE = 0.1
"""Share of the draft's vocabulary below which a draft model is hardly worth its time."""

logger = logging.getLogger("specplug")


class TliPlugin:
    """Answers ``specplug_draft_space`` with the intersection of the two vocabularies."""

    @hookimpl
    def specplug_draft_space(self, target: Any, draft: Any) -> DraftSpace:
        try:
            return open_space(target, draft)
        except SpecplugError:
            raise
        except Exception as error:
            raise ModelError(
                f"use_heterogeneous_vocab: the tokenizers of target and draft cannot be compared: "
                f"{type(error).__name__}: {error}"
            ) from error


def open_space(target: Any, draft: Any) -> DraftSpace:
    """The map between two models, each with ``vocab_size`` and ``tokenizer``; the identity for equal vocabularies.

    Raises ``ConfigError`` for vocabularies that share no token, and for tokenizers that are absent or cannot be read.
    """
    from specplug.tli.mapping import is_same_vocabulary, match_vocabularies
    from specplug.tli.space import SameVocabulary, TliDraftSpace
    from specplug.tli.vocabulary import Vocabulary

    sides = {
        side: Vocabulary(
            model.tokenizer, model.vocab_size, eos_token_ids=getattr(model, "eos_token_ids", ()), side=side
        )
        for side, model in (("target", target), ("draft", draft))
    }
    if is_same_vocabulary(target.tokenizer, draft.tokenizer):
        logger.info(
            "use_heterogeneous_vocab: target and draft share all %d tokens, so it changes nothing",
            len(target.tokenizer),
        )
        return SameVocabulary.between(target, draft)
    shared = match_vocabularies(sides["target"], sides["draft"])
    _report(shared.num_shared, sides["target"].num_tokens, sides["draft"].num_tokens)
    return TliDraftSpace(sides["target"], sides["draft"], shared)


def _report(num_shared: int, num_target: int, num_draft: int) -> None:
    text = "use_heterogeneous_vocab: %d tokens are shared, %.1f %% of the draft's and %.1f %% of the target's%s"
    is_small = num_shared < LEAST_SHARE * num_draft
    advice = "; few drafts can be right, see `specplug doctor`" if is_small else ""
    shares = 100.0 * num_shared / num_draft, 100.0 * num_shared / num_target
    logger.log(logging.WARNING if is_small else logging.INFO, text, num_shared, *shares, advice)


def _build(config: PluginConfig, context: PluginContext) -> TliPlugin:
    return TliPlugin()


@hookimpl
def specplug_register() -> Sequence[MethodSpec]:
    return [
        MethodSpec(
            name="tli",
            kind="draft_space",
            factory=_build,
            capabilities=Capabilities(laws=frozenset({"one_hot", "indirect"})),
            summary="Lets a draft model with another tokenizer draft, through the tokens whose bytes both share.",
        )
    ]
