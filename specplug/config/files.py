"""Configuration files: YAML, or JSON, with vLLM's names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specplug.config.keys import show
from specplug.config.reading import read_mapping, unique_keys
from specplug.errors import ConfigError

if TYPE_CHECKING:
    import yaml

__all__ = ["load_config_file"]

_SECTIONS = ("speculative_config", "sampling_params", "additional_config")


def load_config_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings in a ``.yaml``, ``.yml`` or ``.json`` file, dashes in keys as underscores.

    Engine arguments stand at the top; ``speculative_config``, ``sampling_params`` and ``additional_config`` are
    nested mappings (JSON text is understood there too), ``plugins`` is a list. Raises ``ConfigError`` naming the
    file when it is missing, malformed, or gives a key twice.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {file} cannot be read: {error}") from None
    loaded = read_mapping(text, str(file)) if file.suffix == ".json" else _read_yaml(text, file)
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"configuration file {file} holds {show(loaded)}, not a mapping; write lines such as 'model: x'"
        )
    settings = unique_keys(loaded, str(file))
    for name in _SECTIONS:
        if name in settings:
            settings[name] = read_mapping(settings[name], name)
    return settings


def _read_yaml(text: str, file: Path) -> Any:
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        """Refuses what YAML itself would settle silently: the same key twice."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            _refuse_repeats(node)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader=UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration file {file} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"configuration file {file} is nested too deeply") from None
    except _RepeatedKeyError as error:
        raise ConfigError(f"configuration file {file}, {error}; keep one") from None


class _RepeatedKeyError(Exception):
    """A YAML mapping that has a key twice."""


def _refuse_repeats(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.value in seen and key.value != "<<":
            raise _RepeatedKeyError(f"line {key.start_mark.line + 1}: {key.value} is given twice")
        seen.add(str(key.value))
