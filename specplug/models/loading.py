"""From engine arguments to a target: folder checks with clear errors, weights, tokenizer, limits.

Nothing is downloaded, pickles are not opened and code from a checkpoint is not run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from specplug.config.checkpoint import Checkpoint, head_fault
from specplug.errors import ConfigError, ModelError
from specplug.models.fused import fuse_layers
from specplug.models.kernels import Decoder, find_decoder
from specplug.models.packing import can_pack, pack_linears
from specplug.models.probe import check_config, check_model, longest_exact_length, probe_model
from specplug.models.runner import TargetRunner, layer_windows
from specplug.models.target import Target

__all__ = ["DEFAULT_MAX_MODEL_LEN", "EngineLike", "check_folder", "load_target", "load_tokenizer"]

DEFAULT_MAX_MODEL_LEN = 32768
"""Caps the default of ``max_model_len``, so that a forgotten limit cannot fill the memory; ask for more by name."""
_MIN_QUERY_TOKENS = 64
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_INDEX_NAME = "model.safetensors.index.json"


class EngineLike(Protocol):
    """What is read of ``specplug.config.EngineArgs``."""

    @property
    def model(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def skip_tokenizer_init(self) -> bool: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def tokenizer_revision(self) -> str | None: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def kernels(self) -> str: ...
    @property
    def model_fields_set(self) -> Collection[str]:
        """The arguments that were given."""


def load_target(engine: EngineLike) -> Target:
    """The target that ``engine.model`` names: a folder, a hub id in the local cache, a loaded model or a target.

    ``max_model_len`` defaults to the config's ``max_position_embeddings``, at most ``DEFAULT_MAX_MODEL_LEN``. Raises
    ModelError for a model that cannot be loaded or driven, ConfigError for a limit, dtype or device that cannot be.
    """
    if _is_target(engine.model):
        target = cast(Target, engine.model)
        faults = list(_target_faults(engine, target))
        if faults:
            raise ConfigError(faults)
        return target
    if isinstance(engine.model, PreTrainedModel):
        return _borrow(engine, engine.model)
    if not isinstance(engine.model, str | os.PathLike):
        raise ModelError(
            f"model={type(engine.model).__name__} cannot be a target; give a folder, a loaded PreTrainedModel, or an "
            "object that implements specplug.models.target.Target"
        )
    return _load(engine)


def _is_target(model: Any) -> bool:
    return all(hasattr(model, name) for name in ("acquire", "release", "rollback", "forward", "max_query_tokens"))


def _target_faults(engine: EngineLike, target: Target) -> Iterator[str]:
    """Arguments that a target object, which was built with its own, does not follow."""
    own: dict[str, object] = {
        "max_num_seqs": target.max_num_seqs,
        "max_model_len": target.max_model_len,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "tokenizer": target.tokenizer,
        "skip_tokenizer_init": target.tokenizer is None,
    }
    for name in ("revision", "tokenizer_revision", *own):
        asked, actual = getattr(engine, name), own.get(name)
        is_given = name in engine.model_fields_set and asked not in (None, False, "auto")
        if is_given and asked != actual and str(actual).partition(":")[0] != asked:
            brings = f", which brings its own ({actual!r})" if name in own else ", which is loaded already"
            yield f"{name}={asked!r} was given with a target object{brings}; leave {name} out"
    if engine.max_num_batched_tokens < target.max_num_seqs:
        yield (
            f"max_num_batched_tokens={engine.max_num_batched_tokens} is below the target's max_num_seqs="
            f"{target.max_num_seqs}: every running request needs a token a step; raise the first, or build the target "
            "with fewer rows"
        )


def _load(engine: EngineLike) -> TargetRunner:
    folder = find_folder(engine.model, engine.revision)
    check_folder(folder)
    config = _load_config(folder)
    check_config(config)
    max_model_len = _max_model_len(engine, config)
    device = _device(engine.device)
    tokenizer = _tokenizer_of(engine, folder)
    _check_tokenizer(tokenizer, config.get_text_config(decoder=True).vocab_size)
    model = _load_model(folder, config, engine.dtype).to(device)
    return _run(engine, model, tokenizer, max_model_len, lambda: _make_fast(engine, model, max_model_len))


def _make_fast(engine: EngineLike, model: Any, max_model_len: int) -> Decoder | None:
    """What is done to a model that nobody else holds: its layers go to a decoder, or are made to run in fewer calls."""
    decoder = find_decoder(engine.kernels, model, max_model_len)
    if decoder is None and can_pack(model.device, model.dtype):
        fuse_layers(model)
        pack_linears(model)
    return decoder


def _borrow(engine: EngineLike, model: PreTrainedModel) -> TargetRunner:
    """A model that the caller loaded: its dtype and device are the caller's."""
    if engine.kernels not in ("auto", "torch"):
        raise ConfigError(
            f'kernels="{engine.kernels}" was given with a loaded model, which keeps its own weights; give the folder '
            "of the model instead, or leave kernels out"
        )
    for name, asked, actual in (
        ("dtype", engine.dtype, str(model.dtype).removeprefix("torch.")),
        ("device", engine.device, str(model.device)),
    ):
        if asked not in ("auto", actual, actual.partition(":")[0]):
            raise ConfigError(
                f'{name}="{asked}" was given with a loaded model whose {name} is "{actual}"; leave {name} out, or '
                "move the model yourself with model.to(...)"
            )
    check_config(model.config)
    tokenizer = _tokenizer_of(engine, None)
    _check_tokenizer(tokenizer, _num_embeddings(model))
    return _run(engine, model, tokenizer, _max_model_len(engine, model.config), lambda: None)


def _run(
    engine: EngineLike, model: Any, tokenizer: Any, max_model_len: int, make_fast: Callable[[], Decoder | None]
) -> TargetRunner:
    check_model(model)
    decoder = probe_model(model, make_fast)
    return TargetRunner(
        model,
        tokenizer,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=max_model_len,
        max_query_tokens=_max_query_tokens(engine, model.config),
        decoder=decoder,
    )


def _max_query_tokens(engine: EngineLike, config: Any) -> int:
    """Prompt chunks as long as a step allows; with sliding windows at most half a window, because every further
    token lengthens the rings that each step reads."""
    windows = [window for window in layer_windows(config) if window is not None]
    limits = [max(_MIN_QUERY_TOKENS, window // 2) for window in windows]
    return min([engine.max_num_batched_tokens, *limits])


# --- folders --------------------------------------------------------------------------------------------------


def find_folder(model: str | os.PathLike[str], revision: str | None) -> Path:
    """The folder itself, or the local snapshot of a hub id."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    name = os.fspath(model)
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except HFValidationError as error:
        raise ModelError(f'model folder "{name}" does not exist') from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f'model "{name}" is neither a folder nor in the local Hugging Face cache, and specplug downloads nothing; '
            f'fetch it once with "hf download {name}", or give the path of a folder'
        ) from error


def check_folder(folder: Path) -> None:
    """Raise ModelError for a folder from which no model can be loaded. Reads ``config.json`` and file names only."""
    if not folder.is_dir():
        raise ModelError(
            f'model="{folder}" is a file; give the folder that holds config.json and safetensors weights (a GGUF file '
            "has to be dequantised and saved with save_pretrained first)"
        )
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ModelError(f'model folder "{folder}" cannot be read: permission denied')
    config = _read_json(folder / "config.json")
    if fault := head_fault(Checkpoint(folder, config), "model"):
        raise ModelError(fault)
    _check_code(folder, config)
    _check_weights(folder)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f'"{path.parent}" has no {path.name}; give the folder of a Hugging Face causal LM') from error
    except (OSError, ValueError) as error:
        raise ModelError(f'"{path}" cannot be read: {error}') from error
    if not isinstance(content, dict):
        raise ModelError(f'"{path}" holds no JSON object')
    return content


def _check_code(folder: Path, config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type in CONFIG_MAPPING:
        return
    if "auto_map" in config:
        raise ModelError(
            f'model "{folder}" (model type "{model_type}") needs code from its checkpoint (trust_remote_code), which '
            "specplug does not run; load it yourself and pass the object: "
            "LLM(AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True))"
        )
    raise ModelError(
        f'model "{folder}" has the model type "{model_type}", which the installed transformers does not know; a newer '
        "version may"
    )


def _check_weights(folder: Path) -> None:
    if (folder / _INDEX_NAME).is_file():
        shards = set(_read_json(folder / _INDEX_NAME).get("weight_map", {}).values())
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            raise ModelError(f'model folder "{folder}" is incomplete: {", ".join(missing)} missing')
    elif not any(folder.glob("*.safetensors")):
        raise ModelError(_without_safetensors(folder))


def _without_safetensors(folder: Path) -> str:
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        return (
            f'model folder "{folder}" holds pickled weights only ({pickles[0]}), and unpickling runs code; convert '
            f'them once, where you trust them: AutoModelForCausalLM.from_pretrained("{folder}", '
            "use_safetensors=False).save_pretrained(NEW_FOLDER), and give NEW_FOLDER"
        )
    return f'model folder "{folder}" holds no weights: no *.safetensors file'


# --- loading --------------------------------------------------------------------------------------------------


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _load_config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f'"{folder / "config.json"}" is not a usable config: {_one_line(error)}') from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f'model type "{config.model_type}" of "{folder}" is not a causal LM')
    return config


def _load_model(folder: Path, config: Any, dtype: str) -> Any:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(f'the weights of "{folder}" cannot be loaded: {_one_line(error)}') from error
    model, report = loaded  # output_loading_info=True returns both
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f'the weights of "{folder}" are incomplete: {len(missing)} tensors are missing, first {missing[0]}'
        )
    return model.eval()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'device="{name}" is not a device; write "cpu", "cuda" or "cuda:1"') from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f'device="{name}": torch sees {torch.cuda.device_count()} CUDA devices; write "cpu"')
    return device


def _max_model_len(engine: EngineLike, config: Any) -> int:
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    limits = {"max_position_embeddings": positions, "LongRoPE's original length": longest_exact_length(config)}
    known = {name: int(limit) for name, limit in limits.items() if limit is not None}
    if engine.max_model_len is None:
        return min([*known.values(), DEFAULT_MAX_MODEL_LEN])
    for name, limit in known.items():
        if engine.max_model_len > limit:
            raise ConfigError(
                f"max_model_len={engine.max_model_len} is more than the {limit} positions of the model ({name}); "
                f"write at most {limit}"
            )
    return engine.max_model_len


# --- tokenizer ------------------------------------------------------------------------------------------------


def _tokenizer_of(engine: EngineLike, folder: Path | None) -> Any:
    """``engine.tokenizer`` (an object, a folder or a cached hub id), else the model folder's; None if skipped."""
    if engine.skip_tokenizer_init:
        return None
    source = engine.tokenizer if engine.tokenizer is not None else folder
    if source is None or not isinstance(source, str | os.PathLike):
        return source
    return load_tokenizer(source, engine.tokenizer_revision or engine.revision)


def load_tokenizer(source: str | os.PathLike[str], revision: str | None = None) -> Any:
    """The tokenizer of a folder or a cached hub id. Raises ModelError."""
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f'no tokenizer can be loaded from "{source}": {_one_line(error)}; give tokenizer=FOLDER, or '
            "skip_tokenizer_init=True to work with token ids only"
        ) from error


def _num_embeddings(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _check_tokenizer(tokenizer: Any, num_ids: int) -> None:
    """Ids of the base vocabulary and the special tokens in use must be rows of the model.

    Further added tokens may lie beyond (Gemma 3 declares an image token its text models have no row for).
    """
    if tokenizer is None:
        return
    beyond = max(_needed_ids(tokenizer), default=0)
    if beyond >= num_ids:
        raise ModelError(
            f"the tokenizer does not fit the model: it makes ids up to {beyond}, the model has {num_ids}; give the "
            "tokenizer the model was trained with"
        )


def _needed_ids(tokenizer: Any) -> Iterator[int]:
    added = set(tokenizer.added_tokens_decoder)
    yield from (token_id for token_id in tokenizer.get_vocab().values() if token_id not in added)
    yield from (i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None)
