"""What a request gives back, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

__all__ = ["CompletionOutput", "FinishReason", "OutputKind", "RequestOutput"]

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
OutputKind: TypeAlias = Literal["cumulative", "delta", "final_only"]


@dataclass(slots=True)
class CompletionOutput:
    """The generated part of a request.

    ``stop_reason``: the stop string or stop token id that matched; None for an end-of-sequence token or for
    another ``finish_reason``. ``num_discarded_tokens``: draft tokens that the target had already accepted in
    the last step and that the stop or length cut dropped. ``error``: what went wrong when ``finish_reason`` is "error".
    ``spec_decode_metrics``: the request's acceptance record, set when it has finished and the ``acceptance``
    plugin is on.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_discarded_tokens: int = 0
    error: str | None = None
    spec_decode_metrics: Any = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One request's state after a step: cumulative, or the step's part only when it is streamed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
