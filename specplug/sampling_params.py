"""Per-request sampling parameters, under vLLM's names. ``docs/sampling.md`` says what each of them guarantees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeGuard

from specplug.errors import RequestError

__all__ = ["LogitsProcessor", "SamplingParams", "StructuredOutputsParams"]

MAX_SEED = 2**64 - 1
MAX_SAMPLES = 16384  # vLLM's bound
_GREEDY_TEMPERATURE = 1e-5  # vLLM's threshold: below it the division would overflow, so the row is greedy

LogitsProcessor: TypeAlias = Callable[..., Any]
"""``(output_token_ids, logits) -> logits`` or ``(prompt_token_ids, output_token_ids, logits) -> logits``: lists of ids,
and ``[vocab]`` float32. At a drafted position the output includes the draft tokens before it, so the result must
depend on the arguments alone."""

LogprobsMode: TypeAlias = Literal["raw_logprobs", "processed_logprobs"]
_LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")

# Beyond these, single-precision logits that went through bias, penalty and temperature may overflow.
_MAX_TEMPERATURE = 1e10
_MAX_REPETITION_PENALTY = 1e10
_MAX_BIAS = 1e20

_SWITCHES = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")
_WHOLE_NUMBERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the output must look like; exactly one of the first five. Needs the package ``xgrammar``.

    ``json``: a JSON schema, as mapping or text. ``regex``: the whole output matches it. ``choice``: one of these texts.
    ``grammar``: EBNF whose start rule is ``root``. ``json_object``: any JSON object.
    ``disable_any_whitespace``: JSON in its most compact spelling.

    Raises ``RequestError`` when not exactly one is given, or one has the wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        faults = list(_structure_faults(self))
        if faults:
            raise RequestError("; ".join(faults))

    @property
    def kind(self) -> str:
        """Which of the five is given."""
        return next(name for name in _STRUCTURES if getattr(self, name) not in (None, False))


_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends. Greedy when ``temperature`` is 0.

    Raises ``RequestError`` (a ``ValueError``) listing every parameter that is out of range.
    """

    n: int = 1
    """Independent samples. Sample i is what a request with ``n=1`` and ``seed + i`` gives."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    """None: until ``max_model_len``."""
    min_tokens: int = 0
    """The request does not end before it has this many tokens, but by its length."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    """False: token ids only, no text."""
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    """Token id -> what is added to its logit."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these ids are generated."""
    bad_words: Sequence[str | Sequence[int]] | None = None
    """Texts, or lists of token ids, whose last token is not generated after the others."""
    logits_processors: Sequence[LogitsProcessor] | None = None
    logprobs: int | None = None
    """Log-probabilities of this many likeliest tokens and of the generated one; -1: of all tokens."""
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """``raw_logprobs``: the model's own; ``processed_logprobs``: after every parameter, as the token was drawn."""
    structured_outputs: StructuredOutputsParams | None = None
    reasoning_end: str | Sequence[int] | None = None
    """Text or token ids that end the reasoning the output begins with; ``structured_outputs`` acts after them."""
    extra_args: dict[str, Any] = field(default_factory=dict)
    """``extra_args["specplug"]``: {"enabled": bool, "num_speculative_tokens": int, "method": str}. None: {}."""

    def __post_init__(self) -> None:
        extra_args: object = self.extra_args
        if extra_args is None:  # vLLM's default
            object.__setattr__(self, "extra_args", {})
        faults = [*_faults(self), *_token_faults(self), *_output_faults(self), *_speculation_faults(self.extra_args)]
        if faults:
            raise RequestError("; ".join(faults))
        for names, kind in ((_WHOLE_NUMBERS, int), (_NUMBERS, float)):
            for name in names:  # numpy's numbers as Python's, which do not wrap around
                value = getattr(self, name)
                if value is not None and not isinstance(value, int | float):
                    object.__setattr__(self, name, kind(value))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def speculation(self) -> Mapping[str, Any]:
        """A read-only copy of ``extra_args["specplug"]``.

        Raises ``RequestError`` if it was changed, since these parameters were made, to what cannot be.
        """
        faults = list(_speculation_faults(self.extra_args))
        if faults:
            raise RequestError("; ".join(faults))
        return MappingProxyType(dict(self.extra_args.get("specplug", {})))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Like the constructor, with an error that names unknown parameters and the closest known one.

        ``structured_outputs`` may be a mapping too, as files and command lines have it.
        """
        import difflib

        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {close[0]}?" if close else f" Known: {', '.join(known)}."
                raise RequestError(f"unknown sampling parameter {name!r}.{hint}")
        given = dict(values)
        if isinstance(structure := given.get("structured_outputs"), Mapping):
            given["structured_outputs"] = _structured_outputs(structure)
        return cls(**given)


def _structured_outputs(values: Mapping[str, Any]) -> StructuredOutputsParams:
    known = [f.name for f in fields(StructuredOutputsParams)]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise RequestError(f"structured_outputs has no {unknown[0]!r}; known: {', '.join(known)}")
    return StructuredOutputsParams(**values)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not _is_bool(value)


def _is_number(value: Any) -> bool:
    is_real: bool = isinstance(value, Real) and not _is_bool(value)
    return is_real and bool(abs(value) < float("inf"))


def _is_bias(value: Any) -> bool:
    return _is_number(value) and abs(value) <= _MAX_BIAS


def _shown(value: object) -> str:
    """``value`` as written, cut where it is long; Python refuses to print whole numbers of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number too long to print"
    return text if len(text) <= 120 else f"{text[:117]}..."


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_ids(value: object) -> bool:
    """A non-empty list of non-negative ids."""
    return _is_list(value) and len(value) > 0 and all(_is_int(i) and i >= 0 for i in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_texts(value: object) -> bool:
    return _is_list(value) and all(_is_text(text) for text in value)


def _faults(params: SamplingParams) -> Iterator[str]:
    if not (_is_number(params.temperature) and 0.0 <= params.temperature <= _MAX_TEMPERATURE):
        yield f"temperature={_shown(params.temperature)} must be a number from 0 (greedy) to {_MAX_TEMPERATURE:g}"
    if not (_is_number(params.top_p) and 0.0 < params.top_p <= 1.0):
        yield f"top_p={params.top_p!r} must be in (0, 1]"
    if not (_is_int(params.top_k) and params.top_k >= -1):
        yield f"top_k={params.top_k!r} must be a whole number of at least 1, or 0 or -1 for all tokens"
    if not (_is_number(params.min_p) and 0.0 <= params.min_p <= 1.0):
        yield f"min_p={params.min_p!r} must be in [0, 1]"
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not (_is_number(value) and -2.0 <= value <= 2.0):
            yield f"{name}={value!r} must be in [-2, 2]"
    if not (
        _is_number(params.repetition_penalty)
        and 1.0 / _MAX_REPETITION_PENALTY <= params.repetition_penalty <= _MAX_REPETITION_PENALTY
    ):
        bounds = f"{1.0 / _MAX_REPETITION_PENALTY:g} to {_MAX_REPETITION_PENALTY:g}"
        yield f"repetition_penalty={_shown(params.repetition_penalty)} must be a number from {bounds} (1: none)"
    if params.seed is not None and not (_is_int(params.seed) and 0 <= params.seed <= MAX_SEED):
        yield f"seed={params.seed!r} must be a whole number from 0 to 2**64 - 1, or None"
    if not (_is_int(params.n) and 1 <= params.n <= MAX_SAMPLES):
        yield f"n={params.n!r} must be a whole number from 1 to {MAX_SAMPLES}"
    elif params.n > 1 and _is_number(params.temperature) and params.is_greedy:
        yield f"n={params.n} must be 1 with temperature={params.temperature!r}: greedy samples are all the same"


def _token_faults(params: SamplingParams) -> Iterator[str]:
    if params.stop_token_ids and not _is_ids(params.stop_token_ids):
        yield f"stop_token_ids={params.stop_token_ids!r} must be a list of token ids"
    if params.allowed_token_ids is not None and not _is_ids(params.allowed_token_ids):
        yield f"allowed_token_ids={params.allowed_token_ids!r} must be a list of at least one token id"
    bias = params.logit_bias
    if bias is not None and not (
        isinstance(bias, Mapping) and all(_is_int(i) and i >= 0 and _is_bias(value) for i, value in bias.items())
    ):
        yield f"logit_bias={_shown(bias)} must map token ids to numbers from {-_MAX_BIAS:g} to {_MAX_BIAS:g}"
    words = params.bad_words
    if words is not None and not (_is_list(words) and all(_is_text(word) or _is_ids(word) for word in words)):
        yield f"bad_words={words!r} must be a list of non-empty texts or lists of token ids"
    end = params.reasoning_end
    if end is not None and not (_is_text(end) or _is_ids(end)):
        yield f"reasoning_end={end!r} must be a non-empty text or a list of token ids"
    processors = params.logits_processors
    if processors is not None and not (_is_list(processors) and all(callable(each) for each in processors)):
        yield f"logits_processors={processors!r} must be a list of callables"


def _output_faults(params: SamplingParams) -> Iterator[str]:
    for name in _SWITCHES:
        if not _is_bool(getattr(params, name)):
            yield f"{name}={getattr(params, name)!r} must be True or False"
    if params.max_tokens is not None and not (_is_int(params.max_tokens) and params.max_tokens >= 1):
        yield f"max_tokens={params.max_tokens!r} must be a whole number of at least 1, or None for max_model_len"
    elif not (_is_int(params.min_tokens) and params.min_tokens >= 0):
        yield f"min_tokens={params.min_tokens!r} must be a whole number of at least 0"
    elif params.max_tokens is not None and params.min_tokens > params.max_tokens:
        yield f"min_tokens={params.min_tokens} must be at most max_tokens={params.max_tokens}"
    if params.stop is not None and not (_is_text(params.stop) or _is_texts(params.stop)):
        yield f"stop={params.stop!r} must be a non-empty string or a list of them"
    elif params.stop and not params.detokenize:
        yield f"stop={params.stop!r} needs the text; leave detokenize=False out, or use stop_token_ids"
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not (_is_int(value) and value >= -1):
            yield f"{name}={value!r} must be a whole number of at least 0, -1 for all tokens, or None"
    if params.logprobs_mode not in _LOGPROBS_MODES:
        yield f"logprobs_mode={params.logprobs_mode!r} must be one of {', '.join(_LOGPROBS_MODES)}"
    structure: object = params.structured_outputs
    if structure is not None and not isinstance(structure, StructuredOutputsParams):
        yield f"structured_outputs={structure!r} must be a StructuredOutputsParams"


def _structure_faults(params: StructuredOutputsParams) -> Iterator[str]:
    given = [name for name in _STRUCTURES if getattr(params, name) not in (None, False)]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        yield f"structured_outputs needs exactly one of {', '.join(_STRUCTURES)}; given: {found}"
    schema: object = params.json
    if schema is not None and not isinstance(schema, str | Mapping):
        yield f"structured_outputs.json={params.json!r} must be a JSON schema, as mapping or text"
    for name in ("regex", "grammar"):
        value = getattr(params, name)
        if value is not None and not _is_text(value):
            yield f"structured_outputs.{name}={value!r} must be a non-empty text"
    choice = params.choice
    if choice is not None and not (_is_texts(choice) and choice):
        yield f"structured_outputs.choice={choice!r} must be a list of non-empty texts"


def _speculation_faults(extra_args: object) -> Iterator[str]:
    if not isinstance(extra_args, dict):
        yield f"extra_args={extra_args!r} must be a mapping"
        return
    switches = extra_args.get("specplug", {})
    if not isinstance(switches, dict):
        yield f"extra_args['specplug']={switches!r} must be a mapping"
        return
    checks: dict[str, Callable[[Any], bool]] = {
        "enabled": _is_bool,
        "num_speculative_tokens": lambda v: _is_int(v) and v >= 0,
        "method": lambda v: isinstance(v, str) and bool(v),
    }
    for key, value in switches.items():
        if key not in checks:
            yield f"extra_args['specplug'][{key!r}] is unknown; known: {', '.join(checks)}"
        elif not checks[key](value):
            yield f"extra_args['specplug'][{key!r}]={value!r} is not valid"
