"""Run prompts through the host loop on a toy or tiny target, with a proposer that a test made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specplug import LLM, RequestOutput, SamplingParams
from specplug.hooks import ProcessManager
from specplug.testing.proposers import as_method

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.fixture
def make_llm() -> Callable[..., LLM]:
    """``make_llm(target, proposer, K, **engine)``: an LLM; ``proposer`` None decodes plainly.

    ``laws``: what the proposer reports; ``rule``: how random rows are verified.
    """

    def make(target: Any, proposer: object | None = None, k: int = 3, **engine: Any) -> LLM:
        manager = engine.pop("manager", None) or ProcessManager()
        config = engine.pop("speculative_config", None)
        if proposer is not None:
            manager.register(
                as_method("scripted", lambda context: proposer, laws=engine.pop("laws", frozenset({"one_hot"})))
            )
            config = {"method": "scripted", "num_speculative_tokens": k}
            if "rule" in engine:
                config["rejection_sample_method"] = engine.pop("rule")
        return LLM(target, speculative_config=config, manager=manager, strict=engine.pop("strict", True), **engine)

    return make


@pytest.fixture
def decode(make_llm: Callable[..., LLM]) -> Callable[..., list[RequestOutput]]:
    """``decode(target, prompts, params, proposer, K)``: the finished outputs, in order."""

    def run(
        target: Any,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        proposer: object | None = None,
        k: int = 3,
        **engine: Any,
    ) -> list[RequestOutput]:
        with make_llm(target, proposer, k, **engine) as llm:
            return llm.generate([list(prompt) for prompt in prompts], params)

    return run
