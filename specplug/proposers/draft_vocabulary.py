"""Whether a draft model speaks the target's token ids: a matter of tokenizers, checked before the weights load."""

from __future__ import annotations

import json
import logging
from typing import Any

from specplug.errors import ConfigError

__all__ = ["check_same_vocabulary"]

logger = logging.getLogger(__name__)


def check_same_vocabulary(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raise ``ConfigError`` for an id that means one token to the target and another to the draft.

    Ids that one side does not have are its padding: they are never drafted. Flags, such as which tokens are special
    and whether the draft's tokenizer adds a beginning of its own, do not matter: the draft reads the target's ids.
    """
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if target == draft:
        return
    target_tokens = {token_id: token for token, token_id in target.items()}
    draft_tokens = {token_id: token for token, token_id in draft.items()}
    shared = target_tokens.keys() & draft_tokens.keys()
    different = min((each for each in shared if target_tokens[each] != draft_tokens[each]), default=None)
    if different is None:
        logger.info(
            "the draft's tokenizer has %d ids, the target's %d; they agree on all %d that both have, and the rest is "
            "never drafted",
            len(draft_tokens),
            len(target_tokens),
            len(shared),
        )
        return
    raise ConfigError(
        f"draft and target have different vocabularies: the first difference is at id {different}, "
        f"{_quoted(target_tokens[different])} in the target and {_quoted(draft_tokens[different])} in the draft. Set "
        "speculative_config.use_heterogeneous_vocab=true, or use a draft of the target's family."
    )


def _quoted(token: str) -> str:
    return json.dumps(token, ensure_ascii=False)
