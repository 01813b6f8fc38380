"""vLLM's engine arguments on three terms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specplug.config import EngineArgs, explain, resolve_engine_args
from specplug.config.engine_terms import ENGINE_TERMS
from specplug.config.keys import key_of
from specplug.errors import ConfigError


def faults(**kwargs: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve_engine_args("m", kwargs)
    return caught.value.faults


def test_vllm_snippet_runs_with_only_the_import_changed() -> None:
    args, notes = resolve_engine_args(
        "models/tiny",
        {
            "tokenizer": "models/tiny",
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "gpu_memory_utilization": 0.5,
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "dtype": "bfloat16",
            "max_model_len": 512,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 1024,
            "swap_space": 4,
            "cpu_offload_gb": 0,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "trust_remote_code": False,
            "quantization": None,
            "seed": 7,
            "load_format": "auto",
            "kv_cache_dtype": "auto",
            "runner": "generate",
            "limit_mm_per_prompt": {"image": 0},
            "compilation_config": {"level": 0},
            "hf_overrides": {},
            "enable_lora": False,
            "scheduling_policy": "fcfs",
            "distributed_executor_backend": "mp",
        },
    )
    assert (args.dtype, args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens) == (
        "bfloat16",
        512,
        4,
        1024,
    )
    assert args.seed == 7
    assert len(notes) == 9
    assert any(note.startswith("gpu_memory_utilization=0.5: accepted, no effect here (") for note in notes)


def test_defaults() -> None:
    args, notes = resolve_engine_args("m", {"max_model_len": None, "max_num_seqs": None})
    assert args == EngineArgs(model="m")
    assert not notes


def test_the_default_of_max_num_seqs_follows_the_token_budget() -> None:
    args, _ = resolve_engine_args("m", {"max_num_batched_tokens": 2})
    assert args.max_num_seqs == 2
    assert "max_num_seqs" not in args.model_fields_set
    assert resolve_engine_args("m", {"max_num_batched_tokens": 64})[0].max_num_seqs == 8


def test_a_token_budget_below_max_num_seqs() -> None:
    (text,) = faults(max_num_seqs=4, max_num_batched_tokens=3)
    assert text.startswith("max_num_batched_tokens=3 is below max_num_seqs=4")


@pytest.mark.parametrize("model", ["", " "])
def test_an_empty_model_name(model: str) -> None:
    with pytest.raises(ConfigError, match="names no model; give a folder"):
        resolve_engine_args(model, {})


def test_a_head_is_no_target(checkpoint: Any) -> None:
    head = checkpoint("head", model_type="mlp_speculator")
    with pytest.raises(ConfigError) as caught:
        resolve_engine_args(head, {})
    text = str(caught.value)
    assert text.startswith(f'model="{head}" is a head for the method mlp_speculator, not a causal LM')
    assert f'speculative_config={{"method": "mlp_speculator", "model": "{head}", "num_speculative_tokens": 3}}' in text


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "qwen3", "dspark_block_size": 7}])
def test_a_model_may_carry_its_head(checkpoint: Any, config: dict[str, Any]) -> None:
    assert resolve_engine_args(checkpoint("target", **config), {})[0].model.endswith("target")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("half", "float16"),
        ("float", "float32"),
        ("float32", "float32"),
        ("torch.bfloat16", "bfloat16"),
        ("auto", "auto"),
    ],
)
def test_dtype_names(given: str, name: str) -> None:
    assert resolve_engine_args("m", {"dtype": given})[0].dtype == name


def test_dtype_objects() -> None:
    class DType:
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert resolve_engine_args("m", {"dtype": DType()})[0].dtype == "bfloat16"


def test_models_and_mappings_are_kept_as_they_are() -> None:
    model, extra = object(), {"x": (1, 2), "y": object()}
    args, _ = resolve_engine_args(model, {"additional_config": extra, "tokenizer": model})
    assert args.model is model
    assert args.additional_config == extra


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 2),
        ("data_parallel_size", 2),
        ("trust_remote_code", True),
        ("quantization", "awq"),
        ("enable_lora", True),
        ("kv_cache_dtype", "fp8"),
        ("load_format", "pt"),
        ("hf_overrides", {"rope_theta": 1}),
        ("disable_sliding_window", True),
        ("runner", "pooling"),
        ("logits_processors", ["x"]),
        ("scheduling_policy", "priority"),
        ("distributed_executor_backend", "ray"),
        ("kv_transfer_config", {"kv_role": "kv_both"}),
        ("model_impl", "vllm"),
    ],
)
def test_refused_names_the_door(name: str, value: Any) -> None:
    (text,) = faults(**{name: value})
    assert text.startswith(f"{name}=")
    assert "vLLM supports it" in text
    assert "leave it out" in text


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("gpu_memory_utilisation", 0.5, "Did you mean gpu_memory_utilization?"),
        ("max_seqs", 4, "Did you mean max_num_seqs?"),
        ("zzz", 1, "Those that act are model, tokenizer"),
        ("num_speculative_tokens", 3, 'write speculative_config={..., "num_speculative_tokens": 3}'),
        ("spec_method", "ngram", 'speculative_config={"method": ...}'),
        ("temperature", 0.5, "SamplingParams(temperature=0.5)"),
        ("max_num_seqs", 0, "must be a whole number of at least 1"),
        ("max_num_seqs", 2.0, "must be a whole number of at least 1"),
        ("max_num_seqs", True, "must be a whole number of at least 1"),
        ("max_model_len", "4k", "must be a whole number of at least 1"),
        ("dtype", "int8", 'must be one of "auto", "float32", "float16", "bfloat16"'),
        ("seed", -1, "must be a whole number of at least 0"),
        ("skip_tokenizer_init", 1, "must be true or false"),
        ("additional_config", [1], "must be a mapping"),
    ],
)
def test_unknown_and_unsound(name: str, value: Any, expected: str) -> None:
    (text,) = faults(**{name: value})
    assert name in text
    assert expected in text


def test_all_faults_together() -> None:
    assert len(faults(max_num_seqs=0, tensor_parallel_size=4, gpu_mem=1, seed="x")) == 4


def test_every_argument_is_described() -> None:
    for name, field in EngineArgs.model_fields.items():
        assert field.description, name
        assert key_of(field).term == "acts"
        assert name not in ENGINE_TERMS
    for name, key in ENGINE_TERMS.items():
        assert key.term != "acts", name
        assert key.why, name


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        resolve_engine_args("m", {})[0].seed = 3  # type: ignore[misc]


def test_explain_names_loaded_models(resolve: Any, methods: Any) -> None:
    class Loaded:
        pass

    rows = explain(resolve(None), resolve_engine_args(Loaded(), {})[0], (), methods).engine
    assert {row.key: row.value for row in rows}["model"] == "a loaded Loaded"
    rows = explain(resolve(None), resolve_engine_args(Path("a/b"), {})[0], (), methods).engine
    assert {row.key: row.value for row in rows}["model"] == "a/b"
