"""What a head's checkpoint says: its config in any of three formats, and whether its tensors are those of such a head.

Formats: SafeAILab's (the config of a Llama with few layers), vLLM's (the same, or wrapped as ``model_type`` "eagle"),
and that of the speculators package. Weights are not read here, only the headers of their files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from specplug.errors import ModelError
from specplug.proposers.heads.files import StoredTensor, stored_tensors
from specplug.proposers.heads.manifest import read_head_config, size_of, tensor_faults

__all__ = ["BODIES", "Checkpoint", "HeadConfig", "Method"]

Method: TypeAlias = Literal["eagle", "eagle3"]

BODIES = ("llama", "qwen3")
"""Decoder layers that heads may have, by transformers' model types."""
_SPECULATORS_TYPES = {"eagle3": "eagle3", "peagle": "eagle3"}
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "mask_hidden")
_UNUSED_ENDS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head's config, whatever its format.

    ``body``: keys of the decoder layers' own config, as transformers' config class of ``body_type`` takes them.
    ``layer_ids``: the target's layers it reads (id i: the state after i layers), None for the default three.
    ``uses_layers``: false where it reads the target's last, normalised state instead.
    """

    method: Method
    body_type: str
    body: Mapping[str, Any]
    hidden_size: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...] | None = None
    uses_layers: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0
    mask_token_id: int | None = None

    @property
    def num_inputs(self) -> int:
        """States of the target that are read side by side."""
        return 1 if not self.uses_layers else len(self.layer_ids or (0, 0, 0))

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        default = 128 if self.body_type == "qwen3" else self.hidden_size // int(self.body["num_attention_heads"])
        return int(self.body.get("head_dim") or default)

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        default = 32 if self.body_type == "qwen3" else self.body["num_attention_heads"]
        return int(self.body.get("num_key_value_heads") or default)

    @classmethod
    def parse(cls, config: Mapping[str, Any], method: Method) -> HeadConfig:
        """Raises ModelError for what is missing, contradicts itself, or is not supported."""
        speculators_type = config.get("speculators_model_type")
        if speculators_type is not None and _SPECULATORS_TYPES.get(speculators_type) != method:
            raise ModelError(
                f'speculators_model_type="{speculators_type}" is no head for method "{method}"; supported are '
                f"{', '.join(_SPECULATORS_TYPES)} (method eagle3)"
            )
        body = _body(config)
        body_type = _body_type(config, body)
        hidden_size, num_layers, vocab_size, _, _ = (
            size_of(body, key)
            for key in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "intermediate_size")
        )
        for key in ("head_dim", "num_key_value_heads"):
            _size_or(body, key, 1)
        common: dict[str, Any] = {
            "method": method,
            "body_type": body_type,
            "body": body,
            "hidden_size": hidden_size,
            "num_layers": num_layers,
            "vocab_size": vocab_size,
            "logit_scale": _logit_scale(config),
        }
        if method == "eagle":
            return cls(**common, draft_vocab_size=vocab_size, target_hidden_size=hidden_size)
        return cls(**common, **_eagle3_keys(config, hidden_size, vocab_size))


def _eagle3_keys(config: Mapping[str, Any], hidden_size: int, vocab_size: int) -> dict[str, Any]:
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise ModelError(f"eagle_config={nested!r} in its config.json must be a mapping")
    layer_ids = config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    if layer_ids is not None:
        layer_ids = _layer_ids(layer_ids)
    default = config.get("speculators_model_type") == "eagle3"  # as vLLM reads a config without the key
    keys = {
        "draft_vocab_size": _size_or(config, "draft_vocab_size", vocab_size),
        "target_hidden_size": _size_or(config, "target_hidden_size", hidden_size),
        "layer_ids": layer_ids,
        "uses_layers": bool(nested.get("use_aux_hidden_state", True)),
        "norm_before_residual": bool(config.get("norm_before_residual", default)),
        "norm_before_fc": bool(nested.get("norm_before_fc", config.get("norm_before_fc", False))),
        "fc_norm": bool(config.get("fc_norm", False)),
        "norm_output": bool(config.get("norm_output", False)),
        "mask_token_id": _mask_token_id(config, vocab_size),
    }
    if keys["norm_before_fc"] and keys["fc_norm"]:
        raise ModelError("norm_before_fc and fc_norm are both true; a head has one norm before fc or one per layer")
    num_inputs = config.get("num_aux_hidden_states")
    if num_inputs is not None and num_inputs != len(layer_ids or (0, 0, 0)):
        raise ModelError(f"num_aux_hidden_states={num_inputs} contradicts the layer ids {list(layer_ids or ())}")
    return keys


def _size_or(config: Mapping[str, Any], key: str, default: int) -> int:
    """Null counts as absent."""
    return default if config.get(key) is None else size_of(config, key)


def _logit_scale(config: Mapping[str, Any]) -> float:
    scale = config.get("logit_scale")
    if scale is None:
        return 1.0
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ModelError(f"logit_scale={scale!r} in its config.json must be a number above 0")
    return float(scale)


def _mask_token_id(config: Mapping[str, Any], vocab_size: int) -> int | None:
    key = next((key for key in _MASK_KEYS if config.get(key) is not None), None)
    if key is None:
        return None
    if type(config[key]) is not int or not 0 <= config[key] < vocab_size:
        raise ModelError(
            f"{key}={config[key]!r} in its config.json must be one of its token ids, 0 to {vocab_size - 1}"
        )
    return int(config[key])


def _layer_ids(value: object) -> tuple[int, ...]:
    """In ascending order, in which the states stand side by side."""
    if not isinstance(value, list) or not value or not all(type(each) is int and each >= 0 for each in value):
        raise ModelError(f"eagle_aux_hidden_state_layer_ids={value!r} must be a list of layer numbers from 0 on")
    if len(set(value)) < len(value):
        raise ModelError(f"eagle_aux_hidden_state_layer_ids={value!r} names a layer twice")
    return tuple(sorted(value))


def _body(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the decoder layers, in speculators' and in vLLM's wrapping or in none."""
    if "speculators_model_type" in config:
        body = config.get("transformer_layer_config")
        if not isinstance(body, Mapping):
            raise ModelError("transformer_layer_config is missing: the config of the head's decoder layers")
        return dict(body)
    wrapped = config.get("model")
    if isinstance(wrapped, Mapping):
        own = {key: value for key, value in config.items() if key not in ("model", "model_type", "architectures")}
        return {**wrapped, **{key: value for key, value in own.items() if key in wrapped}}
    return dict(config)


def _body_type(config: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    found = body.get("model_type")
    named = (*(body.get("architectures") or ()), *(config.get("architectures") or ()))
    names = [*dict.fromkeys(map(str, named))]
    if found is None or found == "eagle":
        found = next((known for known in BODIES if any(known in name.lower() for name in names)), None)
    if found not in BODIES:
        shown = f'model_type "{found}"' if found else f"architectures {names}"
        raise ModelError(f"the head's decoder layers are of {shown}; supported are {', '.join(BODIES)}")
    return str(found)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A head's folder: its config, and its tensors under one set of names (``layers.0.`` for ``midlayer.``)."""

    folder: Path
    config: HeadConfig
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def read(cls, folder: Path, method: Method, *, is_parallel: bool = False) -> Checkpoint:
        """Raises ModelError, naming the folder, for one that is no usable head of ``method``."""
        try:
            config = HeadConfig.parse(read_head_config(folder), method)
            found = {_plain_name(name): tensor for name, tensor in stored_tensors(folder).items()}
            checkpoint = cls(folder, config, found)
            faults = list(checkpoint._faults(is_parallel=is_parallel))
        except ModelError as error:
            faults = [str(error)]
        if faults:
            raise ModelError(f'the {method} head in "{folder}" cannot be used: {"; ".join(faults)}')
        return checkpoint

    def _faults(self, *, is_parallel: bool) -> Iterator[str]:
        required, optional = expected_tensors(self.config), optional_tensors(self.config)
        tensors = {name: tensor for name, tensor in self.tensors.items() if not _is_unused(name)}
        yield from tensor_faults(tensors, required, optional, f"an {self.config.method} head")
        yield from self._vocabulary_faults()
        if is_parallel:
            yield from self._mask_faults()

    def _vocabulary_faults(self) -> Iterator[str]:
        config = self.config
        if config.draft_vocab_size < config.vocab_size and "d2t" not in self.tensors:
            yield (
                f"it drafts {config.draft_vocab_size} of {config.vocab_size} token ids, and the table d2t that says "
                "which is missing (int64 offsets: target id = draft id + d2t[draft id])"
            )

    def _mask_faults(self) -> Iterator[str]:
        mask, width = self.tensors.get("mask_hidden"), self.config.num_inputs * self.config.target_hidden_size
        if mask is None:
            yield 'parallel_drafting needs the learned "mask_hidden", which only P-EAGLE heads have; set it to false'
        elif math.prod(mask.shape) != width:
            yield f'"mask_hidden" has the shape {list(mask.shape)}, and the states that the head reads are {width} wide'
        if self.config.mask_token_id is None:
            yield f"parallel_drafting needs a mask token in config.json, under one of {', '.join(_MASK_KEYS)}"


def _plain_name(name: str) -> str:
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _is_unused(name: str) -> bool:
    return name in _UNUSED or name.endswith(_UNUSED_ENDS)


Shapes: TypeAlias = dict[str, tuple[int, ...]]


def expected_tensors(config: HeadConfig) -> Shapes:
    """Name -> shape of the tensors that such a head must have."""
    hidden, input_width = config.hidden_size, config.num_inputs * config.target_hidden_size
    shapes: Shapes = {}
    for index in range(config.num_layers):
        shapes |= _layer_tensors(config, index)
    if config.method == "eagle":
        shapes["fc.weight"] = (hidden, 2 * hidden)
        return shapes
    shapes |= {"norm.weight": (hidden,), "layers.0.hidden_norm.weight": (hidden,)}
    if config.uses_layers:
        shapes["fc.weight"] = (hidden, input_width)
        if config.norm_before_fc:
            shapes["input_norm.weight"] = (input_width,)
        if config.fc_norm:
            shapes |= {f"fc_norm.{number}.weight": (config.target_hidden_size,) for number in range(config.num_inputs)}
    return shapes


def _layer_tensors(config: HeadConfig, index: int) -> Shapes:
    hidden, inner, dim = config.hidden_size, int(config.body["intermediate_size"]), config.head_dim
    num_queries, num_keys = int(config.body["num_attention_heads"]) * dim, config.num_kv_heads * dim
    width = 2 * hidden if config.method == "eagle3" and index == 0 else hidden
    shapes: Shapes = {
        "self_attn.q_proj.weight": (num_queries, width),
        "self_attn.k_proj.weight": (num_keys, width),
        "self_attn.v_proj.weight": (num_keys, width),
        "self_attn.o_proj.weight": (hidden, num_queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.method == "eagle3" or index:
        shapes["input_layernorm.weight"] = (hidden,)
    if config.body_type == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    biased = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    biased = (biased if config.body.get("attention_bias") else []) + (
        ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] if config.body.get("mlp_bias") else []
    )
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased}
    return {f"layers.{index}.{name}": shape for name, shape in shapes.items()}


def optional_tensors(config: HeadConfig) -> Shapes:
    """Name -> shape of those that it may have; without them the target's embeddings and output head are used."""
    shapes: Shapes = {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
    }
    if config.method == "eagle":
        shapes["fc.bias"] = (config.hidden_size,)
    else:
        shapes["d2t"] = (config.draft_vocab_size,)
    return shapes
