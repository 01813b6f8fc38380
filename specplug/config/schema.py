"""``SpeculativeConfig``: vLLM's JSON object, all keys."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specplug.config.keys import Key
from specplug.config.known_methods import MODEL_METHODS

__all__ = ["BUILTIN_RULES", "ENGINE_FILLED", "SpeculativeConfig"]

BUILTIN_RULES = ("standard", "block", "synthetic", "match", "coupled")
"""Names that ``rejection_sample_method`` takes without a plugin; ``synthetic`` alone is lossy."""

ENGINE_FILLED = ("target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config")
"""Fields that vLLM's engine fills in itself."""

_PARALLEL = frozenset({"draft_model", "pard", "eagle", "eagle3", "dflash", "dspark"})
_EAGER = "specplug's host always runs eagerly"
_FLY = "the lossy fly verifier is not part of specplug"
_ONE_DEVICE = "the host runs on one device"
_OWN_LAYOUT = "the draft keeps the layout and kernels that specplug's host chose"
_NO_PLUGIN = "it acts where an installed plugin serves it, and specplug has none"
_FILLED_IN = "it is filled in by the host and must not be set"

_Model = MODEL_METHODS
_Ngram = frozenset({"ngram"})
_Suffix = frozenset({"suffix"})


class SpeculativeConfig(BaseModel):
    """vLLM's ``speculative_config``, key for key. Values are never coerced: 1.9, "3" and true are no counts.

    Validation here is per key; what keys mean together, and which method may use which, is decided by
    ``resolve_speculative_config``, which is the way to build one.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    method: Annotated[str | None, Key("method")] = Field(
        default=None, description="The method; inferred from `model` when absent."
    )
    model: Annotated[str | None, Key("method", used_by=_Model | {"custom_class"})] = Field(
        default=None,
        description="Folder of the draft model, head or speculators checkpoint; for custom_class a dotted class path.",
    )
    num_speculative_tokens: Annotated[int | None, Key("method")] = Field(
        default=None,
        ge=1,
        description="K, the most tokens drafted per request and step; from the checkpoint if it says.",
    )
    parallel_drafting: Annotated[bool, Key("method", used_by=_PARALLEL)] = Field(
        default=False,
        description="All K tokens from one draft forward (PARD, P-EAGLE).",
    )
    draft_sample_method: Annotated[
        Literal["greedy", "probabilistic"], Key("method", neutral=("greedy",), used_by=_Model)
    ] = Field(default="greedy", description="Draft by arg-max, or sample and keep the draft's law for verification.")
    use_heterogeneous_vocab: Annotated[bool, Key("method")] = Field(
        default=False, description="Draft with another vocabulary through token-level intersection; activates `tli`."
    )

    prompt_lookup_max: Annotated[int | None, Key("ngram", used_by=_Ngram)] = Field(
        default=None, ge=1, description="Longest match looked up; both bounds absent: 5, one absent: same as the other."
    )
    prompt_lookup_min: Annotated[int | None, Key("ngram", used_by=_Ngram)] = Field(
        default=None, ge=1, description="Shortest match looked up."
    )

    suffix_decoding_max_tree_depth: Annotated[int | None, Key("suffix", used_by=_Suffix)] = Field(
        default=None, ge=1, description="Match and draft together are at most this long; absent: no bound (vLLM: 24)."
    )
    suffix_decoding_max_cached_requests: Annotated[int | None, Key("suffix", used_by=_Suffix)] = Field(
        default=None, ge=0, description="Outputs kept for other requests; 0: none; absent: 10000."
    )
    suffix_decoding_max_spec_factor: Annotated[float | None, Key("suffix", used_by=_Suffix)] = Field(
        default=None,
        ge=0.0,
        description="A draft is at most this many times as long as its match; absent: `suffix_factor` (vLLM: 1.0).",
    )
    suffix_decoding_min_token_prob: Annotated[float | None, Key("suffix", used_by=_Suffix)] = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Drafting stops where the estimated probability falls below; absent: nowhere (vLLM: 0.1).",
    )

    rejection_sample_method: Annotated[str, Key("verification")] = Field(
        default="standard",
        description="standard, block, synthetic, match, coupled, or a verifier plugin; absent: match, or standard "
        "where drafts carry sampled laws.",
    )
    synthetic_acceptance_rates: Annotated[tuple[float, ...] | None, Key("verification")] = Field(
        default=None,
        description="synthetic only: entry i is the chance that tokens 0 to i are all accepted; K entries.",
    )
    synthetic_acceptance_length: Annotated[float | None, Key("verification")] = Field(
        default=None, description="synthetic only: mean acceptance length, 1 to K + 1; turned into rates."
    )
    fly_window_size: Annotated[int | None, Key("verification", "refused", _FLY)] = Field(
        default=None, ge=1, description="fly only: draft tokens that must be accepted after a tolerated one."
    )
    fly_entropy_threshold: Annotated[float | None, Key("verification", "refused", _FLY)] = Field(
        default=None, ge=0.0, description="fly only: least target entropy that tolerates a mismatch."
    )
    fly_entropy_top_k: Annotated[int | None, Key("verification", "refused", _FLY)] = Field(
        default=None, ge=1, description="fly only: tokens over which the entropy is taken."
    )

    num_speculative_tokens_per_batch_size: Annotated[
        tuple[tuple[int, int, int], ...] | None, Key("policy", "plugin", _NO_PLUGIN)
    ] = Field(
        default=None, description="Draft length by batch size: [[first, last, K], ...]; needs a plugin `dynamic`."
    )
    enable_adaptive_verification: Annotated[bool, Key("policy", "plugin", _NO_PLUGIN)] = Field(
        default=False,
        description="Verify as many draft tokens per step as their confidence pays for; needs a plugin `adaptive`.",
    )

    max_model_len: Annotated[int | None, Key("draft model", used_by=_Model)] = Field(
        default=None, ge=1, description="Longest context the draft sees; longer requests run without drafting."
    )
    revision: Annotated[str | None, Key("draft model", used_by=_Model)] = Field(
        default=None, description="Revision of the draft checkpoint."
    )
    code_revision: Annotated[str | None, Key("draft model", "accepted", "code from checkpoints is never run")] = Field(
        default=None, description="Revision of the draft's remote code."
    )
    quantization: Annotated[
        str | None,
        Key("draft model", "refused", "quantised drafts are not supported by specplug's host", used_by=_Model),
    ] = Field(default=None, description="Quantisation of the draft's weights.")
    draft_tensor_parallel_size: Annotated[int | None, Key("draft model", neutral=(1,), used_by=_Model)] = Field(
        default=None, ge=1, description="Devices for the draft: 1, or the target's number, which is 1 here."
    )
    draft_load_config: Annotated[
        dict[str, Any] | None, Key("draft model", "refused", "weights are read with safetensors only")
    ] = Field(default=None, description="How the engine loads the draft's weights.")
    draft_lm_head_quantization: Annotated[
        Literal["fp8", "nvfp4"] | None,
        Key("draft model", "refused", "quantised heads are not supported by specplug's host"),
    ] = Field(default=None, description="Quantisation of the draft's output head.")
    index_share_for_mtp_iteration: Annotated[
        bool | None, Key("draft model", "refused", "sparse-attention indexers are not supported by specplug's host")
    ] = Field(default=None, description="mtp only: share the sparse-attention index between repeated layers.")
    dspark_draft_topk: Annotated[
        int | None, Key("draft model", "plugin", _NO_PLUGIN, used_by=frozenset({"dspark"}))
    ] = Field(default=None, ge=1, description="dspark only: apply the Markov bias to this many base logits.")
    xpress_topc: Annotated[
        int | None, Key("draft model", "refused", "XPress heads are not supported by specplug's host")
    ] = Field(default=None, ge=0, description="XPress only: candidates refined per position.")

    enforce_eager: Annotated[bool | None, Key("engine", "accepted", _EAGER)] = Field(
        default=None, description="Run the draft without captured graphs."
    )
    moe_backend: Annotated[str | None, Key("engine", "accepted", _OWN_LAYOUT)] = Field(
        default=None, description="Kernels for the draft's experts."
    )
    attention_backend: Annotated[str | None, Key("engine", "accepted", _OWN_LAYOUT)] = Field(
        default=None, description="Kernels for the draft's attention."
    )
    kv_cache_dtype: Annotated[str | None, Key("engine", "accepted", _OWN_LAYOUT)] = Field(
        default=None, description="Data type of the draft's KV cache."
    )
    disable_padded_drafter_batch: Annotated[bool, Key("engine", "accepted", "batches are packed, not padded")] = Field(
        default=False, description="Draft on unpadded batches."
    )
    disable_eagle_block_drop: Annotated[bool, Key("engine", "accepted", "there is no prefix cache")] = Field(
        default=False, description="Keep the last cached block for EAGLE."
    )
    disable_lookahead_block_hashes: Annotated[bool, Key("engine", "accepted", "there is no prefix cache")] = Field(
        default=False, description="Hash blocks without lookahead."
    )
    use_local_argmax_reduction: Annotated[bool, Key("engine", "accepted", _ONE_DEVICE)] = Field(
        default=False, description="Arg-max per tensor-parallel rank before reducing."
    )

    target_model_config: Annotated[Any, Key("engine-filled", "refused", _FILLED_IN)] = Field(
        default=None, description="The target's model configuration."
    )
    target_parallel_config: Annotated[Any, Key("engine-filled", "refused", _FILLED_IN)] = Field(
        default=None, description="The target's parallel configuration."
    )
    draft_model_config: Annotated[Any, Key("engine-filled", "refused", _FILLED_IN)] = Field(
        default=None, description="The draft's model configuration."
    )
    draft_parallel_config: Annotated[Any, Key("engine-filled", "refused", _FILLED_IN)] = Field(
        default=None, description="The draft's parallel configuration."
    )
