"""Which draft ids stand for the same bytes, or play the same role, as which target ids.

Token-level intersection (Timor et al. 2025): a draft restricted to the shared tokens and renormalised is verified in
the target's vocabulary as any other. Any injective map keeps the output exact; a wrong pair would only be a draft that
the draft model did not mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specplug.errors import ConfigError
from specplug.tli.vocabulary import Vocabulary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["VocabularyMap", "is_same_vocabulary", "match_vocabularies"]


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyMap:
    """An injective map between two vocabularies.

    ``target_to_draft_ids`` ``[target ids]`` and ``draft_to_target_ids`` ``[draft ids]`` int64, -1 where there is no
    counterpart. ``num_by_bytes``: pairs of equal bytes; ``roles``: role -> (target id, draft id), paired beside them.
    """

    target_to_draft_ids: NDArray[np.int64]
    draft_to_target_ids: NDArray[np.int64]
    num_by_bytes: int
    roles: Mapping[str, tuple[int, int]]

    @property
    def num_shared(self) -> int:
        """Ids of either side that have a counterpart."""
        return self.num_by_bytes + len(self.roles)


def match_vocabularies(target: Vocabulary, draft: Vocabulary) -> VocabularyMap:
    """Pair equal bytes, one id of each side, and equal roles. Raises ``ConfigError`` where no bytes are shared.

    The smaller vocabulary is read and its tokens are looked up in the larger, which is never read as a whole.
    """
    is_target_smaller = target.num_tokens <= draft.num_tokens
    small, large = (target, draft) if is_target_smaller else (draft, target)
    pairs = [(token_id, other) for data, token_id in small.ids.items() if (other := large.id_of(data)) is not None]
    if not is_target_smaller:
        pairs = [(other, token_id) for token_id, other in pairs]
    if not pairs:
        raise ConfigError(
            "speculative_config.use_heterogeneous_vocab: no token of the draft's vocabulary "
            f"({draft.num_tokens} tokens, {draft.spelling.name}) has the bytes of one of the target's "
            f"({target.num_tokens}, {target.spelling.name}); take another draft model"
        )
    return _as_map(target, draft, pairs)


def _as_map(target: Vocabulary, draft: Vocabulary, pairs: list[tuple[int, int]]) -> VocabularyMap:
    import numpy as np

    roles = {role: (token_id, draft.roles[role]) for role, token_id in target.roles.items() if role in draft.roles}
    target_ids, draft_ids = np.array([*pairs, *roles.values()], dtype=np.int64).T
    to_draft = np.full(target.num_ids, -1, dtype=np.int64)
    to_target = np.full(draft.num_ids, -1, dtype=np.int64)
    to_draft[target_ids] = draft_ids
    to_target[draft_ids] = target_ids
    return VocabularyMap(to_draft, to_target, len(pairs), roles)


def is_same_vocabulary(target: Any, draft: Any) -> bool:
    """Whether two tokenizers give every token the same id, so that no map is needed."""
    return len(target) == len(draft) and bool(target.get_vocab() == draft.get_vocab())
