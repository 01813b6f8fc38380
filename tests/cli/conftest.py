from __future__ import annotations

import string
from pathlib import Path

import pytest

from specplug.testing import EOS_TOKEN_ID, tiny_llama, toy_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama and a tokenizer of single characters."""
    texts = sorted(set(string.printable) - set("\r\x0b\x0c"))
    texts.insert(EOS_TOKEN_ID, "<end>")
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_llama(vocab_size=len(texts), max_position_embeddings=512).save_pretrained(folder)
    toy_tokenizer(texts).save_pretrained(folder)
    return folder
