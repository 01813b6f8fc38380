"""``LLM``: the embedded front door, under vLLM's names."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from specplug.config import resolve_engine_args, resolve_speculative_config
from specplug.errors import RequestError
from specplug.hooks import ProcessManager, process_manager
from specplug.host.builder import ACCEPTANCE, build_session
from specplug.host.delivery import Delivery, Inbox
from specplug.host.intake import Intake, Prompt, is_single
from specplug.host.outputs import OutputKind, RequestOutput
from specplug.host.request_state import RequestState
from specplug.host.samples import SampleGroups
from specplug.models.loading import load_target
from specplug.sampling_params import SamplingParams

__all__ = ["LLM", "Prompt"]


class LLM:
    """A target model and the plugins that speed it up.

    ``model``: a folder with a Hugging Face causal LM, a loaded ``PreTrainedModel``, or any object that
    implements ``specplug.models.target.Target``.
    ``speculative_config``: vLLM's JSON object, as mapping or text; None decodes plainly.
    ``plugins``: further plugins, ``{"name": ..., **options}`` or ``"NAME"`` each.
    ``allow_lossy``: permit verifiers that change the target's distribution.
    ``strict``: raise on plugin faults instead of counting them (for tests).
    Further keyword arguments are vLLM's engine arguments (``docs/configuration.md``).

    Calls may come from several threads and may overlap: steps run one at a time, and every call gets the outputs
    of its own requests. Inside a step, that is from a hook, requests may be added, aborted, paused and resumed.

    Raises ``ConfigError`` with every fault of the configuration before weights load, ``ModelError`` for models
    that cannot be loaded or rolled back, ``PluginError`` for plugins that cannot.
    """

    def __init__(
        self,
        model: Any,
        *,
        speculative_config: Mapping[str, Any] | str | None = None,
        plugins: Sequence[Mapping[str, Any] | str] | None = None,
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
            plugins=plugins or (),
            engine=self.engine_args,
            allow_lossy=allow_lossy,
        )
        self.notes = (*engine_notes, *self.config.notes)
        self._target = load_target(self.engine_args)
        try:
            self._session = build_session(
                self._target,
                self.config,
                manager.methods,
                max_num_batched_tokens=self.engine_args.max_num_batched_tokens,
                strict=strict,
                trace=manager.trace,
                describe=manager.describe,
            )
        except BaseException:
            self._return_target()
            raise
        self._intake = Intake(self._target, method_names=self._method_names(), seed=self.engine_args.seed)
        self._ids = itertools.count()
        self._groups = SampleGroups()
        self._delivery = Delivery()
        self._lock = threading.RLock()
        self._is_stepping = self._is_closed = self._is_closing = False

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
        requests, inbox = self._prepare_all(prompts, sampling_params, "final_only")
        done: dict[str, RequestOutput] = {}
        with _progress(len(requests), enabled=use_tqdm) as advance:
            for output in self._run(requests, inbox):
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
        return self._run(*self._prepare_all(prompts, sampling_params, "delta"))

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
        with self._lock:
            self._add(request_id, self._prepare(request_id, prompt, sampling_params, output_kind))

    def step(self) -> list[RequestOutput]:
        """Run one decoding step; returns the added requests that got output in it or ended with it.

        Requests of a ``generate`` or ``stream`` under way go on too; their outputs reach that call.
        """
        with self._lock:
            if not self._is_closed:
                self._advance()
            return self._delivery.take_unowned()

    def has_unfinished_requests(self) -> bool:
        """Whether ``step()`` still has something to do, now or once a paused request is resumed."""
        with self._lock:
            return self._session.has_unfinished or self._delivery.has_unowned

    def abort(self, request_id: str) -> None:
        """End a request; its last output comes out of the next ``step()``. Unknown ids are ignored."""
        with self._lock:
            for sample_id in self._groups.ids_of(request_id):
                self._session.abort(sample_id)

    def pause(self, request_id: str) -> bool:
        """Take a request out of the steps until it is resumed; False for an unknown id.

        Called from a hook while a step runs, it acts at the next boundary between two phases: what the step has
        drafted or computed for the request is dropped. The request keeps its row and its plugins' state.
        """
        with self._lock:
            return any([self._session.pause(sample_id) for sample_id in self._groups.ids_of(request_id)])

    def resume(self, request_id: str) -> bool:
        """Let a paused request go on in the next step; False for an unknown id."""
        with self._lock:
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
    def vocab_size(self) -> int:
        """Token ids of the target are below it."""
        return self._target.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self._target.max_model_len

    @property
    def kernels(self) -> str:
        """What runs the target's forward: "torch", or the name of installed kernels."""
        kernels = getattr(self._target, "kernels", None)
        return "torch" if kernels is None else str(kernels.name)

    @property
    def acceptance(self) -> Any:
        """The session's ``acceptance`` observer, or None when it is blocked."""
        return self._session.hooks.instance(ACCEPTANCE)

    def suspend_target(self) -> None:
        """Give a borrowed model back as it was until :meth:`resume_target`; requests and plugins keep their state."""
        with self._lock:
            self._call_target("suspend")

    def resume_target(self) -> None:
        """Borrow the model again after :meth:`suspend_target`."""
        with self._lock:
            self._call_target("resume")

    def close(self) -> None:
        """Abort what is left, tell the plugins, and give a borrowed model back as it was. A second call does nothing.

        From a hook it takes effect after the running step. Calls under way get their requests' last outputs.
        """
        with self._lock:
            if self._is_stepping:
                self._is_closing = True
            elif not self._is_closed:
                self._is_closed = True
                try:
                    self._delivery.put(self._groups.merge(self._session.close()))
                finally:  # also where a strict session raises what a plugin did in its last hook
                    self._return_target()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside -----------------------------------------------------------------------------------------

    def _return_target(self) -> None:
        self._call_target("close")

    def _call_target(self, method: str) -> None:
        """Targets that borrow no model need none of these."""
        call = getattr(self._target, method, None)
        if call is not None:
            call()

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
    ) -> tuple[dict[str, list[RequestState]], Inbox]:
        """Request id -> the states of its samples; and where the outputs of these requests will come in."""
        listed: list[Any] = [prompts] if is_single(prompts) else list(prompts)
        is_one = params is None or isinstance(params, SamplingParams | Mapping)
        each: list[Any] = [params] * len(listed) if is_one else list(params)  # type: ignore[arg-type]
        if len(each) != len(listed):
            raise RequestError(f"{len(each)} sampling_params for {len(listed)} prompts: give one for all, or one each")
        requests = {}
        with self._lock:
            for prompt, one in zip(listed, each, strict=True):
                request_id = next(each for each in map(str, self._ids) if not self._is_taken(each))
                requests[request_id] = self._prepare(request_id, prompt, one, output_kind)
            return requests, self._delivery.open(requests)

    def _prepare(self, request_id: str, prompt: Prompt, params: Any, output_kind: OutputKind) -> list[RequestState]:
        if self._is_closed:
            raise RequestError("this LLM is closed; build a new one")
        params = self.get_default_sampling_params() if params is None else params
        states = self._intake.prepare(request_id, prompt, params, output_kind)
        for each in {request_id, *(state.request_id for state in states)}:
            if self._is_taken(each):
                raise RequestError(f"request id {each!r} is in use; finish or abort it, or choose another id")
        return states

    def _add(self, request_id: str, states: Sequence[RequestState]) -> None:
        self._groups.add(request_id, states)
        for state in states:
            self._session.add(state)

    def _is_taken(self, request_id: str) -> bool:
        return request_id in self._session.scheduler or request_id in self._groups or request_id in self._delivery

    def _advance(self) -> bool:
        """Run a step and hand its outputs to those who wait for them; False when no request can go on."""
        with self._lock:
            if self._is_stepping:
                raise RequestError("a step of this LLM is running; a hook may add and abort requests, not run steps")
            self._is_stepping = True
            try:
                outputs = self._session.step()
            finally:
                self._is_stepping = False
            self._delivery.put(self._groups.merge(outputs))
            is_stuck = not outputs and self._session.is_stuck
            if self._is_closing:
                self.close()
            return not is_stuck

    def _run(self, requests: Mapping[str, Sequence[RequestState]], inbox: Inbox) -> Iterator[RequestOutput]:
        """Step until these requests are done; whatever interrupts, none of them is left behind."""
        pending = set(requests)
        try:
            self._queue(requests)
            while pending:
                while inbox:
                    output = inbox.popleft()
                    if output.finished:
                        pending.discard(output.request_id)
                    yield output
                if pending and not inbox and not self._advance():
                    raise RequestError("every request is paused, so none of this call can go on; resume one first")
        finally:
            self._end_call(requests, pending)

    def _queue(self, requests: Mapping[str, Sequence[RequestState]]) -> None:
        with self._lock:
            if self._is_closed:
                raise RequestError("this LLM is closed; build a new one")
            for request_id, states in requests.items():
                self._add(request_id, states)

    def _end_call(self, requests: Iterable[str], pending: Iterable[str]) -> None:
        with self._lock:
            left = [request_id for request_id in pending if self._is_running(request_id)]
            self._delivery.close(requests, left)
            for request_id in left:
                self.abort(request_id)
            if left and not self._is_stepping:
                self._delivery.put(self._groups.merge(self._session.apply_aborts()))

    def _is_running(self, request_id: str) -> bool:
        return any(sample_id in self._session.scheduler for sample_id in self._groups.ids_of(request_id))


@contextmanager
def _progress(total: int, *, enabled: bool) -> Iterator[Callable[[], object]]:
    """A progress bar over finished requests, on demand (vLLM's ``use_tqdm``); yields what advances it."""
    if not enabled:
        yield lambda: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc="Processed prompts") as bar:
        yield lambda: bar.update()
