"""From a prompt and sampling parameters to a request, or an error that says why not."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, get_args

import numpy as np

from specplug.errors import RequestError
from specplug.host.features import RequestFeatures
from specplug.host.grammar import GrammarCompiler
from specplug.host.logprobs import TokenTexts
from specplug.host.outputs import OutputKind
from specplug.host.processing import build_processing
from specplug.host.reasoning import ReasoningSection, spell_reasoning_end
from specplug.host.request_state import RequestState
from specplug.host.samples import sample_ids
from specplug.models.target import Target
from specplug.sampling_params import MAX_SEED, SamplingParams
from specplug.types import Request, TokenIds

__all__ = ["Intake", "Prompt", "is_single"]

Prompt: TypeAlias = str | Mapping[str, Any] | Sequence[int]
"""Text, token ids (an array or a tensor too), or ``{"prompt": text}`` / ``{"prompt_token_ids": [...]}``, the mappings
with a ``cache_salt``."""


_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_FORMS = "write a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': [...]}"


class Intake:
    """Checks what comes in, before it can touch the session.

    ``method_names``: what a request's own ``method`` may name. ``seed``: of the generator that gives a seed to
    requests without one; None for a fresh one each time.
    """

    def __init__(self, target: Target, *, method_names: Sequence[str], seed: int | None) -> None:
        self._target = target
        self._method_names = tuple(method_names)
        self._seeds = random.Random(seed)
        self._grammars = GrammarCompiler(target.tokenizer, target.vocab_size)
        self._texts = TokenTexts(target.tokenizer)

    def prepare(
        self, request_id: str, prompt: Prompt, params: SamplingParams, output_kind: OutputKind
    ) -> list[RequestState]:
        """The state of a request that can be served, one per sample. Raises ``RequestError`` for one that cannot.

        Sample i has the request's seed plus i, modulo 2**64.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={_shown(request_id)} is a {type(request_id).__name__}; it must be text")
        if output_kind not in get_args(OutputKind):
            raise RequestError(f"output_kind={output_kind!r} must be one of {', '.join(get_args(OutputKind))}")
        speculation = self._check_params(params)
        if params.n > 1 and output_kind == "delta":
            raise RequestError(f"n={params.n} must be 1 with a stream, which carries one sample; use generate")
        text, token_ids, cache_salt = self._read_prompt(prompt)
        room = self._room(len(token_ids))
        seed = self._seeds.randint(0, MAX_SEED) if params.seed is None else params.seed
        states = []
        for index, sample_id in enumerate(sample_ids(request_id, params.n)):
            request = Request(
                request_id=sample_id,
                prompt_token_ids=TokenIds(np.asarray(token_ids, dtype=np.int32)),
                sampling_params=params,
                seed=(seed + index) % (MAX_SEED + 1),
                cache_salt=cache_salt,
                speculation=speculation,
            )
            state = RequestState(
                request,
                prompt=text,
                max_output_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                eos_token_ids=self._target.eos_token_ids,
                tokenizer=self._target.tokenizer,
                output_kind=output_kind,
                features=self._features(params),
                sample_index=index,
            )
            states.append(state)
        return states

    def _features(self, params: SamplingParams) -> RequestFeatures:
        target = self._target
        eos_token_ids = frozenset() if params.ignore_eos else target.eos_token_ids
        reasoning = grammar = None
        if params.reasoning_end is not None:
            end_ids = spell_reasoning_end(params.reasoning_end, target.tokenizer, target.vocab_size)
            reasoning = ReasoningSection(end_ids)
        if params.structured_outputs is not None:
            end_of_text = target.eos_token_ids or params.stop_token_ids or ()
            grammar = self._grammars.compile(params.structured_outputs, end_of_text, reasoning)
        return RequestFeatures(
            processing=build_processing(
                params,
                vocab_size=target.vocab_size,
                tokenizer=target.tokenizer,
                ending_ids=eos_token_ids.union(params.stop_token_ids or ()),
                device=target.device,
            ),
            grammar=grammar,
            reasoning=reasoning,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            texts=self._texts if params.detokenize else None,
        )

    def _check_params(self, params: object) -> Mapping[str, Any]:
        """The request's own switches, which are checked with the rest."""
        if isinstance(params, Mapping):
            written = ", ".join(f"{key}={value!r}" for key, value in params.items())
            raise RequestError(f"sampling_params is a mapping; write SamplingParams({written})")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is a {type(params).__name__}; give a SamplingParams")
        if params.stop_strings and self._target.tokenizer is None:
            raise RequestError(f"stop={params.stop!r} needs a tokenizer, and the target has none; use stop_token_ids")
        for token_id in params.stop_token_ids or ():
            if token_id >= self._target.vocab_size:
                last = self._target.vocab_size - 1
                raise RequestError(f"stop_token_ids names token id {token_id}; the target has ids 0 to {last}")
        speculation = params.speculation
        method = speculation.get("method")
        if method is not None and method not in self._method_names:
            known = ", ".join(self._method_names) or "none: the session does not speculate"
            raise RequestError(f"extra_args['specplug']['method']={method!r} is not in this session; it has {known}")
        return speculation

    def _room(self, num_prompt_tokens: int) -> int:
        limit = self._target.max_model_len
        if num_prompt_tokens >= limit:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens and max_model_len is {limit}: at most {limit - 1} leave "
                "room for output. Shorten it, or raise max_model_len if the model allows."
            )
        return limit - num_prompt_tokens

    def _read_prompt(self, prompt: Any) -> tuple[str | None, list[int], str | None]:
        """Text, token ids and cache salt of a prompt in any of its forms."""
        cache_salt = None
        if isinstance(prompt, Mapping):
            text, ids, cache_salt = _read_mapping(prompt)
            if ids is not None:
                return text, self._check_ids(ids, "prompt_token_ids"), cache_salt
            prompt = text
        if not isinstance(prompt, str):
            return None, self._check_ids(prompt), cache_salt
        return prompt, self._check_ids(self._encode(prompt)), cache_salt

    def _encode(self, text: str) -> Any:
        if self._target.tokenizer is None:
            raise RequestError("the prompt is text and the target has no tokenizer; pass {'prompt_token_ids': [...]}")
        try:
            return self._target.tokenizer(text)["input_ids"]
        except Exception as error:  # a text that is no text, or that a tokenizer without an unknown token cannot write
            raise RequestError(
                f"the prompt {_shown(text)} cannot be tokenised ({type(error).__name__}: {error}); change the text, or "
                "pass {'prompt_token_ids': [...]}"
            ) from error

    def _check_ids(self, token_ids: Any, name: str = "prompt") -> list[int]:
        listed = _plain(token_ids)
        if isinstance(listed, str | bytes | Mapping) or not hasattr(listed, "__iter__"):
            kind = type(token_ids).__name__
            raise RequestError(f"{name}={_shown(token_ids)} is a {kind}, not a list of token ids; {_FORMS}")
        ids = [*map(_plain, listed)]
        if not ids:
            raise RequestError("the prompt is empty; the target needs at least one token to start from")
        for position, token_id in enumerate(ids):
            if type(token_id) is not int or not 0 <= token_id < self._target.vocab_size:
                raise RequestError(
                    f"prompt_token_ids[{position}]={_shown(token_id)} is not a token id of the target, which has ids "
                    f"0 to {self._target.vocab_size - 1}"
                )
        return ids


def _read_mapping(prompt: Mapping[str, Any]) -> tuple[str | None, Any, str | None]:
    """Text, token ids as given and cache salt; the first or the second may be None, but not both."""
    given = {key: value for key, value in prompt.items() if value is not None}
    unknown = [key for key in given if key not in _KEYS]
    if unknown:
        raise RequestError(f"the prompt has the key {unknown[0]!r}; {_FORMS}, each with a cache_salt")
    for key in ("prompt", "cache_salt"):
        if not isinstance(given.get(key, ""), str):
            raise RequestError(f"{key}={_shown(given[key])} is a {type(given[key]).__name__}; it must be text")
    if "prompt" not in given and "prompt_token_ids" not in given:
        raise RequestError(f"the prompt {_shown(dict(prompt))} has neither text nor ids; {_FORMS}")
    return given.get("prompt"), given.get("prompt_token_ids"), given.get("cache_salt")


def _plain(value: Any) -> Any:
    """Arrays and tensors, of any dimension, as Python's lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt, sound or not, and not several. Iterators are not touched."""
    if isinstance(prompts, str | bytes | Mapping) or not hasattr(prompts, "__iter__"):
        return True
    if hasattr(prompts, "ndim"):
        holds_texts = getattr(prompts.dtype, "kind", "") in ("O", "U", "S")  # an array may hold prompts of any form
        return bool(prompts.ndim < 2) and not holds_texts
    if not isinstance(prompts, Sequence) or not len(prompts):
        return False
    first = prompts[0]
    return isinstance(first, int | np.integer) or getattr(first, "shape", None) == ()
