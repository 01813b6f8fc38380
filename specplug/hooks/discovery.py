"""Finding installed plugins by their metadata, without importing any of them."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions

from specplug.hooks.markers import PROJECT

__all__ = ["Candidate", "Found", "discover"]

logger = logging.getLogger("specplug")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One entry point and the distribution that declares it."""

    entry_point: EntryPoint
    distribution: str
    version: str
    location: str
    """The folder on the import path that holds the distribution's metadata; "" when unknown."""

    @property
    def origin(self) -> str:
        """``distribution version``."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class Found:
    """The distinct claims on one name. More than one is a conflict."""

    candidates: tuple[Candidate, ...]
    shadowed: tuple[Candidate, ...] = ()
    """Other copies of the same distribution, later on the import path: Python imports the first, and so do we."""


def discover(entry_points: Iterable[EntryPoint] | None = None, *, group: str = PROJECT) -> Mapping[str, Found]:
    """Every name of an entry-point group (or of ``entry_points``), sorted, with who claims it."""
    pairs = _installed(group) if entry_points is None else ((each, each.dist) for each in entry_points)
    by_name: dict[str, list[Candidate]] = {}
    for entry_point, distribution in pairs:
        by_name.setdefault(entry_point.name, []).append(_candidate(entry_point, distribution))
    return {name: _distinct(by_name[name]) for name in sorted(by_name)}


def _installed(group: str) -> Iterator[tuple[EntryPoint, Distribution]]:
    for distribution in distributions():
        for entry_point in _entry_points(distribution):
            if entry_point.group == group:
                yield entry_point, distribution


def _entry_points(distribution: Distribution) -> Iterable[EntryPoint]:
    try:
        return distribution.entry_points
    except (TypeError, ValueError, OSError) as error:  # a stranger's broken metadata keeps nobody else from loading
        location = distribution.locate_file("")
        logger.warning("the entry points of a distribution in %s cannot be read and are ignored: %r", location, error)
        return ()


def _candidate(entry_point: EntryPoint, distribution: Distribution | None) -> Candidate:
    if distribution is None:
        return Candidate(entry_point, "unknown distribution", "(no version)", "")
    name: str | None = None
    version: str | None = None
    with contextlib.suppress(KeyError, TypeError, OSError):  # a folder without a readable METADATA still counts
        name, version = distribution.metadata["Name"], distribution.version
    location = str(distribution.locate_file(""))
    return Candidate(entry_point, name or "unknown distribution", version or "(no version)", location)


def _distinct(candidates: Sequence[Candidate]) -> Found:
    kept: list[Candidate] = []
    shadowed: list[Candidate] = []
    for candidate in candidates:
        copies = [each for each in kept if _normalised(each) == _normalised(candidate)]
        if any(_is_same(each, candidate) for each in copies):
            continue
        if any(each.location != candidate.location for each in copies):
            shadowed.append(candidate)
        else:
            kept.append(candidate)
    return Found(tuple(kept), tuple(shadowed))


def _is_same(one: Candidate, other: Candidate) -> bool:
    return (one.version, one.entry_point.value) == (other.version, other.entry_point.value)


def _normalised(candidate: Candidate) -> str:
    return re.sub(r"[-_.]+", "-", candidate.distribution).lower()
