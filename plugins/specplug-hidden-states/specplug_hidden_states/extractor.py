"""The observer that follows decoding: one copy of the tapped layers a step, handed to the writer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from specplug import Batch, ConfigError, Request, Session, SessionSummary, hookimpl
from specplug_hidden_states.options import HiddenStatesOptions
from specplug_hidden_states.writer import Begin, End, Lose, Report, Rows, Writer

__all__ = ["ExtractionError", "HiddenStatesExtractor"]

logger = logging.getLogger(__name__)

_COMPLETE_REASONS = ("stop", "length")


class ExtractionError(RuntimeError):
    """Hidden states can no longer be written; decoding can go on without."""


@dataclass(slots=True)
class _Extraction:
    """What is known of a request under way."""

    num_prompt_tokens: int
    keeps_output: bool
    num_tokens: int = 0
    lost: str | None = None


class HiddenStatesExtractor:
    """Writes, for every request, the states of its tokens that the target read: all but the newest one.

    ``layers``: as in ``Batch.new_hidden_states``, in the order of the files. ``report``: what has become of the
    requests so far; final after the session.
    """

    def __init__(self, options: HiddenStatesOptions, layers: Sequence[int]) -> None:
        self.hidden_state_layers = tuple(layers)
        self._folder = Path(options.extract_hidden_states_path).expanduser()
        self._keeps_output = options.extract_hidden_states_output
        self._waits = options.extract_hidden_states_when_full == "wait"
        self._running: dict[str, _Extraction] = {}
        self._has_raised = False
        self._writer = Writer(
            self._folder,
            self.hidden_state_layers,
            queue_bytes=options.extract_hidden_states_queue_bytes,
            max_bytes=options.extract_hidden_states_max_bytes,
        )

    @property
    def report(self) -> Report:
        return self._writer.report

    @hookimpl
    def specplug_start_session(self, session: Session) -> None:
        """Raises ``ConfigError`` for a folder that cannot be used, which keeps the session from starting."""
        try:
            self._writer.start()
        except OSError as error:
            raise ConfigError(f'extract_hidden_states_path="{self._folder}" cannot be used: {error}') from error

    @hookimpl
    def specplug_start_request(self, request: Request) -> None:
        """Raises nothing: an id or settings that cannot be are that request's loss."""
        extraction = _Extraction(len(request.prompt_token_ids), self._keeps_output)
        self._running[request.request_id] = extraction
        try:
            path = self._take_settings(request, extraction)
        except Exception as error:  # noqa: BLE001 - what a request brings must not cost the others their files
            extraction.lost = str(error)
            self._writer.put(Lose(request.request_id, extraction.lost))
        else:
            self._writer.put(Begin(request.request_id, path, request.prompt_token_ids.tolist()))

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        """Raises ``ExtractionError`` once the writer had to stop."""
        self._raise_if_stopped()
        rows = self._wanted(batch)
        if rows:
            self._hand_over(batch, rows)

    @hookimpl
    def specplug_finish_request(self, request: Request, reason: str) -> None:
        extraction = self._running.pop(request.request_id, None)
        if extraction is not None:
            gone = None if reason in _COMPLETE_REASONS else f"the request ended with {reason!r}"
            self._writer.put(End(request.request_id, extraction.lost or gone))

    @hookimpl
    def specplug_finish_session(self, summary: SessionSummary) -> None:
        """Raises ``ExtractionError`` where the writer had to stop after the last step."""
        report = self._writer.close()
        # not the length of `lost`: ids may come again, and a detached instance hears of no further request
        num_without = summary.num_requests - report.num_written - report.num_present
        log = logger.warning if num_without or report.stopped else logger.info
        log(
            "hidden states: %d files (%d bytes) written to %s, %d were there, %d requests have none%s",
            report.num_written,
            report.num_bytes,
            self._folder,
            report.num_present,
            num_without,
            f"; stopped: {report.stopped}" if report.stopped else "",
        )
        self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        """Once: a detached instance still gets ``specplug_finish_session``."""
        if self.report.stopped is not None and not self._has_raised:
            self._has_raised = True
            raise ExtractionError(
                f"hidden states are no longer written: {self.report.stopped}; "
                f"{self.report.num_written} files in {self._folder} are complete"
            )

    def _take_settings(self, request: Request, extraction: _Extraction) -> Path:
        """The request's file; ``extraction`` gets what else it asks for. Raises ``ValueError`` for what cannot be."""
        given = _parameters(request)
        keeps_output = given.get("include_output_tokens")
        if isinstance(keeps_output, bool):
            extraction.keeps_output = keeps_output
        elif keeps_output is not None:
            raise ValueError(
                f"include_output_tokens={keeps_output!r} must be true or false, not a {type(keeps_output).__name__}"
            )
        return self._folder / _file_name(request.request_id, given.get("hidden_states_path"))

    def _wanted(self, batch: Batch) -> list[tuple[int, int]]:
        """(row, how many of its new tokens to keep) of the rows that have any."""
        wanted = []
        for row, request_id in enumerate(batch.request_ids):
            extraction = self._running.get(request_id)
            if extraction is None or extraction.lost is not None:
                continue
            count = len(batch.new_token_ids[row])
            if not extraction.keeps_output:
                count = min(count, extraction.num_prompt_tokens - extraction.num_tokens)
            if count > 0:
                wanted.append((row, count))
                extraction.num_tokens += count
        return wanted

    def _hand_over(self, batch: Batch, rows: Sequence[tuple[int, int]]) -> None:
        states, ready = _to_host(self._gathered(batch.new_hidden_states, rows))
        spans = tuple((batch.request_ids[row], batch.new_token_ids[row][:count]) for row, count in rows)
        if not self._writer.put_rows(Rows(states, ready, spans), wait=self._waits):
            for request_id, _ in spans:
                self._running[request_id].lost = "the queue for the disk was full"

    def _gathered(
        self, hidden_states: Mapping[int, tuple[torch.Tensor, ...]], rows: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """``[tokens, layers, hidden]``, fresh memory."""
        layers = [[hidden_states[layer][row][:count] for row, count in rows] for layer in self.hidden_state_layers]
        return torch.stack([parts[0] if len(parts) == 1 else torch.cat(parts) for parts in layers], dim=1)


def _parameters(request: Request) -> Mapping[str, Any]:
    """vLLM's place for a request's own settings."""
    given = request.sampling_params.extra_args.get("kv_transfer_params")
    return given if isinstance(given, Mapping) else {}


def _file_name(request_id: str, name: object) -> str:
    """The name asked for, or the one after the id. Raises ``ValueError`` for one that leads out of the folder."""
    if name is None:
        try:
            return f"hs_{quote(request_id, safe='')}.safetensors"
        except UnicodeEncodeError as error:
            raise ValueError(f"no file can be named after its id: {error}; give it a hidden_states_path") from error
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise ValueError(f"hidden_states_path={name!r} must be a plain file name ending in .safetensors")
    return name


def _to_host(states: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The states on the host, and the event after which they are there: the step does not wait for the copy."""
    if states.device.type != "cuda":
        return states.cpu(), None
    host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
    host.copy_(states, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, event
