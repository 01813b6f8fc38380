"""The keys of ``pard``, and what a PARD checkpoint's ``config.json`` must say."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from specplug.proposers.draft_model import DraftModelOptions

__all__ = ["PardOptions", "mask_token"]

logger = logging.getLogger(__name__)

_KEY = "pard_mask_token_id"


class PardOptions(DraftModelOptions):
    """``draft_model``'s keys and the mask token."""

    parallel_drafting: bool = Field(
        default=True, description="What makes a draft model a PARD draft; always true here."
    )
    pard_mask_token_id: int | None = Field(
        default=None, ge=0, description="The token that asks for a draft token; absent: from the checkpoint's config."
    )

    @model_validator(mode="after")
    def _checkpoint_names_a_mask(self) -> PardOptions:
        """Before any weights load, where ``model`` is a local folder."""
        file = Path(self.model or "").expanduser() / "config.json"
        if self.model is not None and file.is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
            mask_token(config, self.pard_mask_token_id)
        return self


def mask_token(config: Mapping[str, Any], given: int | None = None) -> int:
    """The mask token's id: ``given``, else where vLLM looks for it in the draft's config.

    Raises ``ValueError`` for a config that names none, or one outside the vocabulary; logs a warning for an id that
    means something else too.
    """
    found = ((_KEY, given), *_named(config))
    name, token_id = next(((key, value) for key, value in found if value is not None), ("", None))
    if token_id is None:
        raise ValueError(
            "the draft's config.json names no mask token (pard_token, mask_token_id, ...), so this is no PARD "
            f"checkpoint; take one, leave out parallel_drafting, or write {_KEY} if you know the id"
        )
    text_config = config.get("text_config", config)
    vocab_size = text_config.get("vocab_size")
    if not isinstance(token_id, int) or isinstance(token_id, bool):
        raise ValueError(
            f"{name}={json.dumps(token_id)} in the draft's config.json is no token id; write the mask token's number, "
            "without quotes"
        )
    if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
        where = "correct the key" if name == _KEY else "the config.json is damaged"
        raise ValueError(f"{name}={token_id} is outside the draft's {vocab_size} ids; {where}")
    for other in ("eos_token_id", "pad_token_id", "bos_token_id"):
        ids = text_config.get(other)
        if token_id == ids or (isinstance(ids, list) and token_id in ids):
            logger.warning(
                "%s=%d of the PARD draft is its %s too; drafts are usually poor then: the mask is a token of its own",
                name,
                token_id,
                other,
            )
    return token_id


def _named(config: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The places in vLLM's order."""
    nested = config.get("dflash_config")
    inner = nested.get("mask_token_id") if isinstance(nested, Mapping) else None
    keys = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
    return (("dflash_config.mask_token_id", inner), *((key, config.get(key)) for key in keys))
