"""The thread that writes: orders come in through a queue that is bounded in bytes, files grow, failures are kept."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from specplug_hidden_states.files import GrowingFile, file_problem, layers_text, size_of_files

if TYPE_CHECKING:
    import torch

__all__ = ["Begin", "End", "Lose", "Report", "Rows", "Writer"]

logger = logging.getLogger(__name__)

_WAKE_BYTES = 1 << 20
"""What a step adds may wait until it is worth a write: waking the thread takes time from the step."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A request starts; ``path`` is the file it is to have."""

    key: str
    path: Path
    prompt_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The states of one step. ``states``: ``[tokens, layers, hidden]`` on the host, complete once ``ready`` is;
    ``spans``: (request, its token ids) in the order of the states."""

    states: torch.Tensor
    ready: Any
    spans: tuple[tuple[str, list[int]], ...]

    @property
    def num_bytes(self) -> int:
        return self.states.numel() * self.states.element_size()


@dataclass(frozen=True, slots=True)
class End:
    """A request left; ``reason`` says why its file is given up, None completes it."""

    key: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Lose:
    """A request starts that cannot have a file; ``reason`` says why."""

    key: str
    reason: str


Order: TypeAlias = Begin | Rows | End | Lose


@dataclass
class Report:
    """What became of the requests: files written, files that were complete before, and why others have none."""

    num_written: int = 0
    num_bytes: int = 0
    num_present: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    """Request -> why its file is not there, of the last request of that id."""
    stopped: str | None = None
    """Why extraction ended before the session: the limit was reached or the disk failed."""


class Writer:
    """Writes files in ``folder`` on a thread of its own, in the order of what it is given.

    ``queue_bytes``: most bytes of states that wait; one step may always wait alone. ``max_bytes``: of all
    hidden-state files in the folder, None for no bound.
    """

    def __init__(self, folder: Path, layers: Sequence[int], *, queue_bytes: int, max_bytes: int | None) -> None:
        self.report = Report()
        self._folder = folder
        self._layers = tuple(layers)
        self._queue_bytes = queue_bytes
        self._max_bytes = max_bytes
        self._orders: deque[Order | None] = deque()
        self._num_waiting_bytes = 0
        self._changed = threading.Condition()
        self._files: dict[str, GrowingFile | None] = {}
        self._num_used_bytes = 0
        self._thread = threading.Thread(target=self._run, name="specplug-hidden-states", daemon=True)

    def start(self) -> None:
        """Make the folder and start the thread. Raises ``OSError`` for a folder that cannot be made."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._num_used_bytes = size_of_files(self._folder) if self._max_bytes is not None else 0
        self._thread.start()

    def close(self) -> Report:
        """Write what waits, give up files that no request ended, and stop."""
        if self._thread.is_alive():
            self._put(None)
            self._thread.join()
        return self.report

    def put(self, order: Begin | End | Lose) -> None:
        """Queue an order that costs no memory to speak of."""
        self._put(order)

    def put_rows(self, rows: Rows, *, wait: bool) -> bool:
        """Queue a step's states. Where they do not fit: wait until they do, or, without ``wait``, return False."""
        size = rows.num_bytes
        with self._changed:
            if not self._fits(size):
                if not wait:
                    return False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._fits(size))
            self._orders.append(rows)
            self._num_waiting_bytes += size
            if not wait or self._num_waiting_bytes >= _WAKE_BYTES:
                self._changed.notify_all()
        return True

    def _fits(self, num_bytes: int) -> bool:
        return not self._num_waiting_bytes or self._num_waiting_bytes + num_bytes <= self._queue_bytes

    def _put(self, order: Order | None) -> None:
        with self._changed:
            self._orders.append(order)
            self._changed.notify_all()

    # --- on the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (order := self._next()) is not None:
            try:
                self._follow(order)
            except Exception as error:  # noqa: BLE001 - a thread that died would let the session wait for ever
                is_expected = isinstance(error, OSError | _LimitError)
                self._stop(str(error) if is_expected else f"{type(error).__name__}: {error}")
            finally:
                self._done(order)
        for key in list(self._files):
            self._give_up(key, "the session ended before the request did")

    def _next(self) -> Order | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._orders))
            return self._orders.popleft()

    def _done(self, order: Order) -> None:
        if isinstance(order, Rows):
            with self._changed:
                self._num_waiting_bytes -= order.num_bytes
                self._changed.notify_all()

    def _follow(self, order: Order) -> None:
        if isinstance(order, Begin):
            self._begin(order)
        elif isinstance(order, Rows):
            self._write(order)
        elif isinstance(order, Lose):
            self._lose(order.key, order.reason)
        elif order.reason is None:
            self._finish(order.key)
        else:
            self._give_up(order.key, order.reason)

    def _begin(self, order: Begin) -> None:
        self._files[order.key] = None
        if self.report.stopped is not None:
            self.report.lost[order.key] = self.report.stopped
            return
        try:
            file = self._files[order.key] = self._opened(order)
        except Exception as error:  # noqa: BLE001 - an odd name or an odd file there: this request's loss only
            self._lose(order.key, f"its file cannot be made: {error}")
        else:
            self._reserve(0 if file is None else file.num_bytes)

    def _opened(self, order: Begin) -> GrowingFile | None:
        """The request's file; None where there is one of that name already. Raises ``OSError``, ``ValueError``."""
        if any(file is not None and file.path == order.path for file in self._files.values()):
            self._lose(order.key, f"another request is being written to {order.path.name}; give each its own name")
            return None
        if not order.path.exists():
            metadata = {"layers": layers_text(self._layers), "num_prompt_tokens": str(len(order.prompt_token_ids))}
            return GrowingFile(order.path, metadata)
        problem = file_problem(order.path, order.prompt_token_ids, self._layers)
        if problem is None:
            self.report.num_present += 1
            self.report.lost.pop(order.key, None)
        else:
            self._lose(order.key, f"{problem}; choose another folder or name, or remove it")
        return None

    def _write(self, rows: Rows) -> None:
        if rows.ready is not None:
            rows.ready.synchronize()
        start = 0
        for key, token_ids in rows.spans:
            stop = start + len(token_ids)
            file = self._files.get(key)
            if file is not None:
                states = rows.states[start:stop]
                self._reserve(states.numel() * states.element_size() + 8 * len(token_ids))
                file.append(states, token_ids)
            start = stop

    def _reserve(self, num_bytes: int) -> None:
        self._num_used_bytes += num_bytes
        if self._max_bytes is not None and self._num_used_bytes > self._max_bytes:
            raise _LimitError(
                f"the files in {self._folder} would pass extract_hidden_states_max_bytes={self._max_bytes}"
            )

    def _finish(self, key: str) -> None:
        file = self._files.get(key)
        if file is not None:
            file.complete()  # what fails here is the disk, and stops the writer
            try:
                file.take_name()
            except OSError as error:
                if not self._folder.is_dir():
                    raise
                self._give_up(key, f"its file cannot get its name: {error}")
            else:
                self.report.num_written += 1
                self.report.num_bytes += file.num_bytes
                self.report.lost.pop(key, None)
        self._files.pop(key, None)

    def _give_up(self, key: str, reason: str) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            file.discard()
            self._num_used_bytes -= file.num_bytes
            self._lose(key, reason)

    def _lose(self, key: str, reason: str) -> None:
        self.report.lost[key] = reason
        logger.warning("no hidden states of request %r: %s", key, reason)

    def _stop(self, reason: str) -> None:
        """The disk failed or is used up: what is under way is given up, later orders are not followed."""
        self.report.stopped = reason
        for key in list(self._files):
            self._give_up(key, reason)


class _LimitError(RuntimeError):
    """The folder would grow past its bound."""
