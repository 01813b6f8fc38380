"""What a draft checkpoint's ``config.json`` says: its kind and its sizes. Weights are not read, their names may be."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specplug.config.known_methods import KNOWN_METHODS
from specplug.config.weight_header import read_weight_header
from specplug.errors import ConfigError

__all__ = ["SPECULATORS_TYPES", "Checkpoint", "folder_fault", "head_fault", "model_fault", "read_checkpoint"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")

_SPECULATORS_TYPES = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "dflash": "dflash",
    "dflash2": "dflash",
    "dspark": "dspark",
    "mlp": "mlp_speculator",
}
SPECULATORS_TYPES = tuple(_SPECULATORS_TYPES)
"""Kinds of checkpoints in the speculators format that a method is known for."""

# (method, parts of architecture names and model types, keys that only such checkpoints have), asked in order.
_DECLARATIONS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("eagle3", ("eagle3",), ("eagle_config", "eagle_aux_hidden_state_layer_ids")),
    ("eagle", ("eagle",), ()),
    ("dspark", ("dspark",), ("dspark_block_size", "markov_rank")),
    ("dflash", ("dflash", "museglimmerassistant"), ("dflash_config",)),
    ("mlp_speculator", ("mlp_speculator", "mlpspeculator"), ()),
    ("medusa", ("medusa",), ("medusa_num_heads",)),
    ("mtp", ("_mtp", "mtpmodel", "mtpforcausallm", "gemma4_assistant", "gemma4_unified_assistant"), ()),
)
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_PREDICT_LAYER_KEYS = (
    "n_predict",
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
    "num_mtp_layers",
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint folder's ``config.json``."""

    folder: Path
    config: Mapping[str, Any]

    @property
    def declared_method(self) -> str | None:
        """The method that the contents declare; None for a plain causal LM. The folder's name plays no part."""
        speculators_type = self.config.get("speculators_model_type")
        if isinstance(speculators_type, str):
            return _SPECULATORS_TYPES.get(speculators_type)
        names = " ".join(
            map(str, [self.config.get("model_type", ""), *(self.config.get("architectures") or ())])
        ).lower()
        for method, parts, keys in _DECLARATIONS:
            if any(part in names for part in parts) or any(key in self.config for key in keys):
                return method
        return self._method_by_weights()

    def _method_by_weights(self) -> str | None:
        """EAGLE's first heads were published with the config of a plain model: only their tensors tell them apart."""
        names = self._tensor_names()
        if "fc.weight" not in names:
            return None
        return "eagle3" if any(name.endswith(".hidden_norm.weight") for name in names) else "eagle"

    def _tensor_names(self) -> set[str]:
        """Of all safetensors files; none where one cannot be read."""
        names: set[str] = set()
        try:
            for file in sorted(self.folder.glob("*.safetensors")):
                names |= read_weight_header(file).keys()
        except (OSError, ValueError):
            return set()  # who loads the checkpoint says what is wrong with it
        return names

    @property
    def causal_lm(self) -> str | None:
        """The architecture of a whole causal LM, such as "LlamaForCausalLM".

        None for heads, and where only pickles, which are not opened, could tell a head from the model it is named like.
        """
        architectures = map(str, self.config.get("architectures") or ())
        name = next((each for each in architectures if each.endswith(("ForCausalLM", "LMHeadModel"))), None)
        return name if name and self._tensor_names() and self.declared_method is None else None

    @property
    def has_tokenizer(self) -> bool:
        """Whether tokenizer files lie beside the weights."""
        return any((self.folder / name).is_file() for name in _TOKENIZER_FILES)

    @property
    def is_parallel_eagle(self) -> bool:
        """A P-EAGLE head in the speculators format."""
        return self.config.get("speculators_model_type") == "peagle"

    @property
    def proposal_count(self) -> int | None:
        """The draft length that a speculators-format checkpoint was published with."""
        speculators = self.config.get("speculators_config")
        proposals = speculators.get("proposal_methods") if isinstance(speculators, Mapping) else None
        first = proposals[0] if isinstance(proposals, list) and proposals else None
        return _count(first.get("speculative_tokens")) if isinstance(first, Mapping) else None

    @property
    def num_predict_layers(self) -> int | None:
        """Prediction layers or heads, under any of the names in use."""
        return self.size(*_PREDICT_LAYER_KEYS)

    @property
    def num_medusa_heads(self) -> int | None:
        return _count(self.config.get("medusa_num_heads", self.config.get("num_heads")))

    @property
    def block_size(self) -> int | None:
        """Tokens in the block that a block drafter was trained on."""
        nested = self.config.get("dflash_config")
        inner = nested.get("block_size") if isinstance(nested, Mapping) else None
        return _count(self.config.get("dspark_block_size", self.config.get("block_size", inner)))

    @property
    def samples_from_anchor(self) -> bool:
        """Whether slot 0 of the block predicts a token, rather than repeat the anchor."""
        nested = self.config.get("dflash_config")
        inner = nested.get("sample_from_anchor") if isinstance(nested, Mapping) else None
        return bool(self.config.get("sample_from_anchor", inner))

    @property
    def last_layer_read(self) -> int | None:
        """The highest of the target's layers whose states a head reads, where the file names them."""
        nested = self.config.get("eagle_config")
        inner = nested.get(_LAYER_IDS) if isinstance(nested, Mapping) else None
        layers = self.config.get(_LAYER_IDS) or inner
        return max(filter(None, map(_count, layers)), default=None) if isinstance(layers, list) else None

    @property
    def unknown_kind(self) -> str | None:
        """The type of a checkpoint in the speculators format that no method is known for."""
        found = self.config.get("speculators_model_type")
        return None if found is None or found in _SPECULATORS_TYPES else str(found)

    @property
    def max_positions(self) -> int | None:
        """The longest context that the model supports, where the file says so."""
        return self.size("max_position_embeddings")

    def size(self, *keys: str) -> int | None:
        """The first of these sizes that the file states, at the top or in the config of the decoder layers."""
        return next((count for key in keys if (count := _count(self._find(key))) is not None), None)

    def _find(self, key: str) -> object:
        nested = [self.config.get(name) for name in ("text_config", "transformer_layer_config", "model")]
        return next((part[key] for part in (self.config, *nested) if isinstance(part, Mapping) and key in part), None)


def folder_fault(model: str, what: str) -> str | None:
    """Why ``model`` can be neither a checkpoint's folder nor a hub id, which may be in the local cache; None otherwise.

    ``what``: what the folder should hold, for the message.
    """
    folder = Path(model).expanduser()
    if folder.is_file():
        return f"{model} is a file; give the folder that holds config.json and safetensors weights"
    if _is_path(model) and not folder.exists():
        return f"folder {model} does not exist; give the folder of {what}"
    return None


def _is_path(model: str) -> bool:
    """Whether the text can be a folder only, and no hub id."""
    return model.startswith(("/", "./", "../", "~")) or model.count("/") > 1


def model_fault(model: str, where: str) -> str | None:
    """Why ``model`` can be no target or draft model, as far as its folder and ``config.json`` tell; None otherwise.

    ``where``: the setting that names it.
    """
    fault = folder_fault(model, "a Hugging Face causal LM")
    if fault is not None:
        return f'{where}="{model}": {fault}'
    try:
        return head_fault(read_checkpoint(model, where), where)
    except ConfigError as error:
        return str(error)


def head_fault(checkpoint: Checkpoint | None, where: str) -> str | None:
    """The message for a head in the place of a causal LM, named by the setting ``where``; None otherwise.

    A model that may carry its head in its own checkpoint is none.
    """
    method = checkpoint.declared_method if checkpoint else None
    if checkpoint is None or method is None or KNOWN_METHODS[method].model_defaults_to_target:
        return None
    folder = str(checkpoint.folder)
    config = {"method": method, "model": folder, "num_speculative_tokens": 3}
    return (
        f'{where}="{folder}" is a head for the method {method}, not a causal LM; give a causal LM here. The head '
        f"drafts for the target that it was trained for: speculative_config={json.dumps(config, ensure_ascii=False)}"
    )


def read_checkpoint(path: object, where: str) -> Checkpoint | None:
    """The checkpoint in folder ``path``; None when it is no local folder (a hub id, a loaded model).

    Raises ``ConfigError``, naming the setting ``where``, for a folder without a readable ``config.json``.
    """
    if not isinstance(path, str | os.PathLike):
        return None
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f'{where}="{folder}" has no config.json; point it to the folder of a Hugging Face checkpoint')
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f'{where}="{folder}": its config.json cannot be read: {error}') from None
    if not isinstance(config, dict):
        raise ConfigError(f'{where}="{folder}": its config.json holds no mapping')
    return Checkpoint(folder, config)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None
