"""What ``generate`` of transformers has prepared, as sampling parameters and stop checks of our host."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specplug.errors import RequestError
from specplug.sampling_params import SamplingParams

__all__ = ["PreparedRow", "Settings", "read_settings"]

Criterion = Callable[[torch.Tensor, Any], torch.Tensor]

_MODES = {
    "beam_search": "num_beams",
    "beam_sample": "num_beams",
    "group_beam_search": "num_beam_groups",
    "constrained_beam_search": "constraints",
    "contrastive_search": "penalty_alpha",
    "dola_generation": "dola_layers",
    "assisted_generation": "prompt_lookup_num_tokens and assistant_model",
}
"""Modes of ``generate`` other than greedy search and sampling, and the keys that ask for them."""
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_PLAIN_CACHES = (None, "dynamic", "dynamic_full", "hybrid", "sliding_window")
_REFUSED_PROCESSORS = {
    "ClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "WatermarkLogitsProcessor": "watermarking_config",
}
"""They keep state between calls, or read more than one row's ids and scores."""
_WARPERS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}
_NORMALISATION = "LogitNormalization"
"""Changes no distribution."""


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """One row of the input: as it came, padding included, and the ids that are not padding."""

    number: int
    padded_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Settings:
    """``params``: one per row. ``criteria``: to be asked after every token. ``deadline``: of ``time.monotonic``."""

    params: list[SamplingParams] = field(default_factory=list)
    criteria: list[Criterion] = field(default_factory=list)
    deadline: float | None = None


def read_settings(
    generation_config: Any,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    rows: Sequence[PreparedRow],
    *,
    vocab_size: int,
    max_model_len: int,
) -> Settings:
    """Raises ``RequestError`` naming every key that cannot act here.

    Sampled rows get seeds from torch's global generator, so that ``torch.manual_seed`` decides them.
    """
    stops = _Stops(stopping_criteria)
    faults = [*_faults(generation_config, logits_processor), *stops.faults(rows, max_model_len)]
    if faults:
        raise RequestError("specplug.adapters.transformers.generate: " + "; ".join(faults))
    is_sampled = bool(generation_config.do_sample)
    seeds = torch.randint(2**62, (len(rows),)).tolist() if is_sampled else [0] * len(rows)
    settings = Settings(criteria=stops.others, deadline=stops.deadline)
    for row, seed in zip(rows, seeds, strict=True):
        common = {
            "seed": seed,
            "max_tokens": stops.max_length - len(row.padded_ids),
            "ignore_eos": True,  # this call's end-of-sequence ids, not the model's
            "stop_token_ids": [token_id for token_id in stops.eos_token_ids if 0 <= token_id < vocab_size],
            "detokenize": False,
        }
        settings.params.append(_params(common, logits_processor, row, is_sampled=is_sampled))
    return settings


# --- what cannot act --------------------------------------------------------------------------------------------


def _faults(config: Any, processors: Sequence[Any]) -> list[str]:
    faults = []
    mode = str(getattr(config.get_generation_mode(), "value", "sample"))
    if mode in _MODES:
        faults.append(
            f"{_MODES[mode]} asks for {mode.replace('_', ' ')}; speculation is for greedy search and sampling"
        )
    if config.return_dict_in_generate:
        asked = [name for name in _OUTPUTS if getattr(config, name, None)]
        faults += [f"{name}=True cannot be given: a step computes several tokens; leave it out" for name in asked]
    cache = getattr(config, "cache_implementation", None)
    if cache not in _PLAIN_CACHES:
        faults.append(
            f'cache_implementation="{cache}" cannot act: the cache is specplug\'s own; leave it out, or "dynamic"'
        )
    names = dict.fromkeys(_REFUSED_PROCESSORS.get(type(each).__name__) for each in processors)
    faults += [f"{name} is not supported with speculation; leave it out" for name in names if name]
    return faults


class _Stops:
    """The stopping criteria, sorted by what can be said in parameters and what must be asked."""

    def __init__(self, criteria: Sequence[Any]) -> None:
        self.eos_token_ids: set[int] = set()
        self.others: list[Criterion] = []
        self.deadline: float | None = None
        lengths = []
        for each in criteria:
            name = type(each).__name__
            if name == "MaxLengthCriteria":
                lengths.append(int(each.max_length))
            elif name == "EosTokenCriteria":
                self.eos_token_ids.update(each.eos_token_id.reshape(-1).tolist())
            elif name == "MaxTimeCriteria":
                left = each.initial_timestamp + each.max_time - time.time()
                self.deadline = time.monotonic() + left
            else:
                self.others.append(each)
        self.max_length = min(lengths, default=0)

    def faults(self, rows: Sequence[PreparedRow], max_model_len: int) -> list[str]:
        longest = max(len(row.token_ids) + self.max_length - len(row.padded_ids) for row in rows)
        if min(self.max_length - len(row.padded_ids) for row in rows) < 1:
            return ["max_new_tokens (or max_length) leaves no room for a new token; raise it"]
        if longest <= max_model_len:
            return []
        return [
            f"max_new_tokens (or max_length) allows {longest} tokens of prompt and output, and the session has room "
            f"for {max_model_len}; lower it, or raise spec_engine={{'max_model_len': ...}} if the model allows"
        ]


# --- sampling parameters ----------------------------------------------------------------------------------------


def _params(common: dict[str, Any], processors: Sequence[Any], row: PreparedRow, *, is_sampled: bool) -> SamplingParams:
    """The processors as parameters where they say the same, else as they are, asked about one position at a time."""
    sampling: dict[str, Any] = {"temperature": 1.0 if is_sampled else 0.0}
    said = _in_parameters(processors, row, common["max_tokens"])
    if said is not None:
        try:
            return SamplingParams(**common, **(sampling | said if is_sampled else said | sampling))
        except RequestError:  # outside of our ranges
            pass
    wrapped = [_RowProcessor(each, row) for each in processors if type(each).__name__ != _NORMALISATION]
    return SamplingParams(**common, **sampling, logits_processors=wrapped)


def _in_parameters(processors: Sequence[Any], row: PreparedRow, max_tokens: int) -> dict[str, Any] | None:
    """Sampling parameters that do exactly what the processors do to this row; None where there are none."""
    found: dict[str, Any] = {}
    for each in processors:
        said = _in_one_parameter(each, row, is_first=not found)
        if said is None or found.keys() & said.keys():
            return None
        found |= said
    if found.get("min_p") and "top_p" in found:  # min-p comes last in transformers, before top-p in ours
        return None
    if "min_tokens" in found:
        found["min_tokens"] = min(found["min_tokens"], max_tokens)
    return found


def _in_one_parameter(processor: Any, row: PreparedRow, *, is_first: bool) -> dict[str, Any] | None:
    name = type(processor).__name__
    if name == _NORMALISATION:
        return {}
    if name in _WARPERS:
        is_plain = getattr(processor, "filter_value", -torch.inf) == -torch.inf
        return {_WARPERS[name]: getattr(processor, _WARPERS[name])} if is_plain else None
    if name == "RepetitionPenaltyLogitsProcessor":
        ignored = getattr(processor, "prompt_ignore_length", None)
        is_whole = len(row.padded_ids) == len(row.token_ids) and not isinstance(ignored, int)
        return {"repetition_penalty": processor.penalty} if is_first and is_whole else None
    if name == "MinNewTokensLengthLogitsProcessor":
        return {"min_tokens": processor.min_new_tokens}
    if name == "MinLengthLogitsProcessor":
        return {"min_tokens": max(0, processor.min_length - len(row.padded_ids))}
    return None


class _RowProcessor:
    """A processor of transformers for one row: it sees the row as in plain ``generate``, padding included."""

    def __init__(self, processor: Any, row: PreparedRow) -> None:
        self._processor = _for_row(processor, row.number)
        self._padded_ids = list(row.padded_ids)
        self.__name__ = type(processor).__name__

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        ids = torch.tensor([[*self._padded_ids, *output_ids]], device=logits.device)
        processed: torch.Tensor = self._processor(ids, logits[None])
        return processed[0]


def _for_row(processor: Any, number: int) -> Any:
    """The processor without what it holds for other rows."""
    name = type(processor).__name__
    if name == "RepetitionPenaltyLogitsProcessor" and isinstance(
        lengths := getattr(processor, "prompt_ignore_length", None), torch.Tensor
    ):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = lengths[number : number + 1]
    if name == "PrefixConstrainedLogitsProcessor":
        allowed, per_prompt = processor._prefix_allowed_tokens_fn, processor._num_beams
        processor = copy.copy(processor)
        processor._num_beams = 1
        processor._prefix_allowed_tokens_fn = lambda _batch_id, ids: allowed(number // per_prompt, ids)
    return processor
