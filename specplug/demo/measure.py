"""Timing of decoding: the prompt phase left out, the counts of every request kept."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specplug.metrics import AcceptanceCounts, merge

if TYPE_CHECKING:
    from specplug.host.llm import LLM
    from specplug.host.outputs import RequestOutput
    from specplug.sampling_params import SamplingParams

__all__ = ["Decoded", "decode", "decode_in_batches"]

_run_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Decoded:
    """One run. ``num_decode_tokens`` and ``decode_s`` start when every prompt has its first token; ``output_ids`` and
    ``prompt_ids`` are in the order of the prompts."""

    num_decode_tokens: int
    decode_s: float
    prompt_ids: list[list[int]]
    output_ids: list[list[int]]
    counts: AcceptanceCounts

    @property
    def tokens_per_s(self) -> float:
        return self.num_decode_tokens / self.decode_s if self.decode_s > 0 else 0.0


def decode(
    llm: LLM, prompts: Sequence[str], params: SamplingParams, advance: Callable[[int], object] = lambda _count: None
) -> Decoded:
    """Decode all prompts together; ``advance`` is called with the number of tokens of each step."""
    run = next(_run_numbers)
    names = [f"demo-{run}-{number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        llm.add_request(name, prompt, params, output_kind="delta")
    collected = _Collected(names)
    first_tokens = 0
    start = end = time.perf_counter()
    while llm.has_unfinished_requests():
        is_prompt_phase = bool(collected.silent)
        advance(collected.add(llm.step()))
        end = time.perf_counter()
        if is_prompt_phase:
            start, first_tokens = end, collected.num_tokens
    return Decoded(
        num_decode_tokens=collected.num_tokens - first_tokens,
        decode_s=end - start,
        prompt_ids=[collected.prompt_ids[name] for name in names],
        output_ids=[collected.output_ids[name] for name in names],
        counts=merge(collected.counts),
    )


class _Collected:
    """Outputs as they come. ``silent``: requests that have no token yet."""

    def __init__(self, names: Sequence[str]) -> None:
        self.silent = set(names)
        self.num_tokens = 0
        self.output_ids: dict[str, list[int]] = {name: [] for name in names}
        self.prompt_ids: dict[str, list[int]] = {}
        self.counts: list[AcceptanceCounts] = []

    def add(self, outputs: Sequence[RequestOutput]) -> int:
        """Take the outputs of a step; returns how many tokens they bring."""
        before = self.num_tokens
        for output in outputs:
            completion = output.outputs[0]
            self.silent.discard(output.request_id)
            self.num_tokens += len(completion.token_ids)
            self.output_ids[output.request_id] += completion.token_ids
            self.prompt_ids[output.request_id] = list(output.prompt_token_ids)
            if output.finished and completion.spec_decode_metrics is not None:
                self.counts.append(completion.spec_decode_metrics)
        return self.num_tokens - before


def decode_in_batches(
    llm: LLM,
    prompts: Sequence[str],
    params: SamplingParams,
    batch: int,
    advance: Callable[[int], object] = lambda _count: None,
) -> Decoded:
    """Decode ``batch`` prompts at a time; the runs are added up."""
    runs = [decode(llm, prompts[start : start + batch], params, advance) for start in range(0, len(prompts), batch)]
    return Decoded(
        num_decode_tokens=sum(run.num_decode_tokens for run in runs),
        decode_s=sum(run.decode_s for run in runs),
        prompt_ids=[ids for run in runs for ids in run.prompt_ids],
        output_ids=[ids for run in runs for ids in run.output_ids],
        counts=merge(run.counts for run in runs),
    )
