"""What the host keeps for one request. Only ``commit`` and admission change it."""

from __future__ import annotations

from typing import Any

import numpy as np

from specplug.host.detokenizer import Detokenizer
from specplug.host.features import RequestFeatures
from specplug.host.logprobs import TokenLogprobs
from specplug.host.outputs import CompletionOutput, FinishReason, OutputKind, RequestOutput
from specplug.host.stop import Cut, StopChecker
from specplug.types import Request, TokenIds

__all__ = ["RequestState"]


class RequestState:
    """One request between ``add_request`` and its finish.

    ``num_tokens``: prompt and output tokens so far. ``num_computed_tokens``: those whose target state is
    computed and kept; while the request decodes it is ``num_tokens - 1``, the newest token being unread.
    """

    def __init__(
        self,
        request: Request,
        *,
        prompt: str | None,
        max_output_tokens: int,
        eos_token_ids: frozenset[int],
        tokenizer: Any,
        output_kind: OutputKind,
        features: RequestFeatures | None = None,
        sample_index: int = 0,
    ) -> None:
        self.request = request
        self.features = features or RequestFeatures()
        self.sample_index = sample_index
        self.prompt = prompt
        self.output_kind: OutputKind = output_kind
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_output_tokens = max_output_tokens
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.num_verify_steps = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.num_discarded_tokens = 0
        self.is_paused = False
        self.is_aborted = False
        self.is_announced = False
        """Whether plugins were told of its start, and not yet of its finish."""
        self.may_draft = True
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._buffer = np.empty(self.num_prompt_tokens + max_output_tokens, dtype=np.int32)
        self._buffer[: self.num_prompt_tokens] = request.prompt_token_ids.array
        params = request.sampling_params
        self._detokenizer = Detokenizer(
            tokenizer if params.detokenize else None,
            request.prompt_token_ids[-16:],
            skip_special_tokens=params.skip_special_tokens,
        )
        self._stop_checker = StopChecker(params, eos_token_ids, self._detokenizer)
        # text that may turn out to be the start of a stop string is not streamed before that is known
        self._num_held_characters = (
            0 if params.include_stop_str_in_output else max((len(s) - 1 for s in params.stop_strings), default=0)
        )
        self._num_streamed_tokens = 0
        self._num_streamed_characters = 0
        self._num_offered = (0, 0)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_withdrawn(self) -> bool:
        """Paused, aborted or finished: what a running step has computed for it is dropped."""
        return self.is_paused or self.is_aborted or self.is_finished

    @property
    def is_decoding(self) -> bool:
        return self.num_computed_tokens == self.num_tokens - 1 and self.num_tokens > self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        return self.max_output_tokens - self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    def token_ids(self) -> TokenIds:
        """``[num_tokens]``, a view that later steps do not change."""
        return TokenIds(self._buffer[: self.num_tokens])

    def span(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """``[stop - start]`` int32, a view of the ids."""
        return self._buffer[start:stop]

    def cut(self, token_ids: list[int]) -> Cut:
        """How many of a step's output tokens to keep; feeds stop strings."""
        cut = self._stop_checker.cut(token_ids, self.remaining, self.num_output_tokens)
        self._end_without_text()
        return cut

    def append(self, token_ids: list[int]) -> None:
        """Add emitted tokens."""
        stop = self.num_tokens + len(token_ids)
        self._buffer[self.num_tokens : stop] = token_ids
        self.num_tokens = stop
        if self.features.reasoning is not None:
            self.features.reasoning.append(token_ids)

    def add_logprobs(self, entry: TokenLogprobs) -> None:
        """Add the next output token's log-probabilities; the token's own comes first."""
        self.logprobs.append(entry)
        self.cumulative_logprob += next(iter(entry.values())).logprob

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """End the request, once; a later reason does not overwrite the first."""
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error

    def output(self, *, is_last: bool, spec_decode_metrics: Any = None) -> RequestOutput:
        """The request's output after a step; of a streamed one, what came since ``delivered()`` was last called."""
        output_ids: list[int] = self.span(self.num_prompt_tokens, self.num_tokens).tolist()
        self._detokenizer.catch_up(self._visible(output_ids))
        if is_last:
            self._detokenizer.flush()
        self._end_without_text()
        text = self._detokenizer.text
        if not is_last and self._num_held_characters:
            text = text[: max(len(text) - self._num_held_characters, self._num_streamed_characters)]
        reasoning = self.features.reasoning
        completion = CompletionOutput(
            index=self.sample_index,
            text=text,
            token_ids=output_ids,
            cumulative_logprob=self.cumulative_logprob if self.features.logprobs is not None else None,
            logprobs=list(self.logprobs) if self.features.logprobs is not None else None,
            finish_reason=self.finish_reason if is_last else None,
            stop_reason=self.stop_reason,
            num_discarded_tokens=self.num_discarded_tokens,
            num_reasoning_tokens=reasoning.num_tokens_so_far if reasoning is not None else None,
            error=self.error,
            spec_decode_metrics=spec_decode_metrics,
        )
        if self.output_kind == "delta":
            self._keep_only_new(completion)
        prompt_ids = self.request.prompt_token_ids.tolist()
        return RequestOutput(
            self.request_id,
            self.prompt,
            prompt_ids,
            [completion],
            finished=is_last,
            prompt_logprobs=self.prompt_logprobs if self.features.prompt_logprobs is not None else None,
        )

    def delivered(self) -> None:
        """The last ``output()`` is on its way: streamed ids and text are not handed out again."""
        self._num_streamed_tokens, self._num_streamed_characters = self._num_offered

    def _end_without_text(self) -> None:
        """Text that cannot be decoded is an error, whatever else ended the request."""
        if self._detokenizer.error is not None:
            self.finish_reason, self.stop_reason, self.error = "error", None, self._detokenizer.error

    def _visible(self, output_ids: list[int]) -> list[int]:
        """The ids that become text: a token that ended the request is left out, as in vLLM."""
        ended_by_token = self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
        if ended_by_token and not self.request.sampling_params.include_stop_str_in_output:
            return output_ids[:-1]
        return output_ids

    def _keep_only_new(self, completion: CompletionOutput) -> None:
        self._num_offered = (len(completion.token_ids), len(completion.text))
        completion.token_ids = completion.token_ids[self._num_streamed_tokens :]
        if completion.logprobs is not None:
            completion.logprobs = completion.logprobs[self._num_streamed_tokens :]
        completion.text = completion.text[self._num_streamed_characters :]
