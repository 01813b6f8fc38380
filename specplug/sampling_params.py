"""Per-request sampling parameters, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from specplug.errors import RequestError

__all__ = ["SamplingParams"]

MAX_SEED = 2**64 - 1
_GREEDY_TEMPERATURE = 1e-5  # vLLM's threshold: below it the division would overflow, so the row is greedy


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends. Greedy when ``temperature`` is 0.

    Raises ``RequestError`` (a ``ValueError``) listing every parameter that is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    """None: until ``max_model_len``."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    extra_args: dict[str, Any] = field(default_factory=dict)
    """``extra_args["specplug"]``: {"enabled": bool, "num_speculative_tokens": int, "method": str}."""

    def __post_init__(self) -> None:
        faults = list(_faults(self))
        if faults:
            raise RequestError("; ".join(faults))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> SamplingParams:
        """Like the constructor, with an error that names unknown parameters and the closest known one."""
        import difflib

        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {close[0]}?" if close else f" Known: {', '.join(known)}."
                raise RequestError(f"unknown sampling parameter {name!r}.{hint}")
        return cls(**values)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _faults(params: SamplingParams) -> Iterator[str]:
    if not (_is_number(params.temperature) and 0.0 <= params.temperature < float("inf")):
        yield f"temperature={params.temperature!r} must be a finite number of at least 0 (0: greedy)"
    if not (_is_number(params.top_p) and 0.0 < params.top_p <= 1.0):
        yield f"top_p={params.top_p!r} must be in (0, 1]"
    if not (_is_int(params.top_k) and params.top_k >= -1):
        yield f"top_k={params.top_k!r} must be a whole number of at least 1, or 0 or -1 for all tokens"
    if not (_is_number(params.min_p) and 0.0 <= params.min_p <= 1.0):
        yield f"min_p={params.min_p!r} must be in [0, 1]"
    if params.seed is not None and not (_is_int(params.seed) and 0 <= params.seed <= MAX_SEED):
        yield f"seed={params.seed!r} must be a whole number from 0 to 2**64 - 1, or None"
    if params.max_tokens is not None and not (_is_int(params.max_tokens) and params.max_tokens >= 1):
        yield f"max_tokens={params.max_tokens!r} must be a whole number of at least 1, or None for max_model_len"
    if any(not isinstance(text, str) or not text for text in params.stop_strings):
        yield f"stop={params.stop!r} must be a non-empty string or a list of them"
    ids = params.stop_token_ids
    if ids is not None and (isinstance(ids, str) or any(not _is_int(i) or i < 0 for i in ids)):
        yield f"stop_token_ids={ids!r} must be a list of token ids"
    yield from _speculation_faults(params.extra_args)


def _speculation_faults(extra_args: object) -> Iterator[str]:
    if not isinstance(extra_args, dict):
        yield f"extra_args={extra_args!r} must be a mapping"
        return
    switches = extra_args.get("specplug", {})
    if not isinstance(switches, dict):
        yield f"extra_args['specplug']={switches!r} must be a mapping"
        return
    checks: dict[str, Callable[[Any], bool]] = {
        "enabled": lambda v: isinstance(v, bool),
        "num_speculative_tokens": lambda v: _is_int(v) and v >= 0,
        "method": lambda v: isinstance(v, str) and v != "",
    }
    for key, value in switches.items():
        if key not in checks:
            yield f"extra_args['specplug'][{key!r}] is unknown; known: {', '.join(checks)}"
        elif not checks[key](value):
            yield f"extra_args['specplug'][{key!r}]={value!r} is not valid"
