"""Who gets which output: a call of ``generate`` or ``stream`` those of its own requests, ``step()`` all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

from specplug.host.outputs import RequestOutput

__all__ = ["Delivery", "Inbox"]

Inbox: TypeAlias = deque[RequestOutput]


class Delivery:
    """Outputs on their way to those who wait for them, whoever runs the step that made them."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}
        self._unwanted: set[str] = set()
        self._unowned: Inbox = deque()

    def __contains__(self, request_id: str) -> bool:
        """Whether the id belongs to a call that is under way."""
        return request_id in self._inboxes or request_id in self._unwanted

    @property
    def has_unowned(self) -> bool:
        return bool(self._unowned)

    def open(self, request_ids: Iterable[str]) -> Inbox:
        """An inbox for the outputs of these requests."""
        inbox: Inbox = deque()
        self._inboxes.update(dict.fromkeys(request_ids, inbox))
        return inbox

    def close(self, request_ids: Iterable[str], unfinished: Iterable[str]) -> None:
        """The call is over; what may still come of ``unfinished`` requests is for nobody."""
        for request_id in request_ids:
            self._inboxes.pop(request_id, None)
        self._unwanted.update(unfinished)

    def put(self, outputs: Iterable[RequestOutput]) -> None:
        """Hand outputs to their inboxes, in order."""
        for output in outputs:
            if output.request_id not in self._unwanted:
                self._inboxes.get(output.request_id, self._unowned).append(output)
            elif output.finished:
                self._unwanted.discard(output.request_id)

    def take_unowned(self) -> list[RequestOutput]:
        """The outputs of requests that were added one by one, each once."""
        taken = list(self._unowned)
        self._unowned.clear()
        return taken
