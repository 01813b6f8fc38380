"""What a request gives back, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from specplug.host.logprobs import TokenLogprobs

__all__ = ["CompletionOutput", "FinishReason", "OutputKind", "RequestOutput"]

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
OutputKind: TypeAlias = Literal["cumulative", "delta", "final_only"]


@dataclass(slots=True)
class CompletionOutput:
    """The generated part of a request.

    ``stop_reason``: the stop string or stop token id that matched; None for an end-of-sequence token or for
    another ``finish_reason``. ``num_discarded_tokens``: draft tokens that the target had already accepted in
    the last step and that the stop or length cut dropped. ``error``: what went wrong when ``finish_reason`` is "error".
    ``logprobs``: one entry a token when the request asked for them: the token first, then the likeliest ones;
    ``cumulative_logprob``: the sum over all tokens so far. ``num_reasoning_tokens``: tokens up to and including
    ``reasoning_end``, None for a request without it. ``index``: which of the request's ``n`` samples this is.
    ``spec_decode_metrics``: the sample's acceptance record, set when it has finished and the ``acceptance``
    plugin is on.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_discarded_tokens: int = 0
    num_reasoning_tokens: int | None = None
    error: str | None = None
    spec_decode_metrics: Any = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One request's state after a step: cumulative, or the step's part only when it is streamed.

    ``prompt_logprobs``: one entry a prompt token, None for the first, when the request asked for them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
