"""What a pair of vocabularies promises: how much of a text can be drafted, and what comparing strings would lose."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files

from specplug.errors import ConfigError
from specplug.tli.mapping import VocabularyMap, match_vocabularies
from specplug.tli.spelling import MARKER
from specplug.tli.vocabulary import Vocabulary

__all__ = [
    "Coverage",
    "PairReport",
    "StringMatch",
    "measure_coverage",
    "report_pair",
    "sample_text",
    "string_pairs",
]

_NUM_EXAMPLES = 8
_BYTE_SPACE = "Ġ"


@dataclass(frozen=True, slots=True)
class Coverage:
    """Tokens of a text, as the target writes it, and those of them that could be drafted; the same in bytes."""

    num_tokens: int
    num_covered_tokens: int
    num_bytes: int
    num_covered_bytes: int

    @property
    def token_share(self) -> float:
        """The ceiling of the acceptance rate: where the target wants another token, no draft can be right."""
        return self.num_covered_tokens / self.num_tokens if self.num_tokens else 0.0

    @property
    def byte_share(self) -> float:
        """Share of the text that lies in such tokens."""
        return self.num_covered_bytes / self.num_bytes if self.num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class StringMatch:
    """What pairing equal token strings gives, with the space marker made equal, as other implementations do.

    ``num_wrong``: pairs that stand for different bytes. ``num_lost``: pairs of equal bytes that it misses, a few of
    them in ``lost``. ``coverage``: through its right pairs.
    """

    num_pairs: int
    num_wrong: int
    num_lost: int
    lost: tuple[bytes, ...]
    coverage: Coverage


@dataclass(frozen=True, slots=True)
class PairReport:
    """``num_shared`` ids of either side have a counterpart: ``num_by_bytes`` and those of ``roles``.

    ``roles``: declared role -> (target's token, draft's token), None where a side declares none; ``shared_roles``:
    those that are paired. ``num_duplicates``: draft ids masked because a lower one has the same bytes.
    """

    num_shared: int
    num_by_bytes: int
    num_duplicates: int
    roles: Mapping[str, tuple[str | None, str | None]]
    shared_roles: tuple[str, ...]
    coverage: Coverage
    strings: StringMatch


def sample_text() -> str:
    """A page of English, code, JSON, a table, and six other languages."""
    return files("specplug.tli").joinpath("sample.txt").read_text(encoding="utf-8")


def report_pair(target: Vocabulary, draft: Vocabulary, text: str) -> PairReport:
    """Measure a pair on a text. Raises ``ConfigError`` where nothing is shared."""
    shared = match_vocabularies(target, draft)
    covered = {token_id for token_id in range(target.num_ids) if shared.target_to_draft_ids[token_id] >= 0}
    num_duplicates = sum(1 for _, data in draft.items() if target.id_of(data) is not None) - shared.num_by_bytes
    return PairReport(
        num_shared=shared.num_shared,
        num_by_bytes=shared.num_by_bytes,
        num_duplicates=num_duplicates,
        roles=_roles(target, draft),
        shared_roles=tuple(shared.roles),
        coverage=measure_coverage(target, covered, text),
        strings=_match_strings(target, draft, shared, text),
    )


def measure_coverage(target: Vocabulary, covered: Collection[int], text: str) -> Coverage:
    """How much of ``text`` lies in target tokens that are among ``covered``.

    Raises ``ConfigError`` where the target's tokenizer has no tokens for the text.
    """
    try:
        found = target.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
    except Exception as error:
        raise ConfigError(f"the target's tokenizer cannot encode the text: {error}; give a text of its own") from error
    ids: list[int] = found.input_ids
    sizes = [len(target.bytes_of(token_id)) for token_id in ids]
    inside = [size for token_id, size in zip(ids, sizes, strict=True) if token_id in covered]
    return Coverage(len(ids), len(inside), sum(sizes), sum(inside))


def _roles(target: Vocabulary, draft: Vocabulary) -> dict[str, tuple[str | None, str | None]]:
    names = [*target.roles, *(role for role in draft.roles if role not in target.roles)]
    return {role: (_token(target, role), _token(draft, role)) for role in names}


def _token(vocabulary: Vocabulary, role: str) -> str | None:
    token_id = vocabulary.roles.get(role)
    return None if token_id is None else str(vocabulary.tokenizer.convert_ids_to_tokens(token_id))


def _match_strings(target: Vocabulary, draft: Vocabulary, shared: VocabularyMap, text: str) -> StringMatch:
    pairs = string_pairs(target, draft)
    wrong = [t for t, d in pairs.items() if target.bytes_of(t) != draft.bytes_of(d)]
    right = pairs.keys() - wrong
    missed = [t for t in _by_bytes(shared) if t not in right]
    return StringMatch(
        num_pairs=len(pairs),
        num_wrong=len(wrong),
        num_lost=len(missed),
        lost=tuple(target.bytes_of(t) for t in missed[:_NUM_EXAMPLES]),
        coverage=measure_coverage(target, right, text),
    )


def _by_bytes(shared: VocabularyMap) -> Iterator[int]:
    """Target ids that are paired for their bytes."""
    by_role = {target_id for target_id, _ in shared.roles.values()}
    paired = (shared.target_to_draft_ids >= 0).nonzero()[0].tolist()
    return (token_id for token_id in paired if token_id not in by_role)


def string_pairs(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Target id -> draft id for equal strings, the first id of each; special tokens as any others."""
    first: dict[str, int] = {}
    for token, token_id in sorted(draft.tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if token_id < draft.num_ids:
            first.setdefault(_without_marker(token, draft), token_id)
    pairs: dict[int, int] = {}
    seen: set[str] = set()
    for token, token_id in sorted(target.tokenizer.get_vocab().items(), key=lambda item: item[1]):
        name = _without_marker(token, target)
        if token_id < target.num_ids and name in first and name not in seen:
            seen.add(name)
            pairs[token_id] = first[name]
    return pairs


def _without_marker(token: str, vocabulary: Vocabulary) -> str:
    marker = _BYTE_SPACE if vocabulary.spelling.name == "byte-level BPE" else MARKER
    return f" {token[len(marker) :]}" if token.startswith(marker) else token
