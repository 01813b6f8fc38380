"""The methods that come with the core, against the kit."""

from __future__ import annotations

from specplug.testing import ProposerConformance


class TestNgram(ProposerConformance):
    method = "ngram"
    options = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}


class TestNgramWithoutBackOff(ProposerConformance):
    method = "ngram"
    options = {"prompt_lookup_min": 2, "prompt_lookup_max": 4, "ngram_backoff": False}
