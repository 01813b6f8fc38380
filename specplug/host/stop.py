"""Where a request ends: end-of-sequence and stop ids, stop strings, length, in the order of single-token decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specplug.host.detokenizer import Detokenizer
from specplug.host.outputs import FinishReason
from specplug.sampling_params import SamplingParams

__all__ = ["Cut", "StopChecker"]


@dataclass(frozen=True, slots=True)
class Cut:
    """How many of a step's tokens the request keeps, and why it ends, if it does."""

    num_kept: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class StopChecker:
    """One request's stop conditions, applied to blocks of any size with the same result."""

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int], detokenizer: Detokenizer) -> None:
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids or ())
        self._ending_ids = self._eos_token_ids | self._stop_token_ids
        self._stop_strings = params.stop_strings
        self._min_tokens = params.min_tokens
        self._keep_stop_string = params.include_stop_str_in_output
        self._detokenizer = detokenizer

    def cut(self, token_ids: Sequence[int], remaining: int, num_output_tokens: int = 0) -> Cut:
        """Cut a step's output tokens: the request has ``num_output_tokens`` and may emit ``remaining`` more.

        A stop wins over the length limit on the same token. With stop strings every kept token goes through
        the detokenizer here, one at a time, so that the cut does not depend on the block.
        """
        window = token_ids[:remaining]
        if not self._stop_strings and self._ending_ids.isdisjoint(window):
            return Cut(len(window), "length" if len(window) == remaining else None)
        for number, token_id in enumerate(window, 1):
            if token_id in self._stop_token_ids:
                return Cut(number, "stop", token_id)
            if token_id in self._eos_token_ids:
                return Cut(number, "stop")
            may_end = num_output_tokens + number > self._min_tokens
            if self._stop_strings and (matched := self._match_stop_string(token_id, may_end)) is not None:
                return Cut(number, "stop", matched)
        return Cut(len(window), "length" if len(window) == remaining else None)

    def _match_stop_string(self, token_id: int, may_end: bool) -> str | None:
        """Feed one token; on a match cut the text, and return the string that begins first.

        Before ``min_tokens`` nothing matches, nor do such matches count later.
        """
        detokenizer = self._detokenizer
        old_length = len(detokenizer.text)
        detokenizer.append([token_id])
        if not may_end:
            return None
        found = []
        for string in self._stop_strings:
            start = detokenizer.text.find(string, max(0, old_length - len(string) + 1))
            if start >= 0:
                found.append((start, string))
        if not found:
            return None
        start, string = min(found, key=lambda match: match[0])
        detokenizer.truncate(start + len(string) if self._keep_stop_string else start)
        return string
