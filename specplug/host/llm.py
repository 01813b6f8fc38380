"""``LLM``: the embedded front door, under vLLM's names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from specplug.config import resolve_engine_args, resolve_speculative_config
from specplug.errors import RequestError
from specplug.hooks import ProcessManager, process_manager
from specplug.host.builder import ACCEPTANCE, build_session
from specplug.host.intake import Intake, Prompt, is_single
from specplug.host.loading import load_target
from specplug.host.outputs import OutputKind, RequestOutput
from specplug.host.request_state import RequestState
from specplug.sampling_params import SamplingParams

__all__ = ["LLM", "Prompt"]


class LLM:
    """A target model and the plugins that speed it up.

    ``model``: a folder with a Hugging Face causal LM, a loaded ``PreTrainedModel``, or any object that
    implements ``specplug.host.target.Target``.
    ``speculative_config``: vLLM's JSON object, as mapping or text; None decodes plainly.
    ``plugins``: further plugins, ``{"name": ..., **options}`` or ``"NAME"`` each.
    ``allow_lossy``: permit verifiers that change the target's distribution.
    ``strict``: raise on plugin faults instead of counting them (for tests).
    Further keyword arguments are vLLM's engine arguments (``docs/configuration.md``).

    Raises ``ConfigError`` with every fault of the configuration before weights load, ``ModelError`` for models
    that cannot be loaded or rolled back, ``PluginError`` for plugins that cannot.
    """

    def __init__(
        self,
        model: Any,
        *,
        speculative_config: Mapping[str, Any] | str | None = None,
        plugins: Sequence[Mapping[str, Any] | str] = (),
        allow_lossy: bool = False,
        strict: bool = False,
        manager: ProcessManager | None = None,
        **engine_args: Any,
    ) -> None:
        manager = manager or process_manager()
        self.engine_args, engine_notes = resolve_engine_args(model, engine_args)
        self.config = resolve_speculative_config(
            speculative_config,
            manager.methods,
            plugins=plugins,
            engine=self.engine_args,
            allow_lossy=allow_lossy,
        )
        self.notes = (*engine_notes, *self.config.notes)
        self._target = load_target(self.engine_args)
        self._session = build_session(
            self._target,
            self.config,
            manager.methods,
            max_num_batched_tokens=self.engine_args.max_num_batched_tokens,
            strict=strict,
            trace=manager.trace,
            describe=manager.describe,
        )
        self._intake = Intake(self._target, method_names=self._method_names(), seed=self.engine_args.seed)
        self._ids = itertools.count()
        # outputs of requests added one by one that came up while generate or stream was stepping
        self._undelivered: list[RequestOutput] = []

    # --- whole prompts ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Decode all prompts to their ends; outputs come in the order of the prompts.

        ``sampling_params``: one for all, or one each; None takes ``get_default_sampling_params()``.
        Raises ``RequestError`` before anything runs when a prompt or parameter cannot be served.
        """
        states = self._prepare_all(prompts, sampling_params, "final_only")
        done: dict[str, RequestOutput] = {}
        with _progress(len(states), enabled=use_tqdm) as advance:
            for output in self._run(states):
                if output.finished:
                    done[output.request_id] = output
                    advance()
        return [done[state.request_id] for state in states]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Decode all prompts, yielding each request's new text and ids as they come.

        Every id is delivered once, in order; a request's last output has ``finished`` set. Closing the
        iterator early aborts what is still running.
        """
        return self._run(self._prepare_all(prompts, sampling_params, "delta"))

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's ``generation_config.json`` recommends, as far as specplug has the parameter."""
        config = getattr(self._target.model, "generation_config", None)
        given = {} if config is None else config.to_diff_dict()
        names = ("temperature", "top_p", "top_k", "min_p")
        return SamplingParams(**{name: given[name] for name in names if given.get(name) is not None})

    # --- step by step -----------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        output_kind: OutputKind = "cumulative",
    ) -> None:
        """Queue one request. Raises ``RequestError`` if it cannot be served; the others are unharmed."""
        self._session.add(self._prepare(request_id, prompt, sampling_params, output_kind))

    def step(self) -> list[RequestOutput]:
        """Run one decoding step; returns the requests that got output in it or ended with it."""
        undelivered, self._undelivered = self._undelivered, []
        return undelivered + self._session.step()

    def has_unfinished_requests(self) -> bool:
        return self._session.has_unfinished or bool(self._undelivered)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request. One that was still waiting is returned at once, others come out of the next step."""
        return self._session.abort(request_id)

    # --- around it --------------------------------------------------------------------------------------

    def get_metrics(self) -> list[Any]:
        """Session totals under vLLM's names: counters and vectors (``docs/metrics.md``)."""
        acceptance: Any = self._session.hooks.instance(ACCEPTANCE)
        return [] if acceptance is None else list(acceptance.metrics())

    def get_tokenizer(self) -> Any:
        """The target's tokenizer, or None."""
        return self._target.tokenizer

    @property
    def acceptance(self) -> Any:
        """The session's ``acceptance`` observer, or None when it is blocked."""
        return self._session.hooks.instance(ACCEPTANCE)

    def close(self) -> None:
        """Abort what is running, tell the plugins, and give a borrowed model back as it was."""
        self._session.close()
        close = getattr(self._target, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside -----------------------------------------------------------------------------------------

    def _method_names(self) -> Sequence[str]:
        """What a request may name as its ``method``: a composite's children, else the session's own."""
        if self.config.method is None:
            return ()
        proposer = self._session.hooks.instance(self.config.plugins[0].name)
        return getattr(proposer, "method_names", (self.config.method,))

    def _prepare_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        output_kind: OutputKind,
    ) -> list[RequestState]:
        listed: list[Any] = [prompts] if is_single(prompts) else list(prompts)
        each = [params] * len(listed) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(listed):
            raise RequestError(f"{len(each)} sampling_params for {len(listed)} prompts: give one for all, or one each")
        return [
            self._prepare(str(next(self._ids)), prompt, one, output_kind)
            for prompt, one in zip(listed, each, strict=True)
        ]

    def _prepare(self, request_id: str, prompt: Prompt, params: Any, output_kind: OutputKind) -> RequestState:
        if request_id in self._session.scheduler:
            raise RequestError(f"request id {request_id!r} is in use; finish or abort it, or choose another id")
        params = self.get_default_sampling_params() if params is None else params
        return self._intake.prepare(request_id, prompt, params, output_kind)

    def _run(self, states: Sequence[RequestState]) -> Iterator[RequestOutput]:
        """Step until these requests are done; whatever interrupts, none of them is left behind."""
        pending = {state.request_id for state in states}
        for state in states:
            self._session.add(state)
        try:
            while pending:
                for output in self._session.step():
                    if output.request_id not in pending:
                        self._undelivered.append(output)
                        continue
                    if output.finished:
                        pending.discard(output.request_id)
                    yield output
        finally:
            for request_id in pending:
                self._session.abort(request_id)
            self._session.apply_aborts()


@contextmanager
def _progress(total: int, *, enabled: bool) -> Iterator[Callable[[], object]]:
    """A progress bar over finished requests, on demand (vLLM's ``use_tqdm``); yields what advances it."""
    if not enabled:
        yield lambda: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc="Processed prompts") as bar:
        yield lambda: bar.update()
