"""A flag for every sampling parameter, under the parameter's name, and the values they stand for."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Annotated, Any, get_type_hints

from typer import Option

from specplug.errors import RequestError

__all__ = ["SamplingFlags", "with_sampling_flags"]


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """What the flags say, None where one is absent. Lists come from flags that are repeated."""

    temperature: Annotated[float | None, Option(help="0 (default): greedy.")] = None
    top_p: Annotated[float | None, Option("--top-p", help="Nucleus sampling, in (0, 1].")] = None
    top_k: Annotated[int | None, Option("--top-k", help="Only the k likeliest tokens; 0: all.")] = None
    min_p: Annotated[float | None, Option("--min-p", help="Drop tokens below min-p x the likeliest.")] = None
    seed: Annotated[int | None, Option(help="Makes sampling repeatable.")] = None
    n: Annotated[int | None, Option("--n", help="So many samples; sample i has the seed plus i.")] = None
    presence_penalty: Annotated[
        float | None, Option("--presence-penalty", help="Off every token that the output holds, -2 to 2.")
    ] = None
    frequency_penalty: Annotated[
        float | None, Option("--frequency-penalty", help="The same for each time it holds it, -2 to 2.")
    ] = None
    repetition_penalty: Annotated[
        float | None, Option("--repetition-penalty", help="Weakens tokens of prompt and output; 1: not.")
    ] = None
    logit_bias: Annotated[
        list[str] | None, Option("--logit-bias", metavar="ID:VALUE", help="Add to a token's logit; may be repeated.")
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None, Option("--allowed-token-ids", metavar="ID", help="Only these; may be repeated.")
    ] = None
    bad_words: Annotated[
        list[str] | None, Option("--bad-words", metavar="TEXT", help="Never write this; may be repeated.")
    ] = None
    logits_processors: Annotated[
        list[str] | None,
        Option("--logits-processors", metavar="MODULE:NAME", help="A callable over logits; may be repeated."),
    ] = None
    structured_outputs: Annotated[
        str | None,
        Option("--structured-outputs", metavar="JSON", help='{"json": SCHEMA}, {"regex": ...}, choice or grammar.'),
    ] = None
    reasoning_end: Annotated[
        str | None, Option("--reasoning-end", metavar="TEXT", help="The output begins with reasoning that ends so.")
    ] = None
    max_tokens: Annotated[int | None, Option("--max-tokens", help="Most tokens to generate (256).")] = None
    min_tokens: Annotated[int | None, Option("--min-tokens", help="Do not end before so many tokens.")] = None
    stop: Annotated[list[str] | None, Option(help="End before this text; may be repeated.")] = None
    stop_token_ids: Annotated[
        list[int] | None, Option("--stop-token-ids", metavar="ID", help="End at this token; may be repeated.")
    ] = None
    ignore_eos: Annotated[
        bool | None, Option("--ignore-eos", help="Go on past the end-of-sequence token.", show_default=False)
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, Option("--include-stop-str-in-output", help="Keep what ended the text.", show_default=False)
    ] = None
    detokenize: Annotated[bool | None, Option("--detokenize/--no-detokenize", help="Token ids only.")] = None
    skip_special_tokens: Annotated[
        bool | None, Option("--skip-special-tokens/--no-skip-special-tokens", help="Special tokens as text.")
    ] = None
    logprobs: Annotated[int | None, Option(help="With --json: so many log-probabilities a token; -1: all.")] = None
    prompt_logprobs: Annotated[int | None, Option("--prompt-logprobs", help="The same for the prompt.")] = None
    logprobs_mode: Annotated[str | None, Option("--logprobs-mode", help="raw_logprobs or processed_logprobs.")] = None
    extra_args: Annotated[
        str | None,
        Option("--extra-args", metavar="JSON", help='{"specplug": {"enabled": false}}: this request\'s speculation.'),
    ] = None

    def values(self) -> dict[str, Any]:
        """The parameters that were given, as ``SamplingParams.from_mapping`` takes them.

        Raises ``RequestError`` naming the flag that cannot be read.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        readers: Mapping[str, Callable[[Any], Any]] = {
            "logit_bias": lambda texts: dict(map(_read_bias, texts)),
            "logits_processors": lambda texts: [_load_callable(text) for text in texts],
            "structured_outputs": functools.partial(_read_json, "--structured-outputs"),
            "extra_args": functools.partial(_read_json, "--extra-args"),
        }
        unchanged: Callable[[Any], Any] = lambda value: value  # noqa: E731 - one of the readers
        return {name: readers.get(name, unchanged)(value) for name, value in given.items() if value not in (None, [])}


def with_sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a typer command all sampling flags; it gets them as its argument ``sampling``, a ``SamplingFlags``."""
    names = [field.name for field in fields(SamplingFlags)]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        flags = SamplingFlags(**{name: arguments.pop(name) for name in names})
        command(sampling=flags, **arguments)

    kept = inspect.signature(command, eval_str=True).parameters
    hints = get_type_hints(SamplingFlags, include_extras=True)
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hints[name]) for name in names
    ]
    others = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, each in kept.items() if name != "sampling"]
    parameters = [*others, *flags]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _read_bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition(":")
    try:
        return int(token_id), float(value)
    except ValueError as error:
        raise RequestError(f"--logit-bias {text} must be ID:VALUE, such as 42:-3.5") from error


def _read_json(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise RequestError(f"{flag} is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"{flag} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"{flag} {text} must be a JSON object")
    return value


def _load_callable(text: str) -> Any:
    module, _, name = text.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(f"--logits-processors {text} must be an importable MODULE:NAME: {error}") from error
