"""What the SGLang door uses of SGLang: the n-gram worker whose draft source it replaces, and what registers it."""

from __future__ import annotations

from pathlib import Path

from specplug.adapters.server_symbols import Attribute, Call, Function, Symbol, source_mismatches

__all__ = ["SYMBOLS", "TESTED_RELEASES", "mismatches"]

TESTED_RELEASES = ("0.5.23",)
"""SGLang's releases whose sources were checked."""

_WORKER = ("srt/speculative/ngram_worker.py", "NGRAMWorker")
_ENUM = ("srt/speculative/spec_info.py", "SpeculativeAlgorithm")
_CUSTOM = ("srt/speculative/spec_registry.py", "CustomSpecAlgo")
_REQUEST = ("srt/managers/schedule_batch.py", "Req")
_BATCH = ("srt/managers/schedule_batch.py", "ScheduleBatch")
_CONFIG = ("srt/configs/model_config.py", "ModelConfig")
_VERIFY_INPUT = ("srt/speculative/ngram_info.py", "NgramVerifyInput")

SYMBOLS: tuple[Symbol, ...] = (
    # the worker: what is overridden, who calls it, and what is read
    Function(*_WORKER, "__init__", ("server_args", "gpu_id", "nccl_port", "target_worker")),
    Function(*_WORKER, "alloc_memory_pool", ()),
    Function(*_WORKER, "_prepare_draft_tokens", ("batch",)),
    Function(*_WORKER, "_update_ngram_corpus", ("batch",)),
    Function(*_WORKER, "clear_cache_pool", ()),
    Call(*_WORKER, "_prepare_for_speculative_decoding", "_prepare_draft_tokens", ("batch",)),
    Call(*_WORKER, "forward_batch_generation", "_prepare_for_speculative_decoding", ("batch",)),
    Call(*_WORKER, "forward_batch_generation", "_update_ngram_corpus", ("batch",)),
    Call(*_WORKER, "forward_batch_generation", "erase_match_state", ("",)),
    Call(*_WORKER, "clear_cache_pool", "reset", ()),
    *(
        Attribute(*_WORKER, name)
        for name in ("ngram_corpus", "enable_overlap", "draft_token_num", "max_batch_size", "model_runner", "device")
    ),
    Function("srt/speculative/cpp_ngram/ngram_corpus.py", "NgramCorpus", "list_external_corpora", ()),
    Attribute("srt/model_executor/model_runner.py", "ModelRunner", "model_config"),
    Attribute("srt/managers/tp_worker.py", "TpModelWorker", "tokenizer"),
    Attribute(*_CONFIG, "vocab_size"),
    Attribute(*_CONFIG, "context_len"),
    # the requests of a batch
    *(Attribute(*_REQUEST, name) for name in ("rid", "origin_input_ids_unpadded", "output_ids")),
    Attribute(*_BATCH, "reqs"),
    Attribute(*_BATCH, "spec_info"),
    Function(*_BATCH, "grammar_needs_sync", ()),
    Attribute(*_VERIFY_INPUT, "accept_tokens"),
    Attribute(*_VERIFY_INPUT, "accept_lens"),
    # registration, and the methods of the enumeration that a registered algorithm lacks
    Function(*_ENUM, "register", ("name", "supports_overlap", "validate_server_args", "spec_class")),
    Function(*_ENUM, "carries_draft_hidden_states", ()),
    Function(
        *_ENUM,
        "create_future_map",
        ("device", "req_to_token_pool", "needs_cpu_seq_lens", "needs_confidence_relay"),
    ),
    Function(*_ENUM, "get_platform_worker_cls", ()),
    Function(*_ENUM, "need_topk", ()),
    Function(*_CUSTOM, "__init__", ("name", "factory", "supports_overlap", "validate_server_args")),
    *(Attribute(*_CUSTOM, name) for name in ("is_eagle", "is_standalone", "is_ngram", "has_draft_kv")),
    Function(*_CUSTOM, "handle_server_args", ("server_args",)),
    Function("srt/arg_groups/speculative_hook.py", None, "_handle_ngram", ("server_args",)),
)
"""Every name of SGLang that the door uses, and every call that it answers."""


def mismatches(package: Path) -> list[str]:
    """What of :data:`SYMBOLS` the sources in ``package`` (the folder of ``sglang``) lack; [] when all fits."""
    return source_mismatches(package, SYMBOLS)
