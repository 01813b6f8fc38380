"""A draft model that is made in a moment and right often enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specplug.testing import tiny_llama


@pytest.fixture
def successor_draft(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Save a draft that says of each token which one follows it most often in some texts; its folder.

    Without another model's ``tokenizer`` its vocabulary is its own, learned from the texts. Its layers add nothing, so
    that the hidden state is the token's place among the tokens of the texts; the head holds their successors.
    """

    def save(texts: Sequence[str], *, tokenizer: str | None = None, **config: Any) -> str:
        words = AutoTokenizer.from_pretrained(tokenizer) if tokenizer else _byte_level(texts)
        successors = _successors([words(text, add_special_tokens=False).input_ids for text in texts])
        model = tiny_llama(
            vocab_size=len(words),
            hidden_size=4 * (len(successors) // 4 + 1),
            head_dim=8,
            num_hidden_layers=1,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            eos_token_id=words.eos_token_id,
            **config,
        )
        places, ids = torch.arange(len(successors)), torch.tensor(list(successors.items()))
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
            model.model.norm.weight.fill_(1.0)
            model.get_input_embeddings().weight[ids[:, 0], places] = 1.0
            model.get_output_embeddings().weight[ids[:, 1], places] = 1.0
        folder = str(tmp_path_factory.mktemp("draft"))
        model.save_pretrained(folder)
        words.save_pretrained(folder)
        return folder

    return save


def _byte_level(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def _successors(texts: Sequence[Sequence[int]]) -> dict[int, int]:
    """Token -> what follows it most often."""
    found: dict[int, Counter[int]] = {}
    for text in texts:
        for one, other in pairwise(text):
            found.setdefault(one, Counter())[other] += 1
    return {one: others.most_common(1)[0][0] for one, others in found.items()}
