"""Single keys of speculative_config: unknown, misplaced, removed, refused, of the wrong type, of another method."""

from __future__ import annotations

from typing import Any

import pytest

from specplug.config import SpeculativeConfig
from specplug.config.keys import key_of
from specplug.errors import ConfigError

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", 0.7), ("top_p", 0.9), ("top_k", 5), ("seed", 1), ("min_p", 0)]
)
def test_B01_sampling_key(fault: Any, key: str, value: Any) -> None:
    text = fault({"method": "ngram", "num_speculative_tokens": 3, key: value})
    assert text.startswith(f"speculative_config.{key}={value}: sampling settings belong to each request")
    assert f"SamplingParams({key}={value})" in text
    assert "The draft follows the request" in text
    assert "draft_sample_method = greedy or probabilistic" in text


def test_issue_example_raises_one_message_with_key_reason_and_remedy(resolve: Any) -> None:
    text = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":5,"temperature":0.7}'
    with pytest.raises(ConfigError) as caught:
        resolve(text)
    assert len(caught.value.faults) == 1
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert "speculative_config.temperature=0.7" in message
    assert "belong to each request" in message
    assert "SamplingParams(temperature=0.7)" in message


def test_B02_target_tensor_parallel_size(fault: Any, checkpoint: Any) -> None:
    draft = checkpoint(model_type="llama")
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": 2}
    text = fault(config | {"tensor_parallel_size": 2})
    assert "tensor_parallel_size=2 is the *target's* setting and does not belong here" in text
    assert "draft_tensor_parallel_size (1, or the target's value" in text
    assert "may be 1" in fault(config | {"draft_tensor_parallel_size": 2})


@pytest.mark.parametrize(
    "key", ["target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"]
)
def test_B03_engine_filled_field(fault: Any, key: str) -> None:
    text = fault({"method": "ngram", "num_speculative_tokens": 3, key: {"model": "x"}})
    assert f"speculative_config.{key} is an internal field, filled in by the host, and must not be set" in text
    assert "host's model option" in text
    assert "speculative_config.model" in text


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("ngram_prompt_lookup_max", "prompt_lookup_max"),
        ("ngram_prompt_lookup_min", "prompt_lookup_min"),
        ("speculative_model", "model"),
        ("speculative_max_model_len", "max_model_len"),
        ("prompt_lookup_maxx", "prompt_lookup_max"),
        ("num_speculative_token", "num_speculative_tokens"),
        ("ngram_backof", "ngram_backoff"),
    ],
)
def test_B10_old_or_misspelt_key(fault: Any, key: str, meant: str) -> None:
    text = fault(NGRAM | {key: 6})
    assert text.startswith(f"Unknown key speculative_config.{key}. Did you mean {meant}?")
    is_prefixed = key.removeprefix("ngram_").removeprefix("speculative_") == meant
    assert ("prefix dropped; settings live inside speculative_config" in text) == is_prefixed


def test_key_of_a_plugin_that_is_not_used(fault: Any, methods: Any) -> None:
    text = fault(NGRAM | {"needy_xyz": 2})
    assert 'looks like an option of plugin "needy"' in text
    assert "needy" not in methods.imported


@pytest.mark.parametrize("key", ["zzzzqqq", "ngram_zzzzqqq"])
def test_hopeless_key(fault: Any, key: str) -> None:
    assert "No installed plugin that this configuration uses owns it" in fault(NGRAM | {key: 2})


@pytest.mark.parametrize("key", ["", "  "])
def test_empty_key(fault: Any, key: str) -> None:
    assert fault(NGRAM | {key: 2}).startswith(f'speculative_config has the empty key "{key}". ')


@pytest.mark.parametrize("key", ["gpu_memory_utilization", "max_num_seqs", "dtype"])
def test_engine_argument_inside(fault: Any, key: str) -> None:
    assert f"pass {key}= beside speculative_config" in fault(NGRAM | {key: 1})


@pytest.mark.parametrize("value", [0, -1, 1.9, True, "3", None, [3]])
def test_B13_draft_length_is_never_coerced(fault: Any, value: Any) -> None:
    text = fault({"method": "ngram", "num_speculative_tokens": value})
    assert "speculative_config.num_speculative_tokens" in text
    if value == 0 and value is not False:
        assert "to run without speculation leave speculative_config out" in text
        assert "num_speculative_tokens_per_batch_size" not in text  # which nothing serves
        assert "per request" in text
    elif value is None:
        assert "missing" in text
    else:
        assert "must be a whole number of at least 1" in text


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("parallel_drafting", 1, "true or false"),
        ("method", 3, "text"),
        ("draft_sample_method", "greed", 'one of "greedy", "probabilistic"'),
        ("suffix_decoding_min_token_prob", 1.5, "a number from 0.0 to 1.0"),
        ("suffix_decoding_max_spec_factor", float("nan"), "a number of at least 0.0"),
        ("suffix_decoding_max_cached_requests", -1, "a whole number of at least 0"),
        ("synthetic_acceptance_rates", [0.5, "x"], "number"),
        ("revision", 3, "text"),
    ],
)
def test_wrong_type_names_key_value_and_what_is_allowed(faults: Any, key: str, value: Any, wanted: str) -> None:
    found = [text for text in faults(NGRAM | {key: value}) if f"speculative_config.{key}=" in text]
    assert len(found) == 1
    assert "is not valid" in found[0]
    assert wanted in found[0]


def test_B21_removed_key(fault: Any, without: Any) -> None:
    text = fault(NGRAM | {"disable_by_batch_size": 8}, engine=_engine(max_num_seqs=256))
    assert "speculative_config.disable_by_batch_size=8: removed" in text
    assert "num_speculative_tokens_per_batch_size = [[1,8,3],[9,256,0]]" in text
    text = fault(NGRAM | {"disable_by_batch_size": 8}, without("dynamic"))
    assert text == "speculative_config.disable_by_batch_size=8: removed; leave it out."


def test_renamed_keys(fault: Any) -> None:
    text = fault(NGRAM | {"synthetic_acceptance_rate": 0.7})
    assert "renamed" in text
    assert "synthetic_acceptance_length or synthetic_acceptance_rates" in text


@pytest.mark.parametrize(
    ("config", "key", "method"),
    [
        ({"method": "suffix", "num_speculative_tokens": 8, "prompt_lookup_max": 4}, "prompt_lookup_max", "suffix"),
        (NGRAM | {"suffix_decoding_max_tree_depth": 24}, "suffix_decoding_max_tree_depth", "ngram"),
        (NGRAM | {"model": "somewhere"}, "model", "ngram"),
        (NGRAM | {"draft_sample_method": "probabilistic"}, "draft_sample_method", "ngram"),
        (NGRAM | {"parallel_drafting": True}, "parallel_drafting", "ngram"),
        (NGRAM | {"max_model_len": 64}, "max_model_len", "ngram"),
        (NGRAM | {"dspark_draft_topk": 64}, "dspark_draft_topk", "ngram"),
    ],
)
def test_B24_key_of_another_method(fault: Any, config: dict[str, Any], key: str, method: str) -> None:
    assert fault(config) == (
        f'speculative_config.{key} is not used by method "{method}" and would be ignored; remove it.'
    )


def test_values_that_ask_for_nothing_are_no_faults(resolve: Any) -> None:
    quiet = {
        "parallel_drafting": False,
        "draft_sample_method": "greedy",
        "draft_tensor_parallel_size": 1,
        "model": None,
    }
    assert resolve(NGRAM | quiet).method == "ngram"


def test_key_that_a_plugin_reads_is_its_own(resolve: Any, without: Any) -> None:
    """Whatever the table says, a plugin's options decide what it reads."""
    from pydantic import BaseModel

    from specplug.methods import MethodSpec

    class Options(BaseModel):
        prompt_lookup_max: int = 4

    installed = dict(without("suffix"))
    installed["suffix"] = MethodSpec("suffix", "proposer", lambda config, context: object(), Options)
    resolved = resolve({"method": "suffix", "num_speculative_tokens": 8, "prompt_lookup_max": 7}, installed)
    assert resolved.plugins[0].options == Options(prompt_lookup_max=7)


def test_accepted_keys_act_as_one_note_each(resolve: Any) -> None:
    given = {"enforce_eager": True, "moe_backend": "triton", "attention_backend": "flash_attn", "code_revision": "main"}
    notes = resolve(NGRAM | given).notes
    assert [sum(f"speculative_config.{key}=" in note for note in notes) for key in given] == [1, 1, 1, 1]
    assert all("accepted, no effect here (" in note for note in notes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fly_window_size", 3),
        ("fly_entropy_threshold", 0.3),
        ("fly_entropy_top_k", 3),
        ("draft_load_config", {"load_format": "dummy"}),
        ("draft_lm_head_quantization", "fp8"),
        ("index_share_for_mtp_iteration", True),
        ("xpress_topc", 5),
        ("quantization", "fp8"),
    ],
)
def test_refused_key_names_the_door(fault: Any, key: str, value: Any) -> None:
    text = fault(NGRAM | {key: value})
    assert text.startswith(f"speculative_config.{key}=")
    assert "vLLM supports it" in text
    assert "leave it out" in text


def test_all_faults_are_reported_together(faults: Any) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 0, "temperature": 1, "prompt_lookup_max": 0, "colour": 1}
    found = faults(config, plugins=["nothing"])
    assert len(found) == 5
    for text in ("num_speculative_tokens=0", "temperature", "prompt_lookup_max=0", "colour", '"nothing"'):
        assert sum(text in each for each in found) == 1, text


def test_numbered_text_lists_every_fault(resolve: Any) -> None:
    with pytest.raises(ConfigError, match=r"2 faults in the configuration:\n  1\. .*\n  2\. "):
        resolve(NGRAM | {"top_p": 1, "top_k": 1})


def test_every_key_has_a_term_and_a_reason() -> None:
    for name, field in SpeculativeConfig.model_fields.items():
        rule = key_of(field)
        assert bool(rule.why) == (rule.term != "acts"), name
        assert field.description, name


def _engine(**kwargs: Any) -> Any:
    from specplug.config import resolve_engine_args

    return resolve_engine_args("target", kwargs)[0]
