"""Whether a draft model speaks the target's token ids: a matter of tokenizers, checked before the weights load."""

from __future__ import annotations

import logging
from typing import Any

from specplug.config.vocabularies import vocabulary_fault
from specplug.errors import ConfigError

__all__ = ["check_same_vocabulary"]

logger = logging.getLogger(__name__)


def check_same_vocabulary(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raise ``ConfigError`` for an id that means one token to the target and another to the draft.

    Ids that one side does not have are its padding: they are never drafted. Flags, such as which tokens are special
    and whether the draft's tokenizer adds a beginning of its own, do not matter: the draft reads the target's ids.
    """
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    fault = vocabulary_fault(target, draft)
    if fault is not None:
        raise ConfigError(fault)
    if target != draft:
        of_draft, of_target = set(draft.values()), set(target.values())
        logger.info(
            "the draft's tokenizer has %d ids, the target's %d; they agree on all %d that both have, and the rest is "
            "never drafted",
            len(of_draft),
            len(of_target),
            len(of_draft & of_target),
        )
