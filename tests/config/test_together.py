"""What keys mean together: lookup bounds, draft length, verification, vocabularies, schedules, budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from specplug.config import expand_schedule, explain, resolve_engine_args
from specplug.methods import MethodSpec

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PLAIN = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}


# --- lookup bounds ------------------------------------------------------------------------------------------


def test_B04_reversed_window(fault: Any) -> None:
    text = fault(NGRAM | {"prompt_lookup_min": 5})
    assert "prompt_lookup_min=5 is above prompt_lookup_max=3" in text
    assert "shortest and longest *match*; the draft length is num_speculative_tokens" in text


def test_B04_zero(fault: Any) -> None:
    text = fault(NGRAM | {"prompt_lookup_min": 0})
    assert "prompt_lookup_min=0" in text
    assert "at least 1" in text


@pytest.mark.parametrize(
    ("given", "bounds", "note"),
    [
        (
            {"prompt_lookup_max": 3},
            (3, 3),
            "prompt_lookup_min not given, using 3 (same as max). Set 1 for more, weaker",
        ),
        ({"prompt_lookup_min": 2}, (2, 2), "prompt_lookup_max not given, using 2 (same as min)"),
        ({}, (5, 5), "not given, using 5 for both"),
        ({"prompt_lookup_max": 3, "prompt_lookup_min": 1}, (3, 1), None),
    ],
)
def test_B05_default_window(
    resolve: Any, methods: Any, engine: Any, given: dict[str, int], bounds: tuple[int, int], note: str | None
) -> None:
    resolved = resolve({"method": "ngram", "num_speculative_tokens": 2, **given})
    high, low = bounds
    assert (resolved.speculative.prompt_lookup_max, resolved.speculative.prompt_lookup_min) == bounds
    options = resolved.plugins[0].options
    assert (options.prompt_lookup_max, options.prompt_lookup_min) == bounds
    assert [note in each for each in resolved.notes] == [True] if note else not resolved.notes
    shown = {row.key: row for row in explain(resolved, engine, (), methods).settings}
    assert (shown["prompt_lookup_max"].value, shown["prompt_lookup_min"].value) == (high, low)
    for key in ("prompt_lookup_max", "prompt_lookup_min"):
        expected = "given" if key in given else "inferred" if given else "default"
        assert shown[key].origin.startswith(expected)


# --- verification -------------------------------------------------------------------------------------------


def synthetic(**keys: Any) -> dict[str, Any]:
    return NGRAM | {"rejection_sample_method": "synthetic"} | keys


def test_B06_both_or_neither_synthetic_key(fault: Any) -> None:
    both = fault(synthetic(synthetic_acceptance_rates=[0.8, 0.6, 0.3], synthetic_acceptance_length=2.7))
    assert "exactly one of" in both
    assert "You set synthetic_acceptance_rates *and* synthetic_acceptance_length; keep one" in both
    neither = fault(synthetic())
    assert "exactly one of" in neither
    assert "Set one; length runs from 1 to K+1" in neither


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([0.4, 0.7, 0.1], "synthetic_acceptance_rates[1]=0.7 exceeds [0]=0.4"),
        ([0.8, 0.6], "has 2 entries, num_speculative_tokens is 3; give 3 values in [0,1]"),
        ([1.2, 0.5, 0.1], "synthetic_acceptance_rates[0]=1.2 is outside 0 to 1"),
    ],
)
def test_B07_rates(fault: Any, rates: list[float], expected: str) -> None:
    text = fault(synthetic(synthetic_acceptance_rates=rates))
    assert expected in text
    if "exceeds" in expected:
        assert "*all* accepted" in text
        assert "non-increasing" in text
        assert "Conditional rates a,b,c become a, a·b, a·b·c" in text


@pytest.mark.parametrize("extra", [{}, {"rejection_sample_method": "standard"}])
def test_B08_synthetic_key_without_the_rule(fault: Any, extra: dict[str, str]) -> None:
    text = fault(NGRAM | extra | {"synthetic_acceptance_length": 2})
    assert 'synthetic_acceptance_length only acts with rejection_sample_method="synthetic" (now "standard")' in text
    assert "Remove it or change the method" in text


@pytest.mark.parametrize(
    ("length", "rates"),
    [(1.0, (0, 0, 0)), (2.5, (1, 0.5, 0)), (4, (1, 1, 1)), (3, (1, 1, 0))],
)
def test_synthetic_length_becomes_rates(resolve: Any, length: float, rates: tuple[float, ...]) -> None:
    resolved = resolve(synthetic(synthetic_acceptance_length=length))
    assert resolved.speculative.synthetic_acceptance_rates == pytest.approx(rates)
    assert resolved.origins["synthetic_acceptance_rates"] == "inferred: synthetic_acceptance_length"
    assert resolved.verify_method == "synthetic"


def test_good_rates_are_kept(resolve: Any) -> None:
    rates = [0.8, 0.6, 0.6]
    assert resolve(synthetic(synthetic_acceptance_rates=rates)).speculative.synthetic_acceptance_rates == tuple(rates)


@pytest.mark.parametrize("length", [0.5, 4.1])
def test_synthetic_length_out_of_reach(fault: Any, length: float) -> None:
    assert "from 1 to 4" in fault(synthetic(synthetic_acceptance_length=length))


@pytest.mark.parametrize("rule", ["standard", "block", "match", "coupled"])
def test_builtin_rules(resolve: Any, rule: str) -> None:
    assert resolve(NGRAM | {"rejection_sample_method": rule}).verify_method == rule
    assert resolve(NGRAM).verify_method == "auto"


def test_B25_block_without_laws_says_so(resolve: Any, checkpoint: Any) -> None:
    notes = resolve(NGRAM | {"rejection_sample_method": "block"}).notes
    assert sum("verification runs per token" in note and "verify_method_effective" in note for note in notes) == 1
    config = {"method": "draft_model", "model": checkpoint(**PLAIN), "num_speculative_tokens": 2}
    config |= {"rejection_sample_method": "block"}
    assert any('has none unless draft_sample_method="probabilistic"' in note for note in resolve(config).notes)
    assert not resolve(config | {"draft_sample_method": "probabilistic"}).notes


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_sampled_drafts_need_a_rule_that_reads_their_law(fault: Any, resolve: Any, checkpoint: Any, rule: str) -> None:
    config = {"method": "draft_model", "model": checkpoint(**PLAIN), "num_speculative_tokens": 2}
    config |= {"draft_sample_method": "probabilistic"}
    text = fault(config | {"rejection_sample_method": rule})
    assert f'rejection_sample_method="{rule}"' in text
    assert 'write "standard" or "block", or draft_sample_method="greedy"' in text
    assert resolve(config | {"rejection_sample_method": "standard"}).verify_method == "standard"


def test_fly_is_refused(faults: Any) -> None:
    text = faults(NGRAM | {"rejection_sample_method": "fly"})[0]
    assert "fly" in text
    assert "vLLM supports it" in text


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("strict", 'write "standard"'),
        ("probabilistic", 'it is now draft_sample_method="probabilistic"; the rule is standard, block or synthetic'),
        ("blok", "Did you mean block?"),
        ("mine", "is a plugin of kind policy, not a verifier"),
    ],
)
def test_other_rule_names(fault: Any, rule: str, expected: str) -> None:
    assert expected in fault(NGRAM | {"rejection_sample_method": rule})


def test_verifier_plugin(resolve: Any, fault: Any, without: Any) -> None:
    resolved = resolve(NGRAM | {"rejection_sample_method": "exact"})
    assert resolved.verify_method == "exact"
    assert [each.name for each in resolved.plugins] == ["ngram", "exact", "acceptance"]
    lossy = NGRAM | {"rejection_sample_method": "typical"}
    assert "pip install ./plugins/specplug-typical in a checkout" in fault(lossy, without("typical"))
    text = fault(lossy)
    assert 'plugin "typical" is lossy' in text
    assert "pass allow_lossy=True (on the command line --allow-lossy)" in text
    assert resolve(lossy, allow_lossy=True).verify_method == "typical"


# --- draft length -------------------------------------------------------------------------------------------


def test_B14_mtp_draft_length(resolve: Any, fault: Any, checkpoint: Any) -> None:
    resolved = resolve({"method": "mtp", "model": checkpoint(model_type="deepseek_mtp", n_predict=2)})
    assert resolved.num_speculative_tokens == 2
    assert resolved.origins["num_speculative_tokens"].startswith("inferred: n_predict")
    text = fault({"method": "mtp", "model": checkpoint("b", model_type="deepseek_mtp")})
    assert "num_speculative_tokens missing and the draft checkpoint states no default" in text
    assert "Start with 3 to 5" in text


def test_without_a_draft_length_a_checkpoint_that_was_not_looked_at_is_not_spoken_for(fault: Any) -> None:
    text = fault({"method": "eagle3", "model": "somebody/some-head"})
    assert "num_speculative_tokens missing, and the draft's checkpoint, which may state it, was not looked at" in text
    assert "states no default" not in text
    assert "Start with 3 to 5" in text


def test_B15_speculators_draft_length(resolve: Any, checkpoint: Any) -> None:
    proposals = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]}
    draft = checkpoint(speculators_model_type="eagle3", speculators_config=proposals)
    assert resolve({"model": draft}).num_speculative_tokens == 3
    assert resolve({"model": draft}).method == "eagle3"
    assert resolve({"model": draft, "num_speculative_tokens": 2}).num_speculative_tokens == 2


def test_B16_mlp_speculator(fault: Any, resolve: Any, checkpoint: Any) -> None:
    config = {"method": "mlp_speculator", "model": checkpoint(model_type="mlp_speculator", n_predict=3)}
    text = fault(config | {"num_speculative_tokens": 4})
    assert "num_speculative_tokens=4 exceeds the speculator's 3" in text
    assert "at most 3" in text
    assert resolve(config | {"num_speculative_tokens": 2}).num_speculative_tokens == 2
    assert resolve(config).num_speculative_tokens == 3


def test_B17_mtp_layer_reuse(fault: Any, resolve: Any, checkpoint: Any) -> None:
    config = {"method": "mtp", "model": checkpoint(model_type="deepseek_mtp", n_predict=2)}
    notes = resolve(config | {"num_speculative_tokens": 4}).notes
    assert sum("reused" in note for note in notes) == 1
    text = fault(config | {"num_speculative_tokens": 5})
    assert "num_speculative_tokens=5: this MTP draft has 2 layers, reuse needs a multiple (4 or 6)" in text
    assert not resolve(config | {"num_speculative_tokens": 1}).notes


def test_B18_dspark_block(fault: Any, resolve: Any, checkpoint: Any) -> None:
    config = {"method": "dspark", "model": checkpoint(architectures=["Qwen3DSparkModel"], block_size=5, n_predict=2)}
    assert any(
        "below the DSpark block size 5" in note for note in resolve(config | {"num_speculative_tokens": 3}).notes
    )
    assert not resolve(config | {"num_speculative_tokens": 5}).notes
    assert resolve(config).num_speculative_tokens == 5
    assert "untrained" in fault(config | {"num_speculative_tokens": 7})


def test_B138_dflash_block(fault: Any, resolve: Any, checkpoint: Any) -> None:
    config = {"method": "dflash", "model": checkpoint(block_size=8, dflash_config={"mask_token_id": 3})}
    assert resolve(config).num_speculative_tokens == 7
    text = fault(config | {"num_speculative_tokens": 8})
    assert "DFlash block 8 drafts 7 (slot 0 is the anchor)" in text
    anchored = checkpoint("b", dflash_config={"block_size": 8, "sample_from_anchor": True})
    assert resolve({"method": "dflash", "model": anchored}).num_speculative_tokens == 8


def test_medusa_heads(fault: Any, resolve: Any, checkpoint: Any) -> None:
    config = {"method": "medusa", "model": checkpoint(medusa_num_heads=4)}
    assert resolve(config).num_speculative_tokens == 4
    assert "at most 4" in fault(config | {"num_speculative_tokens": 5})


def test_suffix_draft_length_is_its_tree_depth(resolve: Any) -> None:
    assert resolve({"method": "suffix"}).num_speculative_tokens == 24
    assert resolve({"method": "suffix", "suffix_decoding_max_tree_depth": 9}).num_speculative_tokens == 9


def test_suffix_draft_length_is_the_plugins_own_where_no_vllm_key_is_given(resolve: Any, without: Any) -> None:
    class Options(BaseModel):
        suffix_max_draft: int = 32
        suffix_decoding_max_spec_factor: float | None = None

    installed = dict(without("suffix"))
    installed["suffix"] = MethodSpec("suffix", "proposer", lambda config, context: object(), Options)

    def length(**keys: Any) -> tuple[int, str]:
        resolved = resolve({"method": "suffix", **keys}, installed)
        return resolved.num_speculative_tokens, resolved.origins["num_speculative_tokens"]

    assert length() == (32, "inferred: suffix_max_draft")
    assert length(suffix_max_draft=7) == (7, "inferred: suffix_max_draft")
    assert length(suffix_decoding_max_spec_factor=2.0)[0] == 24
    assert length(num_speculative_tokens=5) == (5, "given")


def test_hidden_states_draft_nothing(fault: Any, resolve: Any) -> None:
    resolved = resolve({"method": "extract_hidden_states"})
    assert resolved.speculative.num_speculative_tokens == 1  # vLLM's only value
    assert resolved.num_speculative_tokens == 0
    assert "write 1" in fault({"method": "extract_hidden_states", "num_speculative_tokens": 2})


def test_B22_token_budget(fault: Any, resolve: Any, checkpoint: Any) -> None:
    draft = checkpoint(block_size=32, dflash_config={})
    config = {"method": "dflash", "model": draft, "num_speculative_tokens": 16}
    small = resolve_engine_args("target", {"max_num_seqs": 8, "max_num_batched_tokens": 64})[0]
    text = fault(config, engine=small)
    assert "16 slots × 8 requests = 128 tokens per step but max_num_batched_tokens is 64" in text
    assert "Raise it to >= 192, or lower max_num_seqs or num_speculative_tokens" in text
    enough = resolve_engine_args("target", {"max_num_seqs": 8, "max_num_batched_tokens": 192})[0]
    assert resolve(config, engine=enough).num_speculative_tokens == 16
    assert resolve(NGRAM | {"num_speculative_tokens": 16}, engine=small).num_speculative_tokens == 16


@pytest.mark.parametrize(("draft", "target", "limit"), [(2048, 8192, 2048), (8192, 2048, 2048), (None, 1024, 1024)])
def test_draft_context(fault: Any, checkpoint: Any, draft: int | None, target: int, limit: int) -> None:
    config = {"method": "draft_model", "num_speculative_tokens": 2, "max_model_len": 4096}
    sizes = {} if draft is None else {"max_position_embeddings": draft}
    engine = resolve_engine_args(checkpoint("target", max_position_embeddings=target), {})[0]
    text = fault(config | {"model": checkpoint(**sizes)}, engine=engine)
    assert f"speculative_config.max_model_len=4096: {f'draft supports {draft}, ' if draft else ''}" in text
    assert f"target runs at {target}; use at most {limit}" in text
    assert "Longer requests run without drafting" in text


# --- vocabularies, policies ---------------------------------------------------------------------------------


def test_B23_heterogeneous_vocabulary(fault: Any, resolve: Any, without: Any, checkpoint: Any) -> None:
    folder = checkpoint(**PLAIN)
    (Path(folder) / "tokenizer.json").touch()
    config = {"method": "draft_model", "model": folder, "num_speculative_tokens": 2}
    hetero = config | {"use_heterogeneous_vocab": True}
    assert "mutually exclusive" in fault(hetero | {"use_local_argmax_reduction": True})
    text = fault(NGRAM | {"use_heterogeneous_vocab": True})
    assert "needs a method with its own draft model (draft_model, ...)" in text
    assert 'method "ngram" has none. Remove the key' in text
    assert fault(NGRAM | {"use_heterogeneous_vocab": True}, without("tli")) == text
    resolved = resolve(hetero | {"draft_sample_method": "probabilistic"})
    assert [each.name for each in resolved.plugins] == ["draft_model", "tli", "acceptance"]


def test_heterogeneous_vocabulary_needs_both_tokenizers(fault: Any, checkpoint: Any) -> None:
    """Found before any weights load."""
    folder = checkpoint(**PLAIN)
    config = {"method": "draft_model", "model": folder, "num_speculative_tokens": 2, "use_heterogeneous_vocab": True}
    assert f'the draft folder "{folder}" holds none. Put the draft\'s tokenizer.json there.' in fault(config)
    (Path(folder) / "tokenizer.json").touch()
    engine = resolve_engine_args(checkpoint("target"), {"skip_tokenizer_init": True})[0]
    assert "the target has no tokenizer; give it with tokenizer=..., and leave skip_tokenizer_init out" in fault(
        config, engine=engine
    )


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("enable_adaptive_verification", True, "adaptive"),
        ("num_speculative_tokens_per_batch_size", [[1, 4, 3]], "dynamic"),
    ],
)
def test_keys_activate_plugins(resolve: Any, fault: Any, without: Any, key: str, value: Any, name: str) -> None:
    resolved = resolve(NGRAM | {key: value})
    assert [each.name for each in resolved.plugins] == ["ngram", name, "acceptance"]
    assert resolved.origins[f"plugins.{name}"] == key
    text = fault(NGRAM | {key: value}, without(name))
    assert text.startswith(f'speculative_config.{key} needs a plugin named "{name}"; specplug has none yet')
    assert f"Leave {key} out" in text
    assert "pip install" not in text


KEY = "num_speculative_tokens_per_batch_size"


def test_B143_schedule(resolve: Any, fault: Any) -> None:
    resolved = resolve(NGRAM | {KEY: [[1, 4, 3], [8, 16, 1]]}, engine=resolve_engine_args("t", {"max_num_seqs": 32})[0])
    table = expand_schedule(resolved.speculative.num_speculative_tokens_per_batch_size, 32, 3)
    assert len(table) == 32
    assert [table[size - 1] for size in (1, 4, 5, 6, 7, 8, 16, 17, 32)] == [3, 3, 3, 3, 3, 1, 1, 1, 1]
    assert "overlap" in fault(NGRAM | {KEY: [[1, 8, 3], [5, 9, 1]]})
    assert "must start at 1" in fault(NGRAM | {KEY: [[2, 8, 3]]})


def test_B144_schedule_forms(resolve: Any, fault: Any) -> None:
    text = fault(NGRAM | {KEY: {"1-16": 3, "17-64": 1}})
    assert "Write [[1,16,3],[17,64,1]]: first,last,K; the first range must start at 1; gaps inherit" in text
    resolved = resolve(NGRAM | {KEY: [[1, 8, 9]]})
    assert resolved.speculative.num_speculative_tokens_per_batch_size == ((1, 8, 3),)
    assert sum("lowered" in note for note in resolved.notes) == 1
    assert "must be >= 0" in fault(NGRAM | {KEY: [[1, 8, -1]]})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([], "must not be empty"),
        ([[1, 8]], "3-item sequence"),
        ([[1, 8, 1.5]], "3-item sequence"),
        ([[1, True, 1]], "3-item sequence"),
        (["abc"], "3-item sequence"),
        ("1-8:3", "is no list"),
        ([[5, 1, 3]], "is empty or starts below 1"),
        ([[0, 4, 3]], "starts below 1"),
        ([[1, 4, 3], [9, 16, 1], [5, 8, 2]], "sorted"),
        ({"few": 3}, "[[1,16,3],[17,64,1]]"),
    ],
)
def test_bad_schedules(fault: Any, value: Any, expected: str) -> None:
    assert expected in fault(NGRAM | {KEY: value})


def test_schedule_with_zero_is_kept(resolve: Any, methods: Any, engine: Any) -> None:
    resolved = resolve(NGRAM | {KEY: [[1, 3, 2], [4, 32, 0]]})
    shown = explain(resolved, engine, (), methods)
    assert shown.draft_length_by_batch_size == (2, 2, 2, 0, 0, 0, 0, 0)
