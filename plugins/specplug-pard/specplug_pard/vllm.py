"""PARD in vLLM: ``{"method": "custom_class", "model": "specplug_pard.vllm.PardProposer", ...}``."""

from __future__ import annotations

from specplug.adapters.vllm import CustomClassProposer

__all__ = ["PardProposer"]


class PardProposer(CustomClassProposer):
    """Method ``pard``; its model comes from the options."""

    method = "pard"
