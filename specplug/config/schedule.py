"""``num_speculative_tokens_per_batch_size``: draft length by batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from specplug.config.keys import show
from specplug.errors import ConfigError

__all__ = ["SCHEDULE_KEY", "Schedule", "expand_schedule", "parse_schedule"]

SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
_WHERE = f"speculative_config.{SCHEDULE_KEY}"
_FORM = "first,last,K; the first range must start at 1; gaps inherit the previous K"

Schedule: TypeAlias = tuple[tuple[int, int, int], ...]
"""``(first, last, K)`` ranges of batch sizes, ends included, in order."""


def parse_schedule(value: object) -> Schedule:
    """``value`` as a schedule. Raises ``ConfigError`` showing the list form when it is none."""
    ranges = _ranges(value)
    if not ranges:
        raise ConfigError(f"{_WHERE} must not be empty. Write [[1,16,3],[17,64,1]]: {_FORM}.")
    for first, last, num in ranges:
        if first > last or first < 1:
            raise ConfigError(f"{_WHERE}: the range {first}-{last} is empty or starts below 1. Write {_FORM}.")
        if num < 0:
            raise ConfigError(f"{_WHERE}: K={num} for {first}-{last}; values must be >= 0, and 0 drafts nothing.")
    if ranges[0][0] != 1:
        raise ConfigError(f"{_WHERE} starts at {ranges[0][0]}; the first range must start at 1.")
    for (first, last, _), (after, end, _) in pairwise(ranges):
        if after <= last:
            raise ConfigError(
                f"{_WHERE}: ranges {first}-{last} and {after}-{end} overlap or are out of order; ranges must be "
                "non-overlapping and sorted."
            )
    return ranges


def _ranges(value: object) -> Schedule:
    if isinstance(value, Mapping):
        raise ConfigError(f"{_WHERE}={show(value)} is a mapping. Write {_list_form(value)}: {_FORM}.")
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{_WHERE}={show(value)} is no list. Write [[1,16,3],[17,64,1]]: {_FORM}.")
    ranges = []
    for each in value:
        is_triple = isinstance(each, list | tuple) and len(each) == 3
        if not is_triple or any(not isinstance(number, int) or isinstance(number, bool) for number in each):
            raise ConfigError(f"{_WHERE}: {show(each)} is not a 3-item sequence of whole numbers. Write {_FORM}.")
        ranges.append((each[0], each[1], each[2]))
    return tuple(ranges)


def _list_form(value: Mapping[object, object]) -> str:
    """The same schedule as a list, from text keys such as "1-16"; an example where they cannot be read."""
    parts = []
    for key, num in value.items():
        first, _, last = str(key).replace(" ", "").partition("-")
        if not first.isdigit() or not (last.isdigit() or not last):
            return "[[1,16,3],[17,64,1]]"
        parts.append(f"[{first},{last or first},{num}]")
    return f"[{','.join(parts)}]"


def expand_schedule(schedule: Schedule, max_num_seqs: int, num_speculative_tokens: int) -> tuple[int, ...]:
    """The draft length for every batch size: entry b - 1 for b requests, ``max_num_seqs`` entries.

    Gaps and the tail keep the previous range's K; no entry exceeds ``num_speculative_tokens``.
    """
    starts = {first: num for first, _, num in schedule}
    lengths: list[int] = []
    current = num_speculative_tokens
    for batch_size in range(1, max_num_seqs + 1):
        current = min(starts.get(batch_size, current), num_speculative_tokens)
        lengths.append(current)
    return tuple(lengths)
