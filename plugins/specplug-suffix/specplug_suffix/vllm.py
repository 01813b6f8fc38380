"""Suffix decoding in vLLM: ``{"method": "custom_class", "model": "specplug_suffix.vllm.SuffixProposer", ...}``."""

from __future__ import annotations

from specplug.adapters.vllm import CustomClassProposer

__all__ = ["SuffixProposer"]


class SuffixProposer(CustomClassProposer):
    """Method ``suffix``. vLLM's ``suffix_decoding_*`` keys act; every other key goes into the options."""

    method = "suffix"
