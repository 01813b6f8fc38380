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
from specplug_hidden_states.writer import Begin, End, Report, Rows, Writer

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
        given = _parameters(request)
        keeps_output = bool(given.get("include_output_tokens", self._keeps_output))
        extraction = _Extraction(len(request.prompt_token_ids), keeps_output)
        self._running[request.request_id] = extraction
        path, extraction.lost = self._path(request, given.get("hidden_states_path"))
        if extraction.lost is None:
            self._writer.put(Begin(request.request_id, path, request.prompt_token_ids.tolist()))
        else:
            self.report.lost[request.request_id] = extraction.lost
            logger.warning("no hidden states of request %s: %s", request.request_id, extraction.lost)

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        """Raises ``ExtractionError`` once the writer had to stop."""
        if self.report.stopped is not None:
            raise ExtractionError(
                f"hidden states are no longer written: {self.report.stopped}; "
                f"{self.report.num_written} files in {self._folder} are complete"
            )
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
        report = self._writer.close()
        log = logger.warning if report.lost or report.stopped else logger.info
        log(
            "hidden states: %d files (%d bytes) written to %s, %d were there, %d requests have none%s",
            report.num_written,
            report.num_bytes,
            self._folder,
            report.num_present,
            len(report.lost),
            f"; stopped: {report.stopped}" if report.stopped else "",
        )

    def _path(self, request: Request, name: object) -> tuple[Path, str | None]:
        """The request's file, or why it cannot have one. A name may not lead out of the folder."""
        if name is None:
            return self._folder / f"hs_{quote(request.request_id, safe='')}.safetensors", None
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            return (
                self._folder,
                f"hidden_states_path={name!r} must be a plain file name ending in .safetensors",
            )
        return self._folder / name, None

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


def _to_host(states: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The states on the host, and the event after which they are there: the step does not wait for the copy."""
    if states.device.type != "cuda":
        return states.cpu(), None
    host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
    host.copy_(states, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, event
