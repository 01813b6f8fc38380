"""Drafts and heads that do not fit the target, told from their folders before any weights load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specplug.config import resolve_engine_args
from specplug.config.vocabularies import read_vocabulary
from specplug.testing import toy_tokenizer

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "vocab_size": 8,
}
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"model_type": "eagle", "model": {"hidden_size": 64, "vocab_size": 8}},
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "vocab_size": 8},
    "mlp_speculator": {"model_type": "mlp_speculator", "emb_dim": 64, "vocab_size": 8},
    "medusa": {"model_type": "medusa", "hidden_size": 64, "vocab_size": 8},
}
WIDTHS = {"mlp_speculator": "emb_dim"}


def letters(text: str) -> Any:
    """A tokenizer whose token i is the text's letter i."""
    return toy_tokenizer(list(text))


@pytest.fixture
def pair(checkpoint: Any) -> Any:
    """A configuration and the engine arguments for two folders; tokens: the tokenizers' (None: no file)."""

    def build(
        draft: dict[str, Any],
        target: dict[str, Any] = TARGET,
        *,
        tokens: tuple[str | None, str | None] = (None, None),
        engine: dict[str, Any] | None = None,
        **keys: Any,
    ) -> tuple[dict[str, Any], Any]:
        folders = checkpoint("draft", **draft), checkpoint("target", **target)
        for folder, texts in zip(folders, tokens, strict=True):
            if texts is not None:
                letters(texts).save_pretrained(folder)
        return {"model": folders[0], "num_speculative_tokens": 2, **keys}, resolve_engine_args(
            folders[1], engine or {}
        )[0]

    return build


@pytest.mark.parametrize("method", HEADS)
def test_a_head_of_the_targets_sizes_fits(resolve: Any, pair: Any, method: str) -> None:
    config, engine = pair(HEADS[method])
    assert resolve(config, engine=engine).method == method


@pytest.mark.parametrize("method", HEADS)
def test_a_head_for_wider_states_is_told_with_both_widths(fault: Any, pair: Any, method: str) -> None:
    head = dict(HEADS[method])
    if "model" in head:
        head["model"] = {**head["model"], "hidden_size": 96}
    else:
        head[WIDTHS.get(method, "hidden_size")] = 96
    config, engine = pair(head)
    text = fault(config, engine=engine)
    assert text.startswith(f'speculative_config.model="{config["model"]}" does not fit the target "{engine.model}": ')
    assert "it reads states of width 96, the target's are 64 wide" in text
    assert "point model to a head for this target, or run the head's own" in text


def reading(layers: Any, *, is_nested: bool) -> dict[str, Any]:
    named = {"eagle_aux_hidden_state_layer_ids": layers}
    return HEADS["eagle3"] | ({"eagle_config": named} if is_nested else named)


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("layers", [[0, 2, 4], None, [], "odd", ["odd"]], ids=str)
def test_layers_that_the_target_has(resolve: Any, pair: Any, layers: Any, is_nested: bool) -> None:
    """What is odd is told by who reads the checkpoint."""
    config, engine = pair(reading(layers, is_nested=is_nested), TARGET | {"num_hidden_layers": 4})
    assert resolve(config, engine=engine).method == "eagle3"


@pytest.mark.parametrize("is_nested", [False, True])
def test_layers_that_the_target_does_not_have(fault: Any, pair: Any, is_nested: bool) -> None:
    config, engine = pair(reading([0, 5, 2], is_nested=is_nested), TARGET | {"num_hidden_layers": 4})
    text = fault(config, engine=engine)
    assert "it reads layer 5 (eagle_aux_hidden_state_layer_ids), the target has layers 0 to 4" in text


def test_an_eagle3_head_may_be_narrower_than_the_states_it_reads(resolve: Any, fault: Any, pair: Any) -> None:
    head = HEADS["eagle3"] | {"hidden_size": 32, "target_hidden_size": 64}
    config, engine = pair(head)
    assert resolve(config, engine=engine).method == "eagle3"
    engine = resolve_engine_args(_with(engine.model, hidden_size=32), {})[0]
    assert "it reads states of width 64, the target's are 32 wide" in fault(config, engine=engine)


def _with(folder: str, **config: Any) -> str:
    (Path(folder) / "config.json").write_text(json.dumps(TARGET | config))
    return folder


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mlp_speculator"])
def test_padding_is_no_token_that_a_head_must_know(resolve: Any, fault: Any, pair: Any, method: str) -> None:
    """The target has rows for 12 ids; what counts is how many its tokenizer makes."""
    config, engine = pair(HEADS[method], TARGET | {"vocab_size": 12}, tokens=(None, "abcdefgh"))
    assert resolve(config, engine=engine).method == method
    letters("abcdefghij").save_pretrained(engine.model)
    assert "it knows 8 token ids, the target has 10" in fault(config, engine=engine)
    (Path(engine.model) / "tokenizer.json").unlink()
    assert resolve(config, engine=engine).method == method  # told when the tokenizer has loaded
    without = resolve_engine_args(engine.model, {"skip_tokenizer_init": True})[0]
    assert "it knows 8 token ids, the target has 12" in fault(config, engine=without)


def test_medusa_heads_may_know_a_part(resolve: Any, pair: Any) -> None:
    config, engine = pair(HEADS["medusa"], TARGET | {"vocab_size": 12}, tokens=(None, "abcdefghij"))
    assert resolve(config, engine=engine).method == "medusa"


def test_another_vocabulary_is_told_with_its_first_difference(fault: Any, resolve: Any, pair: Any) -> None:
    config, engine = pair(TARGET | {"vocab_size": 6}, tokens=("abxdef", "abcdefgh"))
    text = fault(config, engine=engine)
    assert text.startswith(
        f'speculative_config.model="{config["model"]}": draft and target have different vocabularies'
    )
    assert (
        'at id 2, "c" in the target and "x" in the draft. Set speculative_config.use_heterogeneous_vocab=true' in text
    )
    assert resolve(config | {"use_heterogeneous_vocab": True}, engine=engine).method == "draft_model"


def test_padding_makes_no_other_vocabulary(resolve: Any, pair: Any) -> None:
    config, engine = pair(TARGET | {"vocab_size": 6}, tokens=("abcdef", "abcdefgh"))
    assert resolve(config, engine=engine).method == "draft_model"


def test_the_tokenizer_that_is_given_counts(fault: Any, resolve: Any, pair: Any, tmp_path: Path) -> None:
    config, engine = pair(TARGET | {"vocab_size": 6}, tokens=("abcdef", "zyxwvuts"))
    letters("abcdefgh").save_pretrained(tmp_path / "own")
    own = resolve_engine_args(engine.model, {"tokenizer": str(tmp_path / "own")})[0]
    assert resolve(config, engine=own).method == "draft_model"
    assert "different vocabularies" in fault(config, engine=engine)


def test_what_the_folders_do_not_tell_is_no_fault(resolve: Any, pair: Any, checkpoint: Any) -> None:
    config, engine = pair(HEADS["eagle3"], {"architectures": ["LlamaForCausalLM"]})
    assert resolve(config, engine=engine).method == "eagle3"
    assert resolve(config, engine=resolve_engine_args("org/name", {})[0]).method == "eagle3"


@pytest.mark.parametrize("text", ["", "[]", '{"model": {}}', '{"model": {"vocab": 3}}'])
def test_a_tokenizer_file_that_cannot_be_read_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert read_vocabulary(tmp_path) is None


def test_a_vocabulary_is_read_as_the_tokenizer_has_it(tmp_path: Path) -> None:
    tokenizer = letters("abc")
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(tmp_path)
    assert read_vocabulary(tmp_path) == tokenizer.get_vocab() == {"a": 0, "b": 1, "c": 2, "more": 3}
    unigram = {"model": {"type": "Unigram", "vocab": [["x", 0.0], ["y", -1.0]]}, "added_tokens": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    assert read_vocabulary(tmp_path) == {"x": 0, "y": 1}
