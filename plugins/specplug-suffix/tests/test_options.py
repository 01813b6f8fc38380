from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from specplug_suffix import SuffixOptions

from specplug.config import explain, resolve_engine_args, resolve_speculative_config
from specplug.errors import ConfigError
from specplug.hooks import process_manager

ENGINE = resolve_engine_args("target", {})[0]
VLLM = {
    "suffix_decoding_max_tree_depth": 64,
    "suffix_decoding_max_cached_requests": 5,
    "suffix_decoding_max_spec_factor": 1.5,
    "suffix_decoding_min_token_prob": 0.2,
}


def resolve(**keys: Any) -> Any:
    return resolve_speculative_config({"method": "suffix", **keys}, process_manager().methods, engine=ENGINE)


def options(**keys: Any) -> tuple[int, SuffixOptions]:
    resolved = resolve(**keys)
    (plugin,) = (each for each in resolved.plugins if each.name == "suffix")
    assert isinstance(plugin.options, SuffixOptions)
    return resolved.num_speculative_tokens, plugin.options


def test_ours_where_nothing_is_given() -> None:
    k, given = options()
    rules = given.rules(k)
    assert (k, given.max_cached_requests, rules.max_draft, rules.min_probability) == (32, 10_000, 32, 0.0)
    assert [rules.lengths[match] for match in (1, 8, 16, 1000)] == [2, 16, 32, 32]
    assert rules.counts_carried


def test_vllm_keys_mean_what_they_mean_there() -> None:
    k, given = options(**VLLM)
    rules = given.rules(k)
    assert (k, given.max_cached_requests, rules.min_probability) == (64, 5, 0.2)
    assert [rules.lengths[match] for match in (1, 10, 26, 1000)] == [1, 15, 38, 38], "match and draft are at most 64"
    assert not rules.counts_carried


@pytest.mark.parametrize(
    ("keys", "k"),
    [
        ({}, 32),
        ({"suffix_max_draft": 7}, 7),
        ({"suffix_decoding_max_tree_depth": 9}, 9),
        ({"suffix_decoding_max_spec_factor": 1.0}, 24),
        ({"suffix_decoding_max_tree_depth": 9, "num_speculative_tokens": 4}, 4),
        ({"suffix_max_draft": 7, "num_speculative_tokens": 40}, 40),
    ],
)
def test_B121_draft_length(keys: dict[str, Any], k: int) -> None:
    assert resolve(**keys).num_speculative_tokens == k


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suffix_decoding_max_tree_depth", 0),
        ("suffix_decoding_max_cached_requests", -1),
        ("suffix_decoding_min_token_prob", 1.5),
        ("suffix_decoding_max_spec_factor", -0.1),
        ("suffix_max_draft", 0),
        ("suffix_factor", -1.0),
        ("suffix_min_match", 0),
        ("suffix_step_tokens", 0),
        ("suffix_cached_tokens", -1),
        ("suffix_live", 1),
    ],
)
def test_B121_values_that_cannot_be(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key}={value}"):
        resolve(**{key: value})


def test_one_factor_only() -> None:
    with pytest.raises(ConfigError, match="are the same setting, the second with vLLM's name; keep one"):
        resolve(suffix_factor=2.0, suffix_decoding_max_spec_factor=1.0)


@pytest.mark.parametrize(
    ("path", "message"),
    [("texts.jsonl", "there is no such file"), ("texts.csv", "a corpus file ends in .safetensors or .jsonl")],
)
def test_the_corpus_is_looked_for_before_weights_load(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(suffix_corpus=path)


def test_explain_prints_ours() -> None:
    resolved = resolve()
    shown = explain(resolved, ENGINE, (), process_manager().methods)
    (plugin,) = (each for each in shown.plugins if each.name == "suffix")
    rows = {row.key: (row.value, row.origin) for row in plugin.options}
    assert rows["suffix_max_draft"] == (32, "default")
    assert rows["suffix_factor"] == (2.0, "default")
    assert not [row.key for row in shown.settings if row.key.startswith("suffix_decoding")]
    k = next(row for row in shown.settings if row.key == "num_speculative_tokens")
    assert (k.value, k.origin) == (32, "inferred: suffix_max_draft")


PAGE = Path(__file__).parents[3] / "docs/methods/suffix.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="tests that travel without the repository")
@pytest.mark.parametrize("key", list(SuffixOptions.model_fields))
def test_every_key_is_on_the_page(key: str) -> None:
    assert f"| `{key}` |" in PAGE.read_text(encoding="utf-8")
