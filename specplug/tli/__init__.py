"""Draft models with another tokenizer than the target's: token-level intersection on bytes (``docs/methods/tli.md``).

Importing this package does not import torch.
"""

from __future__ import annotations

from specplug.tli.mapping import VocabularyMap, is_same_vocabulary, match_vocabularies
from specplug.tli.plugin import TliPlugin, open_space
from specplug.tli.vocabulary import Vocabulary

__all__ = ["TliPlugin", "Vocabulary", "VocabularyMap", "is_same_vocabulary", "match_vocabularies", "open_space"]
