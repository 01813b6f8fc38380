"""Counting, logging once, and (when strict) raising what plugins do wrong in a session."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from specplug.errors import PluginFaultError

__all__ = ["FaultLog", "Malformed"]

logger = logging.getLogger("specplug")


class Malformed(Exception):
    """An answer that breaks the contract: ``what`` (part of the reason), the value seen, and what to do."""

    def __init__(self, what: str, seen: str, advice: str) -> None:
        super().__init__(f"{seen}; {advice}")
        self.what = what
        self.seen = seen
        self.advice = advice


class FaultLog:
    """The faults of one session, by reason: ``<hook>_<what>:<plugin>``, such as ``propose_raised:ngram``."""

    def __init__(self, *, strict: bool, describe: Callable[[str], str]) -> None:
        """``describe`` gives a plugin's distribution and version, "" when unknown; asked at a fault only."""
        self._strict = strict
        self._describe = describe
        self._recent: Counter[str] = Counter()
        self._total: Counter[str] = Counter()

    @property
    def total(self) -> Mapping[str, int]:
        """Counts of the whole session."""
        return dict(self._total)

    def take(self) -> dict[str, int]:
        """Counts since the last call."""
        taken = dict(self._recent)
        self._recent.clear()
        return taken

    def count(
        self, plugin: str, hook: str, what: str, seen: str, advice: str, *, cause: BaseException | None = None
    ) -> None:
        """Count a fault and log its first occurrence."""
        reason = f"{hook.removeprefix('specplug_')}_{what}:{plugin}"
        self._recent[reason] += 1
        self._total[reason] += 1
        if self._total[reason] == 1:
            text = self._text(plugin, hook, seen, advice)
            logger.warning("%s (reason %s, logged once)", text, reason, exc_info=cause)

    def record(
        self, plugin: str, hook: str, what: str, seen: str, advice: str, *, cause: BaseException | None = None
    ) -> None:
        """Count a fault as ``count`` does; then raise ``PluginFaultError`` in a strict session."""
        self.count(plugin, hook, what, seen, advice, cause=cause)
        if self._strict:
            raise PluginFaultError(self._text(plugin, hook, seen, advice)) from cause

    def _text(self, plugin: str, hook: str, seen: str, advice: str) -> str:
        origin = self._describe(plugin)
        return f'plugin "{plugin}"{f" ({origin})" if origin else ""}: {hook}: {seen}; {advice}'
