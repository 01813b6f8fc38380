"""Which door serves which method, and how: the table of ``docs/doors/README.md``.

What a method needs is in the table of known methods; what a door shows is here. ``python -m specplug.adapters.support``
prints the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from specplug.config.known_methods import KNOWN_METHODS

__all__ = ["DOORS", "Door", "Need", "methods", "needs_of", "support_table", "supports"]

Need: TypeAlias = Literal["token_ids", "tokenizer", "hidden_states"]

_NEEDS: dict[str, frozenset[Need]] = {
    "none": frozenset({"token_ids"}),
    "class_path": frozenset({"token_ids"}),
    "draft": frozenset({"token_ids", "tokenizer"}),
    "head": frozenset({"token_ids", "hidden_states"}),
}
"""By what a method's ``model`` names."""
_READS_HIDDEN_STATES = frozenset({"extract_hidden_states"})


@dataclass(frozen=True, slots=True)
class Door:
    """A way in. ``shows``: what plugins learn of the target; the texts are for the table."""

    name: str
    page: str
    shows: frozenset[Need]
    requests: str
    verifies: str
    trees: str
    policies: str
    refused: str
    metrics: str


DOORS = (
    Door(
        "specplug.LLM",
        "../host.md",
        frozenset({"token_ids", "tokenizer", "hidden_states"}),
        requests="any number, continuous batching",
        verifies="specplug, every rule",
        trees="yes",
        policies="yes",
        refused="see [configuration](../configuration.md)",
        metrics="`get_metrics()`",
    ),
    Door(
        "transformers",
        "transformers.md",
        frozenset({"token_ids", "tokenizer", "hidden_states"}),
        requests="the rows of one `generate`",
        verifies="specplug, every rule",
        trees="yes",
        policies="yes",
        refused="beams, guidance, watermarks, scores and states in the output",
        metrics="`sessions(model)[-1].get_metrics()`",
    ),
    Door(
        "vLLM",
        "vllm.md",
        frozenset({"token_ids", "tokenizer"}),
        requests="any number, vLLM's batching",
        verifies="vLLM, tokens only",
        trees="no",
        policies="as shorter drafts",
        refused="min_p, logit_bias, own logits processors (by vLLM)",
        metrics="vLLM's, and `specplug:` ones beside them",
    ),
    Door(
        "llama-cpp-python",
        "llama_cpp.md",
        frozenset({"token_ids"}),
        requests="one",
        verifies="llama.cpp, tokens only",
        trees="no",
        policies="as shorter drafts",
        refused="recurrent models (by llama.cpp)",
        metrics="`draft_model.metrics()`",
    ),
)
"""The doors that are tested for real. SGLang's is tested against its sources only and is not one of them."""

_FACTS = {
    "requests": "requests at once",
    "verifies": "verifies",
    "trees": "trees",
    "policies": "policies (third-party)",
    "refused": "not with speculation",
    "metrics": "counts",
}


def methods() -> list[str]:
    """The methods of the table: those that specplug has a plugin for."""
    return [method for method, known in KNOWN_METHODS.items() if known.package is not None]


def needs_of(method: str) -> frozenset[Need]:
    """What a method of the table of known methods has to be shown."""
    if method in _READS_HIDDEN_STATES:
        return _NEEDS["head"]
    return _NEEDS[KNOWN_METHODS[method].model]


def supports(door: Door, method: str) -> bool:
    """Whether the method can run behind the door."""
    return needs_of(method) <= door.shows


def support_table() -> str:
    """The table as Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _row("", *(f"[{door.name}]({door.page})" for door in DOORS))
    yield _row(*["---"] * (len(DOORS) + 1))
    for method in methods():
        yield _row(f"`{method}`", *("yes" if supports(door, method) else "no" for door in DOORS))
    for name, title in _FACTS.items():
        yield _row(title, *(getattr(door, name) for door in DOORS))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(support_table())  # noqa: T201 - this is what it is run for
