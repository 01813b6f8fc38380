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
from specplug.host.samples import SampleGroups, sample_ids
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
        self._groups = SampleGroups()
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
        requests = self._prepare_all(prompts, sampling_params, "final_only")
        done: dict[str, RequestOutput] = {}
        with _progress(len(requests), enabled=use_tqdm) as advance:
            for output in self._run(requests):
                if output.finished:
                    done[output.request_id] = output
                    advance()
        return [done[request_id] for request_id in requests]

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
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
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
        self._add(request_id, self._prepare(request_id, prompt, sampling_params, output_kind))

    def step(self) -> list[RequestOutput]:
        """Run one decoding step; returns the requests that got output in it or ended with it."""
        undelivered, self._undelivered = self._undelivered, []
        return undelivered + self._groups.merge(self._session.step())

    def has_unfinished_requests(self) -> bool:
        """Whether ``step()`` still has something to do, now or once a paused request is resumed."""
        return self._session.has_unfinished or bool(self._undelivered)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request. One that was still waiting is returned at once, others come out of the next step."""
        ended = [self._session.abort(sample_id) for sample_id in self._groups.ids_of(request_id)]
        merged = self._groups.merge(output for output in ended if output is not None)
        return merged[0] if merged and merged[0].finished else None

    def pause(self, request_id: str) -> bool:
        """Take a request out of the steps until it is resumed; False for an unknown id.

        Called while a step runs, by a plugin or another thread, it acts at the next boundary between two phases: what
        the step has drafted or computed for the request is dropped. The request keeps its row and its plugins' state.
        """
        return any([self._session.pause(sample_id) for sample_id in self._groups.ids_of(request_id)])

    def resume(self, request_id: str) -> bool:
        """Let a paused request go on in the next step; False for an unknown id."""
        return any([self._session.resume(sample_id) for sample_id in self._groups.ids_of(request_id)])

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
    ) -> dict[str, list[RequestState]]:
        """Request id -> the states of its samples."""
        listed: list[Any] = [prompts] if is_single(prompts) else list(prompts)
        each = [params] * len(listed) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(listed):
            raise RequestError(f"{len(each)} sampling_params for {len(listed)} prompts: give one for all, or one each")
        requests = {}
        for prompt, one in zip(listed, each, strict=True):
            request_id = str(next(self._ids))
            requests[request_id] = self._prepare(request_id, prompt, one, output_kind)
        return requests

    def _prepare(self, request_id: str, prompt: Prompt, params: Any, output_kind: OutputKind) -> list[RequestState]:
        params = self.get_default_sampling_params() if params is None else params
        num_samples = params.n if isinstance(params, SamplingParams) else 1
        for each in {request_id, *sample_ids(request_id, num_samples)}:
            if each in self._session.scheduler or each in self._groups:
                raise RequestError(f"request id {each!r} is in use; finish or abort it, or choose another id")
        return self._intake.prepare(request_id, prompt, params, output_kind)

    def _add(self, request_id: str, states: Sequence[RequestState]) -> None:
        self._groups.add(request_id, states)
        for state in states:
            self._session.add(state)

    def _run(self, requests: Mapping[str, Sequence[RequestState]]) -> Iterator[RequestOutput]:
        """Step until these requests are done; whatever interrupts, none of them is left behind."""
        pending = set(requests)
        for request_id, states in requests.items():
            self._add(request_id, states)
        try:
            while pending:
                outputs = self._groups.merge(self._session.step())
                if not outputs and self._session.is_paused:
                    raise RequestError("every request is paused, so none of this call can go on; resume one first")
                for output in outputs:
                    if output.request_id not in pending:
                        self._undelivered.append(output)
                        continue
                    if output.finished:
                        pending.discard(output.request_id)
                    yield output
        finally:
            for request_id in pending:
                self.abort(request_id)
            leftover = self._groups.merge(self._session.apply_aborts())
            self._undelivered += [output for output in leftover if output.request_id not in pending]


@contextmanager
def _progress(total: int, *, enabled: bool) -> Iterator[Callable[[], object]]:
    """A progress bar over finished requests, on demand (vLLM's ``use_tqdm``); yields what advances it."""
    if not enabled:
        yield lambda: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc="Processed prompts") as bar:
        yield lambda: bar.update()
