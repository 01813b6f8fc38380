"""The sessions of the transformers door, kept with the model that they drive."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from specplug.config.engine_terms import NO_TOKENIZER
from specplug.errors import ConfigError, RequestError
from specplug.host.llm import LLM
from specplug.host.outputs import RequestOutput
from specplug.sampling_params import SamplingParams

__all__ = ["DoorSession", "Sessions", "session_of", "sessions_of"]

_ATTRIBUTE = "_specplug_sessions"
_MAX_SESSIONS = 4
_MIN_ROWS, _MAX_ROWS = 8, 256
_OURS = ("tokenizer", "skip_tokenizer_init", "max_num_seqs")
_PASS_TOKENIZER = "this call has no tokenizer of the target; pass spec_tokenizer=tokenizer"


class DoorSession:
    """An ``LLM`` on a loaded model that is borrowed only while requests run. Used while its ``Sessions`` are held."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._num_calls = 0
        llm.suspend_target()

    @property
    def max_num_seqs(self) -> int:
        return self.llm.engine_args.max_num_seqs

    @contextmanager
    def running(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Iterator[Call]:
        """Requests of these prompts, in steps; whatever interrupts, none of them is left behind."""
        self._num_calls += 1
        self.llm.resume_target()
        call = Call(self.llm, f"call {self._num_calls}")
        try:
            for number, (token_ids, each) in enumerate(zip(prompts, params, strict=True)):
                call.add(number, token_ids, each)
            yield call
        finally:
            call.abandon()
            self.llm.suspend_target()

    def close(self) -> None:
        """End the session."""
        self.llm.close()


class Call:
    """The requests of one ``generate``; rows are numbered from 0."""

    def __init__(self, llm: LLM, name: str) -> None:
        self._llm = llm
        self._name = name
        self._rows: dict[str, int] = {}

    @property
    def is_running(self) -> bool:
        """Whether a request is not finished yet."""
        return bool(self._rows)

    def add(self, row: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        request_id = f"{self._name}, row {row}"
        self._llm.add_request(request_id, {"prompt_token_ids": list(token_ids)}, params, output_kind="delta")
        self._rows[request_id] = row

    def step(self) -> list[tuple[int, RequestOutput]]:
        """Run one step: row and new output of the requests that got some, or that ended."""
        return [
            (self._rows.pop(output.request_id) if output.finished else self._rows[output.request_id], output)
            for output in self._llm.step()
        ]

    def stop(self, row: int) -> None:
        """End a row's request; its last output comes out of the next step."""
        for request_id, number in self._rows.items():
            if number == row:
                self._llm.abort(request_id)

    def abandon(self) -> None:
        """End what still runs."""
        for request_id in self._rows:
            self._llm.abort(request_id)
        self._rows.clear()
        while self._llm.has_unfinished_requests():
            self._llm.step()


class Sessions(dict[str, DoorSession]):
    """By configuration, the last used last. Hangs on the model and goes with it.

    Copies and pickles of the model begin without sessions.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._holder: int | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the model and its sessions to oneself; other threads wait.

        Raises ``RequestError`` in the thread that holds them already, which would wait for itself.
        """
        if self._holder == threading.get_ident():
            raise RequestError(
                "specplug.adapters.transformers: the model is busy with the call that this one is made from (in a "
                "streamer, a stopping criterion, a logits processor or a plugin); call generate and release after it"
            )
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    def close(self) -> None:
        """End all sessions, while they are held."""
        while self:
            self.pop(next(iter(self))).close()

    def __deepcopy__(self, memo: Any) -> Sessions:
        return Sessions()

    def __reduce__(self) -> tuple[type[Sessions], tuple[()]]:
        return Sessions, ()


def session_of(
    sessions: Sessions,
    model: Any,
    spec: Mapping[str, Any] | str | None,
    *,
    plugins: Sequence[Mapping[str, Any] | str],
    tokenizer: Any,
    engine: Mapping[str, Any],
    num_rows: int,
) -> DoorSession:
    """The session of this configuration, built on the first call. ``sessions``: the model's, held by the caller.

    It has rows for ``num_rows`` requests, 8 at least and 256 at most (more wait for a free one); where more are needed
    it is built anew. At most four are kept with a model. Raises what building an ``LLM`` raises.
    """
    max_num_seqs = min(max(_MIN_ROWS, 1 << (num_rows - 1).bit_length()), _MAX_ROWS)
    key = json.dumps([spec, list(plugins), dict(engine), id(tokenizer)], sort_keys=True, default=_identity)
    session = sessions.pop(key, None)
    if session is not None and session.max_num_seqs < max_num_seqs:
        session.close()
        session = None
    if session is None:
        session = DoorSession(_build(model, spec, plugins, tokenizer, engine, max_num_seqs))
    sessions[key] = session  # the newest is last
    while len(sessions) > _MAX_SESSIONS:
        sessions.pop(next(iter(sessions))).close()
    return session


def sessions_of(model: Any) -> Sessions:
    """The sessions that are kept with a model."""
    sessions: Sessions = model.__dict__.setdefault(_ATTRIBUTE, Sessions())
    return sessions


def _identity(value: object) -> str:
    return f"{type(value).__name__} {id(value)}"


def _build(
    model: Any,
    spec: Mapping[str, Any] | str | None,
    plugins: Sequence[Mapping[str, Any] | str],
    tokenizer: Any,
    engine: Mapping[str, Any],
    max_num_seqs: int,
) -> LLM:
    taken = [name for name in _OURS if name in engine]
    if taken:
        raise RequestError(f"spec_engine has {', '.join(taken)}, which the call decides; leave them out")
    try:
        return LLM(
            model,
            speculative_config=spec,
            plugins=plugins,
            tokenizer=tokenizer,
            skip_tokenizer_init=tokenizer is None,
            max_num_seqs=max_num_seqs,
            **engine,
        )
    except ConfigError as error:
        raise ConfigError([fault.replace(NO_TOKENIZER, _PASS_TOKENIZER) for fault in error.faults]) from error
