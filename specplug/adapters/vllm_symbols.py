"""What the vLLM door uses of vLLM."""

from __future__ import annotations

from pathlib import Path

from specplug.adapters.server_symbols import Attribute, Call, Function, Symbol, source_mismatches

__all__ = ["SYMBOLS", "TESTED_RELEASES", "mismatches"]

TESTED_RELEASES = ("0.32", "0.33")
"""vLLM's releases whose sources were checked; the newer has no CPU build to run the tests in."""

_RUNNER, _CPU_RUNNER = "v1/worker/gpu_model_runner.py", "v1/worker/cpu_model_runner.py"
_CONFIG_FIELDS = {
    ("config/vllm.py", "VllmConfig"): (
        "speculative_config",
        "model_config",
        "scheduler_config",
        "device_config",
        "parallel_config",
        "additional_config",
    ),
    ("config/speculative.py", "SpeculativeConfig"): (
        "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size",
        "draft_sample_method",
        "rejection_sample_method",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    ("config/model.py", "ModelConfig"): (
        "max_model_len",
        "dtype",
        "hf_config",
        "tokenizer",
        "tokenizer_revision",
        "skip_tokenizer_init",
        "served_model_name",
    ),
    ("config/scheduler.py", "SchedulerConfig"): ("max_num_seqs", "async_scheduling"),
    ("config/device.py", "DeviceConfig"): ("device",),
    ("config/parallel.py", "ParallelConfig"): ("rank", "world_size"),
}

SYMBOLS: tuple[Symbol, ...] = (
    *(Attribute(file, owner, name) for (file, owner), names in _CONFIG_FIELDS.items() for name in names),
    Function("config/model.py", "ModelConfig", "get_vocab_size", ()),
    Function("v1/spec_decode/custom_class_proposer.py", None, "create_custom_proposer", ("vllm_config",)),
    Call(_RUNNER, "GPUModelRunner", "__init__", "create_custom_proposer", ("vllm_config",)),
    Call(
        _RUNNER,
        "GPUModelRunner",
        "propose_draft_token_ids",
        "propose",
        ("sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu"),
        ("slot_mappings",),
    ),
    Call(_RUNNER, "GPUModelRunner", "load_model", "load_model", ("model",)),
    Call(_CPU_RUNNER, "CPUModelRunner", "load_model", "load_model", ("model",)),
    Attribute("v1/worker/worker_base.py", "WorkerBase", "model_runner"),
)
"""Every name of vLLM that the door reads, and every call that it answers."""


def mismatches(package: Path) -> list[str]:
    """What of :data:`SYMBOLS` the sources in ``package`` (the folder of ``vllm``) no longer offer; [] when all fits."""
    return source_mismatches(package, SYMBOLS)
