"""The part of vLLM's ``VllmConfig`` that a vLLM-shaped proposer may read in our host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from specplug.methods import PluginConfig, PluginContext

__all__ = ["ConfigView", "VllmConfigView"]


class ConfigView:
    """Named values, read as attributes. Any other attribute raises ``AttributeError`` naming those there are.

    ``lazy`` values are computed when they are read.
    """

    def __init__(
        self, path: str, values: Mapping[str, Any], lazy: Mapping[str, Callable[[], Any]] | None = None
    ) -> None:
        self._path = path
        self._values = dict(values)
        self._lazy = dict(lazy or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also ends the look-ups of copy and pickle before __init__ has run
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        if name in self._lazy:
            return self._lazy[name]()
        raise AttributeError(
            f"{self._path}.{name} is not available in specplug's host, which offers "
            f"{', '.join(f'{self._path}.{known}' for known in dir(self))}"
        )

    def __dir__(self) -> list[str]:
        return sorted({*self._values, *self._lazy})


class VllmConfigView(ConfigView):
    """Stands in for ``VllmConfig`` in the constructor of a vLLM-shaped proposer.

    ``speculative_config.*`` (every resolved key), ``model_config.max_model_len / get_vocab_size() / dtype /
    hf_config / tokenizer`` (the loaded one, where vLLM has its name), ``scheduler_config.max_num_seqs``,
    ``device_config.device``, ``additional_config``.
    """

    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        session, path = context.session, "vllm_config"
        speculative = {
            **config.settings,
            "method": config.name,
            "num_speculative_tokens": config.num_speculative_tokens,
        }
        model = {"max_model_len": session.max_model_len, "get_vocab_size": lambda: session.vocab_size}
        hf_config = getattr(getattr(context.target, "model", None), "config", None)
        if hf_config is not None:
            model["hf_config"] = hf_config
        tokenizer = getattr(context.target, "tokenizer", None)
        if tokenizer is not None:
            model["tokenizer"] = tokenizer
        super().__init__(
            path,
            {
                "speculative_config": ConfigView(f"{path}.speculative_config", speculative),
                "model_config": ConfigView(f"{path}.model_config", model, {"dtype": lambda: _dtype(session.dtype)}),
                "scheduler_config": ConfigView(f"{path}.scheduler_config", {"max_num_seqs": session.max_num_seqs}),
                "device_config": ConfigView(f"{path}.device_config", {}, {"device": lambda: _device(session.device)}),
                "additional_config": MappingProxyType(dict(config.additional_config)),
            },
        )


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _device(name: str) -> Any:
    import torch

    return torch.device(name)
