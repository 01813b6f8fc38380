"""Real tokenizers of the families that differ, trained on a few lines, and tiny models that go with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specplug.demo.models import GEMMA3, SMOLLM2, gemma3_path, smollm2_path
from specplug.testing import tiny_llama
from specplug.tli import Vocabulary

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the other dog sleeps on.",
    "def add(first, second):\n    return first + second\n\n\nprint(add(1, 2))\n",
    "Größe, Übung, déjà vu, naïve café; 東京は日本の首都です。 ¡Hola! ¿Qué tal?",
    '{"name": "value", "list": [1, 2, 3], "other": null}\n',
] * 3


def byte_level(size: int = 480, *, specials: Sequence[str] = ("<|begin|>", "<|end|>")) -> PreTrainedTokenizerBase:
    """Byte-level BPE; its tokenizer writes no beginning."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=specials[0], eos_token=specials[1])


def sentencepiece(size: int = 560, *, has_prefix: bool = False) -> PreTrainedTokenizerBase:
    """BPE over characters with a marker for spaces and byte fallback; its tokenizer writes a beginning.

    ``has_prefix``: a text is encoded as if a space stood before it, which decoding takes off again (Llama 2).
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if has_prefix else "never")
    trained.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=size - 259, show_progress=False))
    learned = trained.get_vocab()
    tokens = ["<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += sorted(learned, key=lambda token: learned[token])
    merges = _merges(trained)
    tokenizer = Tokenizer(
        models.BPE(
            {token: number for number, token in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if has_prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    return fast


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    import json

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in merges]


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    return {
        "bytes": byte_level(),
        "small bytes": byte_level(300, specials=("<s>", "</s>")),
        "marked": sentencepiece(),
        "prefixed": sentencepiece(600, has_prefix=True),
    }


@pytest.fixture(scope="session")
def vocabulary(tokenizers: dict[str, PreTrainedTokenizerBase]) -> Callable[[str], Vocabulary]:
    return lambda name: Vocabulary(tokenizers[name], len(tokenizers[name]))


@pytest.fixture(scope="session")
def side() -> Callable[..., Any]:
    """What a space is opened between: a model's tokenizer and size."""
    return lambda tokenizer, vocab_size=None: SimpleNamespace(
        tokenizer=tokenizer, vocab_size=vocab_size or len(tokenizer), model=None, eos_token_ids=frozenset()
    )


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """A tiny random model for a tokenizer, with some rows more than it has ids."""

    def make(tokenizer: Any, *, padding: int = 3, **settings: Any) -> Any:
        return tiny_llama(
            vocab_size=len(tokenizer) + padding,
            eos_token_id=tokenizer.eos_token_id,
            max_position_embeddings=512,
            **settings,
        )

    return make


@pytest.fixture
def real_tokenizers() -> Callable[[], dict[str, Any]]:
    """Those of SmolLM2 and Gemma 3, where their packages are installed."""

    def load() -> dict[str, Any]:
        for package in (SMOLLM2, GEMMA3):
            if not package.is_installed():
                pytest.skip(f"{package.name} is not installed: {package.install}")
        folders = {"smollm2": smollm2_path(), "gemma3": gemma3_path()}
        return {name: AutoTokenizer.from_pretrained(folder) for name, folder in folders.items()}

    return load
