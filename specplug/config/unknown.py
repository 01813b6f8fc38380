"""Messages for keys of ``speculative_config`` that vLLM's schema does not have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache

from specplug.config.engine_terms import ENGINE_TERMS
from specplug.config.keys import closest, show
from specplug.config.schema import SpeculativeConfig
from specplug.sampling_params import SamplingParams

__all__ = ["UnknownKeys", "sampling_names"]

_PREFIX = "speculative_config"

# Sampling parameters of vLLM that SamplingParams may not have yet; they are no more at home here.
_OTHER_SAMPLING = """
    n best_of presence_penalty frequency_penalty repetition_penalty logit_bias bad_words allowed_token_ids min_tokens
    logprobs prompt_logprobs detokenize spaces_between_special_tokens truncate_prompt_tokens guided_decoding
    structured_outputs"""

_RENAMED = {
    "synthetic_acceptance_rate": "renamed: use synthetic_acceptance_length or synthetic_acceptance_rates",
    "spec_decoding_acceptance_method": "renamed: use rejection_sample_method",
    "acceptance_method": "renamed: use rejection_sample_method",
    "posterior_threshold": "removed with typical acceptance; leave it out",
    "posterior_alpha": "removed with typical acceptance; leave it out",
    "typical_acceptance_sampler_posterior_threshold": "removed with typical acceptance; leave it out",
    "typical_acceptance_sampler_posterior_alpha": "removed with typical acceptance; leave it out",
    "disable_mqa_scorer": "removed; every row is verified in one forward anyway, leave it out",
    "disable_logprobs": "removed; log-probabilities are each request's own setting, leave it out",
    "disable_log_stats": "an engine argument; counts are always kept, leave it out",
    "draft_model": 'write method="draft_model" and the draft\'s folder as model',
}
_OLD_PREFIXES = ("speculative_", "ngram_", "spec_", "speculative_ngram_")


@cache
def sampling_names() -> frozenset[str]:
    """Every sampling parameter of a request, under vLLM's names."""
    return frozenset((*(each.name for each in fields(SamplingParams)), *_OTHER_SAMPLING.split()))


@dataclass(frozen=True, slots=True)
class UnknownKeys:
    """Explains keys nobody owns. ``known``: schema keys and options of the active plugins; ``plugin_names``: what
    else is installed; ``has_schedules``: whether a plugin serves batch-size schedules; ``draft_length`` and
    ``max_num_seqs`` fill in examples; ``engine_names``: engine arguments."""

    known: Iterable[str]
    plugin_names: Iterable[str]
    engine_names: Iterable[str]
    has_schedules: bool
    draft_length: int
    max_num_seqs: int

    def explain(self, key: str, value: object) -> str:
        """The message for one key."""
        return self._misplaced(key, value) or self._removed(key, value) or self._unknown(key)

    def _misplaced(self, key: str, value: object) -> str | None:
        if key == "tensor_parallel_size":
            return (
                f"{_PREFIX}.tensor_parallel_size={show(value)} is the *target's* setting and does not belong here. "
                "For the draft use draft_tensor_parallel_size (1, or the target's value, which is 1 in this host)."
            )
        if key in sampling_names():
            return (
                f"{_PREFIX}.{key}={show(value)}: sampling settings belong to each request; remove the key and pass "
                f"SamplingParams({key}={value!r}) to generate. The draft follows the request; where a method has a "
                "draft model, choose its mode with draft_sample_method = greedy or probabilistic."
            )
        if key in _RENAMED:
            return f"{_PREFIX}.{key}={show(value)}: {_RENAMED[key]}."
        if key in self.engine_names or (key in ENGINE_TERMS and key not in SpeculativeConfig.model_fields):
            return f"{_PREFIX}.{key}={show(value)} is an engine argument; pass {key}= beside speculative_config."
        return None

    def _removed(self, key: str, value: object) -> str | None:
        if key not in ("disable_by_batch_size", "speculative_disable_by_batch_size"):
            return None
        if not self.has_schedules:
            return f"{_PREFIX}.{key}={show(value)}: removed; leave it out."
        limit = value if isinstance(value, int) and value >= 1 else 8
        last = max(self.max_num_seqs, limit + 1)
        schedule = f"[[1,{limit},{self.draft_length}],[{limit + 1},{last},0]]"
        return (
            f"{_PREFIX}.{key}={show(value)}: removed. Equivalent: num_speculative_tokens_per_batch_size = {schedule}."
        )

    def _unknown(self, key: str) -> str:
        start = f"Unknown key {_PREFIX}.{key}." if key.strip() else f"{_PREFIX} has the empty key {show(key)}."
        known = tuple(self.known)
        for prefix in _OLD_PREFIXES:
            if key.startswith(prefix) and key.removeprefix(prefix) in known:
                meant = key.removeprefix(prefix)
                return f"{start} Did you mean {meant}? (prefix dropped; settings live inside {_PREFIX})"
        owner = next((name for name in self.plugin_names if key.startswith(f"{name}_")), None)
        meant_key = closest(key, known)
        if meant_key is not None:
            return f"{start} Did you mean {meant_key}?"
        if owner is not None:
            return (
                f'{start} It looks like an option of plugin "{owner}", which this configuration does not use; name the '
                f"plugin as method or in plugins=, or remove the key."
            )
        return f"{start} No installed plugin that this configuration uses owns it; remove it."
