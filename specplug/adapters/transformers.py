"""The transformers door: our decoding loop behind ``model.generate``.

::

    model.generate(**inputs, custom_generate=generate, spec={"method": "suffix", "num_speculative_tokens": 16})

``docs/doors/transformers.md`` is the page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specplug.adapters.hf_sessions import Call, session_of, sessions_of
from specplug.adapters.hf_settings import PreparedRow, Settings, read_settings
from specplug.errors import RequestError
from specplug.host.llm import LLM

__all__ = ["Streamer", "generate", "release", "sessions"]

_DOOR = "specplug.adapters.transformers.generate"
_PREPARED = (
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
)
"""Model arguments that ``generate`` makes itself."""


@runtime_checkable
class Streamer(Protocol):
    """What transformers' streamers offer."""

    def put(self, value: torch.Tensor) -> None:
        """The prompt ``[1, num_tokens]`` first, then new ids ``[num_tokens]``, one or more at a time."""

    def end(self) -> None:
        """Nothing more comes."""


TokenCallback: TypeAlias = Callable[[int, list[int]], object]
"""Called with a row's number and its new ids."""


@torch.no_grad()
def generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: Any,
    spec: Mapping[str, Any] | str | None = None,
    spec_plugins: Sequence[Mapping[str, Any] | str] = (),
    spec_streamer: Streamer | TokenCallback | None = None,
    spec_tokenizer: Any = None,
    spec_engine: Mapping[str, Any] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """To be passed as ``custom_generate`` of ``model.generate``, which fills the arguments up to ``generation_config``.

    ``spec``: the ``speculative_config``; ``spec_plugins``: further plugins; ``spec_streamer``: a streamer of
    transformers (one row only) or a callable ``(row, token_ids)``; ``spec_tokenizer``: for methods that need one;
    ``spec_engine``: further arguments of ``specplug.LLM``, such as ``max_model_len``. ``streamer``, ``tokenizer`` and
    ``assistant_model`` never arrive here: transformers drops them.

    Returns what ``model.generate`` returns: ``[batch, num_tokens]`` padded at the end, or a
    ``GenerateDecoderOnlyOutput`` with ``sequences`` and, beside its fields, ``spec_decode_metrics``, one record a row.
    Raises ``RequestError`` naming what cannot act, and for a call from inside another on the same model;
    ``ConfigError`` and ``PluginError`` for ``spec``, ``ModelError`` for a model that cannot be driven.
    """
    if spec is None:
        raise RequestError(f'{_DOOR} needs spec={{...}}; write spec={{"method": "ngram", "num_speculative_tokens": 5}}')
    rows = _read_rows(input_ids, model_kwargs)
    kept = sessions_of(model)
    with kept.held():
        session = session_of(
            kept,
            model,
            spec,
            plugins=spec_plugins,
            tokenizer=spec_tokenizer,
            engine=spec_engine or {},
            num_rows=len(rows),
        )
        settings = read_settings(
            generation_config,
            logits_processor,
            stopping_criteria,
            rows,
            vocab_size=session.llm.vocab_size,
            max_model_len=session.llm.max_model_len,
        )
        run = _Run(rows, settings, _delivery(spec_streamer, input_ids))
        with session.running([row.token_ids for row in rows], settings.params) as call:
            run.drive(call)
    if isinstance(spec_streamer, Streamer):
        spec_streamer.end()
    sequences: Any = torch.cat([input_ids, run.output_ids(generation_config, input_ids.device)], dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences  # type: ignore[no-any-return]
    output: Any = GenerateDecoderOnlyOutput(sequences=sequences)
    output.spec_decode_metrics = run.metrics
    return output  # type: ignore[no-any-return]


def sessions(model: Any) -> list[LLM]:
    """The sessions kept with ``model``, the last used last: their ``get_metrics()`` tell how speculation does."""
    return [session.llm for session in list(sessions_of(model).values())]


def release(model: Any) -> None:
    """Close the sessions kept with ``model`` and free their memory, once no call runs.

    Raises ``RequestError`` from inside a call.
    """
    kept = sessions_of(model)
    with kept.held():
        kept.close()


# --- what comes in ----------------------------------------------------------------------------------------------


def _read_rows(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> list[PreparedRow]:
    faults = [
        f"the model argument {name} is not supported with speculation; leave it out"
        for name, value in model_kwargs.items()
        if name not in _PREPARED and value is not None
    ]
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length():
        faults.append("the given cache holds tokens already; the cache is specplug's own: pass the whole text instead")
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if not faults and not input_ids.numel():
        faults.append(f"input_ids {list(input_ids.shape)} holds no token; give every row one, such as bos_token_id")
    if not faults:
        faults += _mask_faults(mask, model_kwargs.get("position_ids"))
    if faults:
        raise RequestError(f"{_DOOR}: " + "; ".join(faults))
    pairs = zip(input_ids.tolist(), mask.bool().tolist(), strict=True)
    return [
        PreparedRow(number, tuple(ids), tuple(token_id for token_id, counts in zip(ids, kept, strict=True) if counts))
        for number, (ids, kept) in enumerate(pairs)
    ]


def _mask_faults(mask: torch.Tensor, position_ids: torch.Tensor | None) -> list[str]:
    if not mask[:, -1].all():
        return ['attention_mask masks the end of a row; pad on the left: tokenizer(..., padding_side="left")']
    if position_ids is not None and position_ids.shape == mask.shape:
        expected = mask.long().cumsum(-1) - 1
        if not (position_ids.to(mask.device)[mask.bool()] == expected[mask.bool()]).all():
            return ["position_ids that do not count the unmasked tokens are not supported; leave them out"]
    return []


# --- the run ----------------------------------------------------------------------------------------------------


def _delivery(streamer: Streamer | TokenCallback | None, input_ids: torch.Tensor) -> TokenCallback:
    if streamer is None:
        return lambda row, ids: None
    if not isinstance(streamer, Streamer):
        return streamer
    if len(input_ids) > 1:
        raise RequestError(
            f"{_DOOR}: a streamer takes one row, and there are {len(input_ids)}; pass spec_streamer=a callable of "
            "(row, token_ids)"
        )
    streamer.put(input_ids.cpu())
    return lambda row, ids: streamer.put(torch.tensor(ids))


class _Run:
    """The rows of one call, from their prompts to their ends."""

    def __init__(self, rows: Sequence[PreparedRow], settings: Settings, deliver: TokenCallback) -> None:
        self._rows = rows
        self._settings = settings
        self._deliver = deliver
        self._output_ids: list[list[int]] = [[] for _ in rows]
        self.metrics: list[Any] = [None] * len(rows)

    def drive(self, call: Call) -> None:
        """Step until every row has ended, by itself, by a criterion, or by the time."""
        stopped: set[int] = set()
        while call.is_running:
            for row, output in call.step():
                sample = output.outputs[0]
                if sample.finish_reason == "error":
                    raise RequestError(f"{_DOOR}: row {row}: {sample.error}")
                self.metrics[row] = sample.spec_decode_metrics
                if row not in stopped and self._take(row, sample.token_ids) and not output.finished:
                    stopped.add(row)
                    call.stop(row)
            deadline = self._settings.deadline
            if deadline is not None and time.monotonic() > deadline:
                return

    def _take(self, row: int, new_ids: list[int]) -> bool:
        """Take over what counts of a row's new ids; whether a criterion ends it there."""
        kept, is_stopped = self._cut(row, new_ids)
        self._output_ids[row] += kept
        if kept:
            self._deliver(row, kept)
        return is_stopped

    def _cut(self, row: int, new_ids: list[int]) -> tuple[list[int], bool]:
        """The new ids up to the first after which a criterion is met, and whether one is."""
        if not self._settings.criteria:
            return new_ids, False
        text = torch.tensor([[*self._rows[row].padded_ids, *self._output_ids[row], *new_ids]])
        for number in range(1, len(new_ids) + 1):
            seen = text[:, : text.shape[1] - len(new_ids) + number]
            if any(bool(torch.as_tensor(each(seen, None)).all()) for each in self._settings.criteria):
                return new_ids[:number], True
        return new_ids, False

    def output_ids(self, generation_config: Any, device: torch.device) -> torch.Tensor:
        """``[batch, num_tokens]``, short rows padded."""
        lengths = [len(ids) for ids in self._output_ids]
        pad = getattr(generation_config, "_pad_token_tensor", None)
        pad = generation_config.pad_token_id if pad is None else int(pad)
        if pad is None and min(lengths) < max(lengths):
            raise RequestError(f"{_DOOR}: rows end at different lengths and there is no pad_token_id; give one")
        padded = [[*ids, *[pad] * (max(lengths) - len(ids))] for ids in self._output_ids]
        return torch.tensor(padded, dtype=torch.long, device=device)
