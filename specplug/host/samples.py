"""Requests with ``n`` samples: each sample runs as a request of its own, and one output carries them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from specplug.host.outputs import CompletionOutput, OutputKind, RequestOutput
from specplug.host.request_state import RequestState

__all__ = ["SampleGroups", "sample_ids"]


def sample_ids(request_id: str, num_samples: int) -> list[str]:
    """What the samples are called inside the session; vLLM's form."""
    return [request_id] if num_samples == 1 else [f"{index}_{request_id}" for index in range(num_samples)]


@dataclass(slots=True)
class _Group:
    request_id: str
    sample_ids: list[str]
    output_kind: OutputKind
    latest: dict[int, CompletionOutput] = field(default_factory=dict)
    num_unfinished: int = 0


class SampleGroups:
    """The requests with several samples that are under way."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, _Group] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def add(self, request_id: str, states: Sequence[RequestState]) -> None:
        """Follow a request's samples; nothing to do for a single one."""
        if len(states) > 1:
            ids = [state.request_id for state in states]
            group = _Group(request_id, ids, states[0].output_kind, num_unfinished=len(ids))
            self._groups[request_id] = group
            self._group_of.update(dict.fromkeys(ids, group))

    def ids_of(self, request_id: str) -> list[str]:
        """The session's ids of a request's samples; its own id when it has one sample."""
        return list(self._groups[request_id].sample_ids) if request_id in self._groups else [request_id]

    def merge(self, outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
        """Put the samples' outputs together: one output a request, with all its samples so far."""
        merged: list[RequestOutput] = []
        wholes: dict[str, RequestOutput] = {}
        for output in outputs:
            group = self._group_of.get(output.request_id)
            if group is None:
                merged.append(output)
                continue
            whole = self._add_sample(group, output)
            if whole.finished or group.output_kind != "final_only":
                wholes[group.request_id] = whole
        return merged + list(wholes.values())

    def _add_sample(self, group: _Group, output: RequestOutput) -> RequestOutput:
        [sample] = output.outputs
        group.latest[sample.index] = sample
        if output.finished:
            group.num_unfinished -= 1
            del self._group_of[output.request_id]
        if not group.num_unfinished:
            del self._groups[group.request_id]
        samples = [group.latest[index] for index in sorted(group.latest)]
        return replace(output, request_id=group.request_id, outputs=samples, finished=not group.num_unfinished)
