"""From a configuration to a draft model that runs beside the target: checks first, weights last."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specplug.config.checkpoint import read_checkpoint
from specplug.config.engine_terms import NO_TOKENIZER
from specplug.errors import ConfigError, ModelError
from specplug.methods import PluginContext
from specplug.models.loading import DEFAULT_MAX_MODEL_LEN, find_folder, load_target, load_tokenizer
from specplug.models.runner import TargetRunner
from specplug.models.target import Target
from specplug.proposers.draft_model import DraftModelOptions
from specplug.proposers.draft_vocabulary import check_same_vocabulary

__all__ = ["load_draft"]

_WHERE = "speculative_config.model"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")


@dataclass(frozen=True, slots=True)
class _DraftEngine:
    """The engine arguments of a draft: its own dtype, device and revision; the target's number of rows."""

    model: str
    tokenizer: Any
    dtype: str
    device: str
    kernels: str
    revision: str | None
    max_num_seqs: int
    max_model_len: int | None
    max_num_batched_tokens: int
    tokenizer_revision: str | None = None
    model_fields_set: Collection[str] = ()

    @property
    def skip_tokenizer_init(self) -> bool:
        return self.tokenizer is None


def load_draft(options: DraftModelOptions, context: PluginContext) -> Target:
    """The draft model with as many rows as the target.

    Raises ``ConfigError`` naming the setting for a folder that holds no such model, a vocabulary that is not the
    target's (unless ``use_heterogeneous_vocab``), a limit, dtype or device that cannot be.
    """
    if options.model is None:
        raise ConfigError(f"{_WHERE} is missing: name the folder of the draft model")
    try:
        folder = find_folder(options.model, options.revision)
        tokenizer = _tokenizer(options, folder, context)
        if not options.use_heterogeneous_vocab and tokenizer is not None:
            check_same_vocabulary(context.target.tokenizer, tokenizer)
        draft = load_target(_engine(options, folder, tokenizer, context))
    except ModelError as error:
        raise ConfigError(f'{_WHERE}="{options.model}" cannot be the draft: {error}') from error
    except ConfigError as error:
        raise ConfigError([f'{_WHERE}="{options.model}": {_own_keys(fault)}' for fault in error.faults]) from error
    if isinstance(draft, TargetRunner):
        draft.keep_for_drafts()
    if not options.use_heterogeneous_vocab and tokenizer is None:
        _check_rows(options, draft, context)
    return draft


def _engine(options: DraftModelOptions, folder: Path, tokenizer: Any, context: PluginContext) -> _DraftEngine:
    session = context.session
    return _DraftEngine(
        model=str(folder),
        tokenizer=tokenizer,
        dtype=options.draft_model_dtype,
        device=options.draft_model_device or session.device,
        kernels=options.draft_model_kernels,
        revision=options.revision,
        max_num_seqs=session.max_num_seqs,
        max_model_len=options.max_model_len or _default_length(folder, session.max_model_len),
        max_num_batched_tokens=max(context.target.max_query_tokens, session.num_speculative_tokens + 2),
    )


def _default_length(folder: Path, target_length: int) -> int | None:
    """The draft's own default, unless a longer target would be left without drafts for that reason alone."""
    checkpoint = read_checkpoint(folder, _WHERE)
    positions = checkpoint.max_positions if checkpoint else None
    if positions is None or target_length <= DEFAULT_MAX_MODEL_LEN:
        return None
    return min(positions, target_length)


def _tokenizer(options: DraftModelOptions, folder: Path, context: PluginContext) -> Any:
    """The draft's tokenizer; None where the target has none to compare with, or the folder holds none."""
    if context.target.tokenizer is None or not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return load_tokenizer(folder, options.revision)


def _check_rows(options: DraftModelOptions, draft: Target, context: PluginContext) -> None:
    if draft.vocab_size != context.target.vocab_size:
        lack = NO_TOKENIZER if context.target.tokenizer is None else "put the draft's tokenizer files into its folder"
        raise ConfigError(
            f'{_WHERE}="{options.model}": the draft has {draft.vocab_size} token ids, the target '
            f"{context.target.vocab_size}, and there are no two tokenizers to tell whether that is padding; {lack}"
        )


def _own_keys(fault: str) -> str:
    """A fault of engine arguments, told in the keys that a draft has for them."""
    return (
        fault.replace('device="', 'draft_model_device="')
        .replace('dtype="', 'draft_model_dtype="')
        .replace('kernels="', 'draft_model_kernels="')
    )
