"""Attention over packed tokens: the only place of a forward that sees rows.

Registered with transformers' public ``AttentionInterface`` under the name ``specplug``. A call that carries no step
plan (a plain ``model.generate`` on the same object) is handed to transformers' ``sdpa``, masks included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specplug.errors import ModelError
from specplug.models.step_plan import LayerKind, Segment, StepPlan

__all__ = ["ATTENTION_NAME", "attend", "borrow_attention", "dummy_mask", "packed_attention", "return_attention"]

ATTENTION_NAME = "specplug"
STEP_KEYWORD = "specplug_step"

_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords that models pass down and that do not change the result."""
_KNOWN_EFFECTS = {
    "s_aux": "attention sinks",
    "softcap": "a soft cap on its logits",
    "position_bias": "a position bias",
}
_MAX_FOLDED_WIDTH = 64
"""Up to this many query tokens a row, the query heads of a key head are folded into the query axis: no key is
repeated, and the products are matrix by matrix. On the CPU a wider chunk needs no folding and saves its mask."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    specplug_step: StepPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend the packed ``query`` ``[1, heads, T, dim]`` over the cache's buffers ``key`` and ``value``.

    ``key``, ``value``: ``[max_num_seqs, num_kv_heads, capacity, dim]``, as :class:`RaggedLayer.update` returned them.
    Returns ``[1, T, heads, dim]`` and None. Raises ModelError for a keyword that would change the result.
    """
    if specplug_step is None:
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output: tuple[torch.Tensor, torch.Tensor | None] = plain(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            dropout=dropout,
            is_causal=is_causal,
            sliding_window=sliding_window,
            **kwargs,
        )
        return output
    layer = specplug_step.take_layer()
    if layer is None:
        raise ModelError("a layer attends without handing its keys and values to the cache")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse_unhandled(kwargs, dropout, causal)
    _check_window(layer.kind.window, sliding_window, attention_mask)
    return attend(specplug_step, layer.kind, query[0].transpose(0, 1), key, value, scaling)[None], None


def attend(
    step: StepPlan,
    kind: LayerKind,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of a layer of this ``kind``: ``query`` ``[T, heads, dim]`` over the cache's buffers, same shape out."""
    packed = query.to(key.dtype)
    outputs = [_attend(segment, packed, key, value, scaling) for segment in step.kinds[kind].segments]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(query.dtype)


def _refuse_unhandled(kwargs: dict[str, Any], dropout: float, is_causal: bool) -> None:
    if not kwargs.keys() <= _WITHOUT_EFFECT:
        for name in sorted(kwargs.keys() - _WITHOUT_EFFECT):
            if kwargs[name] is not None and kwargs[name] is not False:
                what = _KNOWN_EFFECTS.get(name, "something specplug does not handle")
                raise ModelError(f'its attention applies {what} (keyword "{name}")')
    if dropout:
        raise ModelError("it is in training mode with attention dropout; call model.eval()")
    if not is_causal:
        raise ModelError("its attention is not causal")


def dummy_mask(window: int | None, device: torch.device) -> torch.Tensor:
    """A 4-D mask that models pass through untouched, ``[1, 1, 1, 1]`` or, for a sliding window, ``[1, 1, 1, 2]``.

    It masks nothing: its shape tells the attention function which of its masks the model chose for a layer.
    """
    return torch.ones(1, 1, 1, 1 if window is None else 2, dtype=torch.bool, device=device)


def _check_window(window: int | None, sliding_window: int | None, attention_mask: torch.Tensor | None) -> None:
    """The layer's cache and the model must mean the same window; silently they would differ only past it."""
    if attention_mask is not None and attention_mask.shape[-1] <= 2:
        model_slides = attention_mask.shape[-1] == 2
        if model_slides != (window is not None):
            raise ModelError("its layers mix full and sliding-window attention in a way its config does not tell")
    if sliding_window is not None and window is not None and sliding_window != window:
        raise ModelError(f"a layer attends over {sliding_window} tokens where its config says {window}")


def _attend(
    segment: Segment, packed: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """``[token_stop - token_start, heads, dim]`` of one segment."""
    num_rows, width, num_kv_heads = segment.num_rows, segment.width, key.shape[1]
    num_groups = packed.shape[1] // num_kv_heads
    rows, slots = slice(segment.row_start, segment.row_stop), slice(segment.span)
    keys, values = key[rows, :, slots], value[rows, :, slots]
    if segment.gather is None:
        queries = packed[segment.token_start : segment.token_stop]
    else:
        queries = packed.index_select(0, segment.gather)
    if width == 1:
        folded = queries.reshape(num_rows, num_kv_heads, num_groups, -1)
        mask = segment.mask(num_groups, packed.dtype)
        attended = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
    elif num_groups == 1 or width <= _MAX_FOLDED_WIDTH or packed.device.type != "cpu":
        folded = queries.reshape(num_rows, width, num_kv_heads, num_groups, -1).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(num_rows, num_kv_heads, num_groups * width, -1)
        mask = segment.mask(num_groups, packed.dtype)
        attended = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
        attended = attended.reshape(num_rows, num_kv_heads, num_groups, width, -1).permute(0, 3, 1, 2, 4)
    else:
        unfolded = queries.reshape(num_rows, width, packed.shape[1], -1).transpose(1, 2)
        mask = segment.mask(1, packed.dtype)
        attended = scaled_dot_product_attention(
            unfolded, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
        ).transpose(1, 2)
    output = attended.reshape(num_rows * width, packed.shape[1], -1)
    return output if segment.scatter is None else output.index_select(0, segment.scatter)


AttentionInterface.register(ATTENTION_NAME, packed_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


@dataclass(slots=True)
class _Loan:
    """What a borrowed model was like, and how many have borrowed it."""

    attention: str
    training: bool
    count: int = 0


_loans: WeakKeyDictionary[torch.nn.Module, _Loan] = WeakKeyDictionary()


def borrow_attention(model: Any) -> None:
    """Switch ``model`` to :func:`packed_attention` and to eval mode until :func:`return_attention`; nests.

    Raises ModelError where the model's class does not take another attention function.
    """
    loan = _loans.get(model) or _Loan(model.config._attn_implementation, model.training)
    if loan.count == 0:
        model.set_attn_implementation(ATTENTION_NAME)
        if model.config._attn_implementation != ATTENTION_NAME:
            raise ModelError("its attention does not go through transformers' AttentionInterface")
        model.eval()
    loan.count += 1
    _loans[model] = loan


def return_attention(model: Any) -> None:
    """Undo one :func:`borrow_attention`; the last one restores the model as it was."""
    loan = _loans[model]
    loan.count -= 1
    if loan.count == 0:
        del _loans[model]
        model.set_attn_implementation(loan.attention)
        model.train(loan.training)
