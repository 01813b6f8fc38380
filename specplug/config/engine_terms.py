"""vLLM's engine arguments that do not act in specplug's host: accepted without effect, or refused."""

from __future__ import annotations

from collections.abc import Iterable

from specplug.config.keys import Key

__all__ = ["ENGINE_TERMS", "MOVED", "NO_TOKENIZER"]


def _accepted(group: str, why: str, names: str) -> dict[str, Key]:
    return {name: Key(group, "accepted", why) for name in names.split()}


def _refused(group: str, why: str, names: str, neutral: Iterable[object] = ()) -> dict[str, Key]:
    return {name: Key(group, "refused", why, tuple(neutral)) for name in names.split()}


_MEMORY = """
    gpu_memory_utilization kv_cache_memory_bytes swap_space cpu_offload_gb cpu_offload_params block_size
    num_gpu_blocks_override num_lookahead_slots preemption_mode use_v2_block_manager offload_backend
    offload_group_size offload_num_in_group offload_prefetch_step offload_params kv_offloading_size
    kv_offloading_backend disable_hybrid_kv_cache_manager kv_cache_metrics kv_cache_metrics_sample"""
_GRAPHS = """
    enforce_eager compilation_config optimization_level max_seq_len_to_capture cudagraph_capture_sizes
    max_cudagraph_capture_size attention_backend attention_config kernel_config moe_backend disable_cascade_attn
    linear_backend enable_flashinfer_autotune ir_op_priority"""
_SCHEDULER = """
    enable_chunked_prefill max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold
    async_scheduling num_scheduler_steps multi_step_stream_outputs disable_async_output_proc stream_interval
    scheduler_reserve_full_isl scheduler_delay_factor disable_chunked_mm_input"""
_PREFIX = "enable_prefix_caching prefix_caching_hash_algo kv_sharing_fast_prefill"
_LOGS = """
    disable_log_stats disable_log_requests enable_log_requests aggregate_engine_logging use_tqdm_on_load
    show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces profiler_config
    enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details cudagraph_metrics
    per_request_spec_decode_metrics"""
_TEXT_ONLY = """
    limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type media_io_kwargs
    mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_only interleave_mm_strings
    skip_mm_profiling video_pruning_rate disable_mm_preprocessor_cache language_model_only allowed_local_media_path
    allowed_media_domains enable_mm_embeds"""
_ONE_DEVICE = """
    disable_custom_all_reduce max_parallel_loading_workers ray_workers_use_nsight disable_nccl_for_dp_synchronization
    dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size all2all_backend
    expert_placement_strategy numa_bind numa_bind_nodes numa_bind_cpus"""
_PER_REQUEST = """
    max_logprobs structured_outputs_config guided_decoding_backend guided_decoding_disable_fallback
    guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties reasoning_parser
    reasoning_config"""
_PARALLEL = """
    tensor_parallel_size pipeline_parallel_size data_parallel_size data_parallel_size_local nnodes
    decode_context_parallel_size prefill_context_parallel_size"""
_PARALLEL_DETAIL = """
    data_parallel_rank data_parallel_start_rank data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb
    data_parallel_external_lb enable_expert_parallel enable_eplb eplb_config enable_dbo ubatch_size master_addr
    enable_elastic_ep"""
_LORA = """
    enable_lora lora_modules default_mm_loras fully_sharded_loras enable_tower_connector_lora lora_target_modules
    specialize_active_lora max_cpu_loras enable_prompt_adapter"""
_POOLING = "pooler_config override_pooler_config io_processor_plugin"
_OVERRIDES = "hf_overrides rope_scaling rope_theta hf_config_path override_generation_config override_attention_dtype"
_TRANSFER = "kv_transfer_config kv_events_config ec_transfer_config weight_transfer_config"
_WORKERS = "worker_extension_cls scheduler_cls additional_worker_config enable_sleep_mode device_ids"
_WEIGHTS = "quantization quantization_config quantization_param_path calculate_kv_scales"
_LOADING = "model_loader_extra_config pt_load_map_location safetensors_load_strategy ignore_patterns"
_OUTPUTS = "enable_return_routed_experts return_sampling_mask enable_prompt_embeds logits_processor_pattern"

ENGINE_TERMS: dict[str, Key] = {
    **_accepted("memory", "KV memory is reserved for max_num_seqs requests of max_model_len tokens", _MEMORY),
    **_accepted("kernels", "the host runs eagerly, with its own attention", _GRAPHS),
    **_accepted("scheduling", "prompts are always read in chunks, within max_num_batched_tokens", _SCHEDULER),
    **_accepted("scheduling", "there is no prefix cache", _PREFIX),
    **_accepted("logging", "counts and times are always kept; see LLM.get_metrics", _LOGS),
    **_accepted("input", "the host takes text and token ids only", _TEXT_ONLY),
    **_accepted("parallelism", "the host runs on one device", _ONE_DEVICE),
    **_accepted("requests", "it is each request's own setting", _PER_REQUEST),
    **_accepted("model", "it names the model to clients, and the host has none", "served_model_name chat_template"),
    **_accepted("model", "code from checkpoints is never run", "code_revision"),
    **_accepted("model", "the model's own generation_config.json gives the defaults", "generation_config"),
    **_accepted("model", "transformers' own environment (HF_HOME, HF_TOKEN) decides", "download_dir hf_token"),
    **_accepted("model", "weights are read with safetensors", _LOADING),
    **_accepted("lora", "LoRA adapters are not supported, and none is asked for", "max_loras max_lora_rank lora_dtype"),
    **_accepted("lora", "LoRA adapters are not supported, and none is asked for", "lora_extra_vocab_size"),
    **_accepted(
        "cache", "models with recurrent state are refused when they load", "mamba_cache_dtype mamba_block_size"
    ),
    **_accepted("cache", "models with recurrent state are refused when they load", "mamba_ssm_cache_dtype"),
    **_accepted("cache", "models with recurrent state are refused when they load", "mamba_cache_mode"),
    **_refused("parallelism", "specplug's host runs on one device", _PARALLEL, [1]),
    **_refused("parallelism", "specplug's host runs on one device", _PARALLEL_DETAIL),
    **_refused("parallelism", "specplug's host runs on one device", "node_rank num_redundant_experts", [0]),
    **_refused("parallelism", "specplug's host runs in one process", "distributed_executor_backend", ["uni", "mp"]),
    **_refused("model", "code from checkpoints is never run by specplug's host", "trust_remote_code"),
    **_refused("model", "quantised weights are not supported by specplug's host", _WEIGHTS),
    **_refused("model", "specplug's host takes the model as its checkpoint describes it", _OVERRIDES),
    **_refused("model", "specplug's host drives models of transformers", "model_impl", ["auto", "transformers"]),
    **_refused("model", "specplug's host reads safetensors only", "load_format", ["auto", "safetensors", "hf"]),
    **_refused("model", "specplug's host reads Hugging Face folders", "config_format tokenizer_mode", ["auto", "hf"]),
    **_refused("model", "specplug's host generates text", "runner task", ["auto", "generate"]),
    **_refused("model", "specplug's host generates text", "convert", ["auto", "none"]),
    **_refused("model", "pooling models are not supported by specplug's host", _POOLING),
    **_refused("cache", "specplug's host keeps KV in the model's data type", "kv_cache_dtype", ["auto"]),
    **_refused("cache", "specplug's host follows the model's windows exactly", "disable_sliding_window"),
    **_refused("cache", "KV transfer is not supported by specplug's host", _TRANSFER),
    **_refused("scheduling", "specplug's host serves in order of arrival", "scheduling_policy", ["fcfs"]),
    **_refused("lora", "LoRA adapters are not supported by specplug's host", _LORA),
    **_refused("workers", "specplug's host has no worker processes", _WORKERS),
    **_refused("workers", "specplug's host has no worker processes", "worker_cls", ["auto"]),
    **_refused("requests", "each request brings its own: SamplingParams(logits_processors=...)", "logits_processors"),
    **_refused(
        "requests", "each request has its own: SamplingParams(logprobs_mode=...)", "logprobs_mode", ["raw_logprobs"]
    ),
    **_refused("requests", "specplug's host does not offer it", _OUTPUTS),
}

MOVED = {
    "spec_method": 'write it inside the mapping: speculative_config={"method": ...}',
    "spec_model": 'write it inside the mapping: speculative_config={"model": ...}',
    "spec_tokens": 'write it inside the mapping: speculative_config={"num_speculative_tokens": ...}',
    "speculative_model": 'removed from vLLM; write speculative_config={"model": ...}',
    "draft_tensor_parallel_size": 'write it inside the mapping: speculative_config={"draft_tensor_parallel_size": ...}',
    "max_context_len_to_capture": "removed from vLLM; leave it out, the host captures no graphs",
}
"""Arguments whose setting is written elsewhere, and where."""

NO_TOKENIZER = "the target has no tokenizer; give it with tokenizer=..., and leave skip_tokenizer_init out"
"""The reason and the remedy where tokenizers are to be compared; doors with other names for the two replace it."""
