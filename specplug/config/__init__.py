"""Configuration: vLLM's ``speculative_config`` and engine arguments, resolved against the installed plugins.

Importing this package imports neither torch nor transformers, and no plugin: specs come from the mapping that
``resolve_speculative_config`` is given, and only for names that a configuration asks for.
"""

from __future__ import annotations

from specplug.config.engine import EngineArgs, resolve_engine_args
from specplug.config.explain import Explanation, PluginRow, SettingRow, explain
from specplug.config.files import load_config_file
from specplug.config.resolve import ResolvedConfig, resolve_speculative_config
from specplug.config.schedule import expand_schedule
from specplug.config.schema import SpeculativeConfig

__all__ = [
    "EngineArgs",
    "Explanation",
    "PluginRow",
    "ResolvedConfig",
    "SettingRow",
    "SpeculativeConfig",
    "expand_schedule",
    "explain",
    "load_config_file",
    "resolve_engine_args",
    "resolve_speculative_config",
]
