"""The keys of ``suffix``, and the drafting rules that follow from them."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specplug_suffix.drafter import DraftRules
from specplug_suffix.lengths import DraftLengths

__all__ = ["CORPUS_ENDINGS", "SuffixOptions"]

CORPUS_ENDINGS = (".safetensors", ".jsonl")
_MAX_CACHED_REQUESTS = 10_000


class SuffixOptions(BaseModel):
    """vLLM's keys mean what they mean there; those that are absent leave it to ours."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    suffix_decoding_max_tree_depth: int | None = Field(
        default=None, ge=1, description="Match and draft together are at most this long; absent: no bound (vLLM: 24)."
    )
    suffix_decoding_max_cached_requests: int | None = Field(
        default=None, ge=0, description="Outputs kept for other requests; 0: none; absent: 10000."
    )
    suffix_decoding_max_spec_factor: float | None = Field(
        default=None, ge=0.0, description="vLLM's name of suffix_factor, without what resumed copies count for."
    )
    suffix_decoding_min_token_prob: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Drafting stops where the estimated probability falls below; absent: nowhere (vLLM: 0.1).",
    )
    suffix_max_draft: int = Field(
        default=32, ge=1, description="Longest draft, where num_speculative_tokens is not given."
    )
    suffix_factor: float = Field(
        default=2.0, ge=0.0, description="A draft is at most this many times as long as its match."
    )
    suffix_min_match: int = Field(default=1, ge=1, description="Shortest match to draft from, in tokens.")
    suffix_step_tokens: int = Field(
        default=256,
        ge=1,
        description="Most draft tokens in one step over all requests; beyond, every draft is shortened in proportion.",
    )
    suffix_cached_tokens: int = Field(
        default=1_000_000, ge=0, description="Output tokens kept for other requests, about 120 bytes each; 0: none."
    )
    suffix_live: bool = Field(
        default=True, description="Share outputs while they are written; false: once they are finished."
    )
    suffix_backoff: bool = Field(
        default=True,
        description="Draft only what is likely to pay in a batch of this size; false drafts all, as vLLM does.",
    )
    suffix_corpus: str | None = Field(
        default=None,
        description="File of texts that all requests may draft from: .safetensors (written by save) or .jsonl.",
    )

    @model_validator(mode="after")
    def _one_factor(self) -> SuffixOptions:
        if self.suffix_decoding_max_spec_factor is not None and "suffix_factor" in self.model_fields_set:
            raise ValueError(
                f"suffix_factor={self.suffix_factor} and suffix_decoding_max_spec_factor="
                f"{self.suffix_decoding_max_spec_factor} are the same setting, the second with vLLM's name; keep one"
            )
        return self

    @model_validator(mode="after")
    def _corpus_is_there(self) -> SuffixOptions:
        path = self.suffix_corpus
        if path is not None and Path(path).suffix not in CORPUS_ENDINGS:
            raise ValueError(f"suffix_corpus={path}: a corpus file ends in {' or '.join(CORPUS_ENDINGS)}")
        if path is not None and not Path(path).is_file():
            raise ValueError(f"suffix_corpus={path}: there is no such file")
        return self

    @property
    def max_cached_requests(self) -> int:
        """Outputs kept for other requests."""
        given = self.suffix_decoding_max_cached_requests
        return _MAX_CACHED_REQUESTS if given is None else given

    def rules(self, num_speculative_tokens: int) -> DraftRules:
        """How to draft at most ``num_speculative_tokens`` tokens a request."""
        factor = self.suffix_decoding_max_spec_factor
        lengths = DraftLengths(
            max_draft=num_speculative_tokens,
            factor=self.suffix_factor if factor is None else factor,
            min_match=self.suffix_min_match,
            max_depth=self.suffix_decoding_max_tree_depth,
        )
        return DraftRules(
            lengths,
            num_speculative_tokens,
            step_tokens=self.suffix_step_tokens,
            min_probability=self.suffix_decoding_min_token_prob or 0.0,
            shares_running=self.suffix_live,
            counts_carried=factor is None,
        )
