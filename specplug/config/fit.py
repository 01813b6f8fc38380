"""Whether a draft and its target fit each other, as far as their folders tell before any weights load.

Only what certainly cannot run is a fault. What the folders leave open is settled when both are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from specplug.config.checkpoint import Checkpoint, read_checkpoint
from specplug.config.resolution import Resolution
from specplug.config.vocabularies import read_vocabulary, vocabulary_fault
from specplug.errors import ConfigError

__all__ = ["check_fit", "target_checkpoint"]

_STATE_WIDTHS = {
    "eagle": ("hidden_size",),
    "eagle3": ("target_hidden_size", "hidden_size"),
    "mlp_speculator": ("emb_dim",),
    "medusa": ("hidden_size",),
}
"""Head's method -> the keys of its config, the first that is there, for the width of the target's states."""
_PARTIAL_VOCABULARIES = ("medusa",)
"""Heads that need not know all of the target's ids."""


def target_checkpoint(work: Resolution) -> Checkpoint | None:
    """The target's, where it is a local folder that can be read."""
    try:
        return read_checkpoint(work.engine.model, "model")
    except ConfigError:
        return None  # the host reports a model that it cannot read when it loads it


def check_fit(work: Resolution) -> None:
    """Compare the two config files and, only where those differ in the number of ids, the tokenizers' files."""
    draft, target = work.checkpoint, target_checkpoint(work)
    if draft is None or target is None or work.get("model") is None:
        return
    if work.method in _STATE_WIDTHS:
        faults = list(_head_faults(work, draft, target))
        if faults:
            work.fault(
                "model",
                f'="{draft.folder}" does not fit the target "{target.folder}": {"; ".join(faults)}. A head serves the '
                "one model that it was trained for: point model to a head for this target, or run the head's own.",
            )
    elif work.serving in ("draft_model", "pard") and not work.get("use_heterogeneous_vocab"):
        fault = _draft_fault(work, draft, target)
        if fault is not None:
            work.fault("model", f'="{draft.folder}": {fault}')


def _head_faults(work: Resolution, head: Checkpoint, target: Checkpoint) -> Iterator[str]:
    width, hidden_size = head.size(*_STATE_WIDTHS[work.method or ""]), target.size("hidden_size")
    if width is not None and hidden_size is not None and width != hidden_size:
        yield f"it reads states of width {width}, the target's are {hidden_size} wide"
    layer, num_layers = head.last_layer_read, target.size("num_hidden_layers")
    if layer is not None and num_layers is not None and layer > num_layers:
        yield f"it reads layer {layer} (eagle_aux_hidden_state_layer_ids), the target has layers 0 to {num_layers}"
    known, num_rows = head.size("vocab_size"), target.size("vocab_size")
    if work.method in _PARTIAL_VOCABULARIES or known is None or num_rows is None or known >= num_rows:
        return
    num_ids = _num_token_ids(work, target, num_rows)
    if num_ids is not None and known < num_ids:
        yield f"it knows {known} token ids, the target has {num_ids}"


def _num_token_ids(work: Resolution, target: Checkpoint, num_rows: int) -> int | None:
    """Ids that can come: rows of the target's output beyond its tokenizer are padding. None where that is not told."""
    if work.engine.skip_tokenizer_init:
        return num_rows
    vocabulary = _target_vocabulary(work, target)
    return None if vocabulary is None else min(num_rows, max(vocabulary.values(), default=-1) + 1)


def _draft_fault(work: Resolution, draft: Checkpoint, target: Checkpoint) -> str | None:
    if draft.size("vocab_size") == target.size("vocab_size") or work.engine.skip_tokenizer_init:
        return None
    of_target, of_draft = _target_vocabulary(work, target), read_vocabulary(draft.folder)
    return None if of_target is None or of_draft is None else vocabulary_fault(of_target, of_draft)


def _target_vocabulary(work: Resolution, target: Checkpoint) -> dict[str, int] | None:
    tokenizer = work.engine.tokenizer
    if tokenizer is None:
        return read_vocabulary(target.folder)
    return read_vocabulary(Path(tokenizer)) if isinstance(tokenizer, str | os.PathLike) else None
