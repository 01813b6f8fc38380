"""What a vLLM user wrote, and what the server's own settings mean for a draft."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specplug.adapters.token_door import DoorTarget
from specplug.errors import ConfigError

__all__ = ["ENVIRONMENT", "OPTIONS", "VllmOptions", "check_server", "read_options", "read_target", "server_notes"]

_LOGGER = logging.getLogger("specplug.vllm")

OPTIONS = "specplug"
"""The key of vLLM's ``additional_config`` that holds our options."""
ENVIRONMENT = "SPECPLUG_VLLM_OPTIONS"
"""The same as JSON text, for where ``additional_config`` cannot be given; the latter goes before."""

MAX_DRAFT = 128
"""vLLM's verification kernels take no longer draft."""

_WHERE = f'additional_config["{OPTIONS}"]'
_EXAMPLE_JSON = '{"prompt_lookup_min": 2, "prompt_lookup_max": 5}'
_EXAMPLE = f"--additional-config '{{\"{OPTIONS}\": {_EXAMPLE_JSON}}}'"
_SERVER_KEYS = {
    "num_speculative_tokens": "it is vLLM's own key; write it in speculative_config",
    "rejection_sample_method": "the server verifies; write it in speculative_config",
}
_OWN_KEYS: Mapping[str, Any] = {
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_cached_requests": 10000,
    "suffix_decoding_max_spec_factor": 1.0,
    "suffix_decoding_min_token_prob": 0.1,
}
"""Keys of vLLM's ``speculative_config`` that act, with vLLM's defaults, which cannot be told from absent ones."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """``speculative_config`` and ``plugins``: as ``specplug.LLM`` takes them. ``metrics_port``: serves counts.
    ``step_price``: as in ``Batch``; None: not given."""

    num_speculative_tokens: int
    speculative_config: Mapping[str, Any]
    plugins: Sequence[Mapping[str, Any] | str] = ()
    metrics_port: int | None = None
    step_price: float | None = None
    additional_config: Mapping[str, Any] = field(default_factory=dict)


def read_options(vllm_config: Any, method: str) -> VllmOptions:
    """The options for ``method`` ("": they name it). Raises ``ConfigError`` listing every fault."""
    server = vllm_config.speculative_config
    additional = getattr(vllm_config, "additional_config", None) or {}
    given = _own_keys(server) | _from_environment() | _mapping(additional.get(OPTIONS), _WHERE)
    faults = [f"{_WHERE}: {key}: {why}" for key, why in _SERVER_KEYS.items() if key in given]
    named = given.pop("method", None)
    faults += _method_faults(named, method)
    plugins, port = given.pop("plugins", ()), given.pop("metrics_port", None)
    if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536):
        faults.append(f"{_WHERE}: metrics_port={port!r} is no port; write a number from 1 to 65535, or leave it out")
    step_price = given.pop("step_price", None)
    if step_price is not None and not _is_price(step_price):
        faults.append(
            f"{_WHERE}: step_price={step_price!r}: what a step takes besides its tokens, in tokens, is a number "
            "above 0; write 20, or leave it out, and it is measured"
        )
    if given.get("draft_sample_method", "greedy") != "greedy":
        faults.append(
            f"{_WHERE}: draft_sample_method={given['draft_sample_method']!r}: vLLM takes draft tokens and not the "
            'laws they were drawn from, so that drafts are greedy there; write "greedy" or leave it out'
        )
    if server.num_speculative_tokens > MAX_DRAFT:
        faults.append(
            f"num_speculative_tokens={server.num_speculative_tokens}: vLLM verifies at most {MAX_DRAFT} draft tokens "
            f"of a request in a step; write {MAX_DRAFT} or less"
        )
    if faults:
        raise ConfigError(faults)
    return VllmOptions(
        num_speculative_tokens=server.num_speculative_tokens,
        speculative_config={
            **given,
            "method": method or named,
            "num_speculative_tokens": server.num_speculative_tokens,
        },
        plugins=plugins,
        metrics_port=port,
        step_price=step_price,
        additional_config={key: value for key, value in additional.items() if key != OPTIONS},
    )


def _is_price(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _own_keys(server: Any) -> dict[str, Any]:
    values = {key: getattr(server, key, default) for key, default in _OWN_KEYS.items()}
    return {key: value for key, value in values.items() if value is not None and value != _OWN_KEYS[key]}


def _from_environment() -> dict[str, Any]:
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{ENVIRONMENT}={text!r} is no JSON ({error}); write {_EXAMPLE_JSON}") from error
    return _mapping(value, ENVIRONMENT)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {type(value).__name__}, not a mapping of options; write {_EXAMPLE}")
    return dict(value)


def _method_faults(given: Any, method: str) -> Iterator[str]:
    if not (method or given):
        yield f'{_WHERE}: no method; write {{"{OPTIONS}": {{"method": "ngram"}}}}, or name a class that has one'
    elif method and given not in (None, method):
        yield (
            f'{_WHERE}: method="{given}", but the class that speculative_config.model names drafts with "{method}"; '
            "name the other class, or specplug.adapters.vllm.CustomClassProposer, which takes the method from here"
        )


# --- the server ---------------------------------------------------------------------------------------------------


def read_target(vllm_config: Any) -> DoorTarget:
    """What vLLM's settings tell of the target; its tokenizer is loaded, from what is on this machine."""
    model, hf_config = vllm_config.model_config, getattr(vllm_config.model_config, "hf_config", None)
    eos = getattr(hf_config, "eos_token_id", None)
    return DoorTarget(
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        device=str(vllm_config.device_config.device),
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
        hidden_size=getattr(hf_config, "hidden_size", None),
        num_layers=getattr(hf_config, "num_hidden_layers", None),
        tokenizer=_tokenizer(model),
    )


def _tokenizer(model_config: Any) -> Any:
    name = getattr(model_config, "tokenizer", None)
    if not isinstance(name, str) or getattr(model_config, "skip_tokenizer_init", False):
        return name if callable(name) else None  # our own host hands over the tokenizer itself
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, revision=getattr(model_config, "tokenizer_revision", None))
    except Exception as error:  # noqa: BLE001 - a method that needs one says so itself
        _LOGGER.warning("specplug: no tokenizer for the draft side: %s: %s", type(error).__name__, error)
        return None


def check_server(vllm_config: Any) -> None:
    """Raise ``ConfigError`` for switches under which vLLM would never call the class as agreed."""
    faults = []
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        faults.append(
            "VLLM_USE_V2_MODEL_RUNNER=1 asks for the runner that has no custom_class; unset the variable, and vLLM "
            "takes the other one"
        )
    if getattr(vllm_config.scheduler_config, "async_scheduling", None):
        faults.append(
            "asynchronous scheduling hides the sampled tokens from a custom_class; leave --async-scheduling out, or "
            "write --no-async-scheduling"
        )
    if faults:
        raise ConfigError(faults)


def server_notes(vllm_config: Any) -> list[str]:
    """What of the server's own settings will have no effect, and what to change."""
    server = vllm_config.speculative_config
    notes = ["vLLM refuses requests with min_p or logit_bias while speculation is on"]
    if getattr(server, "rejection_sample_method", None) == "block":
        notes.append('rejection_sample_method="block" acts like "standard" in this runner; specplug.LLM has the rule')
    if getattr(server, "num_speculative_tokens_per_batch_size", None):
        notes.append(
            f"vLLM ignores num_speculative_tokens_per_batch_size for a custom_class; move it to {_WHERE}, where it acts"
        )
    if getattr(server, "draft_sample_method", None) == "probabilistic":
        notes.append('draft_sample_method="probabilistic" has no effect: vLLM takes no draft probabilities here')
    return notes
