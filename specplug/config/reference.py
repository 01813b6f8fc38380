"""The tables of ``docs/configuration.md``, made from the models: ``python -m specplug.config.reference``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import groupby

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specplug.config.engine import EngineArgs
from specplug.config.engine_terms import ENGINE_TERMS
from specplug.config.keys import Key, expectation, key_of, show
from specplug.config.known_methods import KNOWN_METHODS, MODEL_METHODS
from specplug.config.schema import SpeculativeConfig

__all__ = ["reference_tables"]

_SHAPES = {
    "synthetic_acceptance_rates": "a list of numbers from 0 to 1",
    "num_speculative_tokens_per_batch_size": "a list of [first, last, K]",
}

_UNSERVED = frozenset(name for name, known in KNOWN_METHODS.items() if known.package is None)


def reference_tables() -> dict[str, str]:
    """Heading -> Markdown table, for every group of keys and arguments."""
    tables = {f"speculative_config: {group}": rows for group, rows in _grouped(SpeculativeConfig)}
    tables |= {f"engine arguments that act: {group}": rows for group, rows in _grouped(EngineArgs)}
    tables["engine arguments accepted without effect"] = _terms(ENGINE_TERMS, "accepted")
    tables["engine arguments refused"] = _terms(ENGINE_TERMS, "refused")
    return tables


def _grouped(model: type[BaseModel]) -> Iterable[tuple[str, str]]:
    def group(item: tuple[str, FieldInfo]) -> str:
        return key_of(item[1]).group

    for name, items in groupby(model.model_fields.items(), group):
        lines = ["| key | type | default | term | meaning |", "|---|---|---|---|---|"]
        lines += [_row(key, field) for key, field in items]
        yield name, "\n".join(lines)


def _row(key: str, field: FieldInfo) -> str:
    rule = key_of(field)
    kind = _SHAPES.get(key) or expectation(field) or "any"
    default = "required" if field.is_required() else show(field.get_default(call_default_factory=True))
    term = rule.term if rule.term == "acts" else f"{rule.term}: {rule.why}"
    return f"| `{key}` | {kind} | `{default}` | {term} | {field.description}{_readers(rule)} |"


def _readers(rule: Key) -> str:
    if rule.used_by is None:
        return ""
    names = rule.used_by
    listed = sorted(names - MODEL_METHODS if names >= MODEL_METHODS else names - _UNSERVED)
    if names >= MODEL_METHODS:
        listed.append("every method with a model")
    return f" Read by {', '.join(listed)}." if listed else ""


def _terms(terms: Mapping[str, Key], term: str) -> str:
    """One row per reason: many arguments share one."""
    by_reason: dict[tuple[str, str, tuple[object, ...]], list[str]] = {}
    for name, key in terms.items():
        if key.term == term:
            by_reason.setdefault((key.group, key.why, key.neutral), []).append(f"`{name}`")
    head = "no effect, because" if term == "accepted" else "refused, because"
    lines = [f"| group | arguments | {head} | values that pass |", "|---|---|---|---|"]
    for (group, why, neutral), names in by_reason.items():
        passing = "any" if term == "accepted" else ", ".join(f"`{show(value)}`" for value in (None, *neutral))
        lines.append(f"| {group} | {' '.join(names)} | {why} | {passing} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(f"### {heading}\n\n{table}" for heading, table in reference_tables().items()) + "\n")
