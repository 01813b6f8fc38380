"""Refuse at start the models that the loop cannot drive exactly: public attributes first, then a trial.

The trial runs three ragged rows of random tokens through the packed forward, with chunks and rollbacks, and compares
the logits with a plain forward of each row alone. It catches what attributes do not tell.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from specplug.errors import ConfigError, ModelError
from specplug.models.kernels import Decoder
from specplug.models.runner import TargetRunner, cache_argument, cannot_drive

__all__ = ["check_config", "check_model", "longest_exact_length", "probe_model"]

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_ATTENTION_BLOCKS = _ATTENTION_LAYERS | {"attention"}
_RECURRENT = "recurrent or linear-attention state ({kinds}), which cannot be rolled back when draft tokens are rejected"

_ROW_LENGTHS = (5, 11, 8)
_STEPS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((0, 5, 0), (0, 8, 0), (0, 0, 0)),
    ((5, 0, 2), (8, 3, 0), (0, 4, 2)),
    ((3, 2, 0), (11, 0, 0), (4, 4, 0)),
)
"""Per step and row: the length to roll back to, tokens of the row to append, junk to append after them."""
_MAX_TRIAL_LENGTH = 16


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """Largest error of a position relative to the spread of its logits, and the share of positions held to it."""

    error: float
    share: float


_TOLERANCES = {
    torch.float64: _Tolerance(1e-4, 1.0),
    torch.float32: _Tolerance(1e-3, 1.0),
    torch.float16: _Tolerance(3e-2, 0.75),
    torch.bfloat16: _Tolerance(1e-1, 0.75),
}
"""In half precision single positions stray (an expert routed otherwise); a wrong mask or state moves most of them."""


def check_config(config: Any) -> None:
    """Raise ModelError, naming the model type, for what a config already tells. Needs no weights."""
    reason = next(_refusals(config), None)
    if reason is not None:
        raise cannot_drive(config, reason)


def check_model(model: Any) -> None:
    """:func:`check_config`, and what the signature of ``forward`` tells."""
    check_config(model.config)
    if cache_argument(model) is None:
        raise cannot_drive(model.config, "its forward takes no key-value cache, so its state cannot be rolled back")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise cannot_drive(model.config, "its forward takes no position_ids (an alibi model?)")


def longest_exact_length(config: Any) -> int | None:
    """The most tokens up to which rotary frequencies do not depend on the other rows of a step; None: no limit.

    LongRoPE switches its frequencies by the longest row of the whole batch.
    """
    text_config = config.get_text_config(decoder=True)
    rope = getattr(text_config, "rope_parameters", None) or {}
    variants = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    limits = [v.get("original_max_position_embeddings") for v in variants if v.get("rope_type") == "longrope"]
    return min((int(limit) for limit in limits if limit), default=None)


def _refusals(config: Any) -> Iterator[str]:
    text_config = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model"
    yield from _layer_refusals(text_config)
    if _has_alibi(text_config):
        yield "its positions are alibi biases inside the attention"
    softcap = getattr(text_config, "attn_logit_softcapping", None)
    if softcap is not None:
        yield f"it soft-caps its attention logits (attn_logit_softcapping={softcap})"
    if getattr(text_config, "num_kv_shared_layers", 0):
        yield "some of its layers share the keys and values of others"
    if any(DynamicCache(config=config).is_linear):
        yield f"it keeps {_RECURRENT.format(kinds='per its cache')}"


def _layer_refusals(text_config: Any) -> Iterator[str]:
    kinds = set(getattr(text_config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if "chunked_attention" in kinds or getattr(text_config, "attention_chunk_size", None) is not None:
        yield "its attention is chunked"
    if kinds:
        yield f"it keeps {_RECURRENT.format(kinds=', '.join(sorted(kinds)))}"
    blocks = set(getattr(text_config, "layers_block_type", None) or ()) - _ATTENTION_BLOCKS
    if blocks:
        yield f"it keeps {_RECURRENT.format(kinds=', '.join(sorted(map(str, blocks))))}"


def _has_alibi(text_config: Any) -> bool:
    attention = getattr(text_config, "attn_config", None)
    nested = attention.get("alibi") if isinstance(attention, Mapping) else getattr(attention, "alibi", False)
    return bool(getattr(text_config, "alibi", False) or nested)


def probe_model(model: Any, change: Callable[[], Decoder | None] = lambda: None) -> Decoder | None:
    """Raise ModelError, naming the model type, unless the packed forward agrees with plain ones.

    Six small forwards, the plain ones before ``change``, which may change the model and return a decoder to be used
    for it; returns that. A model of fewer than 16 positions is not tried.
    """
    max_positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if max_positions is not None and max_positions < _MAX_TRIAL_LENGTH:
        return change()
    rows = _trial_rows(model)
    try:
        expected = _plain_logits(model, rows)
        decoder = change()
        found = _packed_logits(model, rows, decoder)
    except (ConfigError, ModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = f"a trial with packed tokens failed: {type(error).__name__}: {error}"
        raise cannot_drive(model.config, reason) from error
    _compare(model, expected, found)
    return decoder


def _trial_rows(model: Any) -> list[torch.Tensor]:
    """The three rows, each followed by junk to append and roll back."""
    generator = torch.Generator().manual_seed(0)
    num_ids = model.get_input_embeddings().weight.shape[0]
    rows = [torch.randint(num_ids, (length + 2,), generator=generator) for length in _ROW_LENGTHS]
    return [row.to(model.device) for row in rows]


def _plain_logits(model: Any, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """``[length, vocab]`` of each row alone, without a cache and with the model's own attention."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            return [
                model(input_ids=row[None, :length], use_cache=False).logits[0]
                for row, length in zip(rows, _ROW_LENGTHS, strict=True)
            ]
    finally:
        model.train(was_training)


@dataclass(frozen=True, slots=True)
class _Piece:
    """``logits`` ``[n, vocab]`` of a row's positions from ``start`` on."""

    row: int
    start: int
    logits: torch.Tensor


def _packed_logits(model: Any, rows: list[torch.Tensor], decoder: Decoder | None) -> list[_Piece]:
    """What a runner of three rows makes of ``_STEPS``, the junk left out."""
    runner = TargetRunner(
        model, max_num_seqs=len(rows), max_model_len=_MAX_TRIAL_LENGTH, max_query_tokens=8, decoder=decoder
    )
    try:
        for _ in rows:
            runner.cache.acquire()
        return [piece for step in _STEPS for piece in _packed_step(runner, rows, step)]
    finally:
        runner.close()


def _packed_step(
    runner: TargetRunner, rows: list[torch.Tensor], step: tuple[tuple[int, int, int], ...]
) -> Iterator[_Piece]:
    chunks = []
    for row, (start, num_real, num_junk) in enumerate(step):
        runner.rollback(row, start)
        junk = rows[row][_ROW_LENGTHS[row] :][:num_junk]
        chunks.append(torch.cat([rows[row][start : start + num_real], junk]))
    input_ids = torch.cat(chunks)
    every = torch.arange(len(input_ids), device=input_ids.device)
    logits = runner.forward(input_ids, [len(chunk) for chunk in chunks], every).logits
    offset = 0
    for row, (start, num_real, num_junk) in enumerate(step):
        yield _Piece(row, start, logits[offset : offset + num_real])
        offset += num_real + num_junk


def _compare(model: Any, expected: list[torch.Tensor], found: list[_Piece]) -> None:
    tolerance = _TOLERANCES.get(model.dtype, _TOLERANCES[torch.bfloat16])
    wanted = _centred([expected[p.row][p.start : p.start + len(p.logits)] for p in found])
    got = _centred([p.logits for p in found])
    errors = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    error = float(errors.nan_to_num(torch.inf).quantile(tolerance.share))
    if not error <= tolerance.error:
        raise cannot_drive(
            model.config,
            f"a trial with packed tokens, chunks and rollbacks gave other logits than a plain forward "
            f"(relative error {error:.2g}, at most {tolerance.error:g} for {model.dtype})",
        )


def _centred(logits: list[torch.Tensor]) -> torch.Tensor:
    """Float logits less each position's mean, which no probability depends on."""
    merged = torch.cat(logits).float()
    return merged - merged.mean(-1, keepdim=True)
