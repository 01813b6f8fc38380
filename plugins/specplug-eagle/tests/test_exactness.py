"""Sampled drafts: the output's distribution is the target's, and a law that was not drawn from would show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from specplug_eagle.testing import LLAMA, eagle3_tensors, eagle_tensors, speculators_config

from specplug import LLM, SamplingParams
from specplug.testing import tiny_llama
from specplug.types import Dense, Draft, Indirect

VOCAB_SIZE = 8
NUM_REQUESTS = 1500
PROMPT = [3, 1, 4]
BODY = {**LLAMA, "vocab_size": VOCAB_SIZE}
BOUND = 120.0
"""Of a chi-square with 63 degrees of freedom, passed with a chance of 2e-5."""

MakeHead = Callable[..., Path]


def model() -> Any:
    return tiny_llama(vocab_size=VOCAB_SIZE, eos_token_id=None, initializer_range=0.12)


def expected() -> np.ndarray[Any, Any]:
    """``[vocab * vocab]``: the chance of the second and third output token, by enumeration."""
    target = model()
    with torch.no_grad():
        first = target(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
        contexts = torch.tensor([[*PROMPT, token] for token in range(VOCAB_SIZE)])
        second = target(contexts).logits[:, -1].softmax(-1)
        longer = torch.tensor([[*PROMPT, a, b] for a in range(VOCAB_SIZE) for b in range(VOCAB_SIZE)])
        third = target(longer).logits[:, -1].softmax(-1).view(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)
    joint = first[:, None, None] * second[:, :, None] * third
    return joint.sum(0).reshape(-1).double().numpy()


def distance(folder: Path, *, lies: bool = False, **settings: Any) -> tuple[float, int]:
    """Chi-square between the outputs and the target's own law, and how many draft tokens were accepted."""
    config = {"model": str(folder), "num_speculative_tokens": 2, "draft_sample_method": "probabilistic", **settings}
    prompts = [{"prompt_token_ids": PROMPT}] * NUM_REQUESTS
    params = [SamplingParams(temperature=1.0, max_tokens=4, seed=seed) for seed in range(NUM_REQUESTS)]
    with LLM(model(), speculative_config=config, max_num_seqs=256, strict=True) as llm:
        if lies:
            _claim_uniform(llm)
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    seen = Counter(output.token_ids[1] * VOCAB_SIZE + output.token_ids[2] for output in outputs)
    counts = np.array([seen[cell] for cell in range(VOCAB_SIZE * VOCAB_SIZE)])
    chances = expected() * NUM_REQUESTS
    accepted = sum(sum(output.spec_decode_metrics.per_step_accepted) for output in outputs)
    return float(((counts - chances) ** 2 / chances).sum()), accepted


def _claim_uniform(llm: Any) -> None:
    """Let the proposer report a law that it did not draw from."""
    instance = next(each for name in ("eagle", "eagle3") if (each := llm._session.hooks.instance(name)) is not None)
    propose = instance.propose

    def lying(batch: Any, limits: Any) -> Draft:
        draft = propose(batch, limits)
        laws = []
        for span in draft.laws:
            if isinstance(span.law, Dense | Indirect):
                logits = torch.zeros_like(span.law.draft_logits)
                span = replace(span, law=replace(span.law, draft_logits=logits))
                if isinstance(span.law, Indirect):
                    span = replace(span, law=replace(span.law, logsumexp=logits.logsumexp(-1)))
            laws.append(span)
        return replace(draft, laws=tuple(laws))

    instance.propose = lying


def heads(make_head: MakeHead) -> dict[str, tuple[Path, dict[str, Any]]]:
    eagle = make_head({**BODY, "architectures": ["EagleLlamaForCausalLM"]}, eagle_tensors(BODY))
    reduced = speculators_config(body=BODY, draft_vocab_size=6)
    parallel = speculators_config("peagle", body=BODY, mask_token_id=3)
    return {
        "eagle": (eagle, {}),
        "eagle3": (make_head(reduced, eagle3_tensors(BODY, draft_ids=(0, 1, 3, 4, 5, 7))), {}),
        "peagle": (make_head(parallel, eagle3_tensors(BODY, is_parallel=True)), {"parallel_drafting": True}),
    }


@pytest.mark.parametrize("name", ["eagle", "eagle3", "peagle"])
def test_outputs_follow_the_targets_law(name: str, make_head: MakeHead) -> None:
    folder, settings = heads(make_head)[name]
    chi_square, accepted = distance(folder, **settings)
    assert chi_square < BOUND
    assert accepted > NUM_REQUESTS / 5


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_wrong_law_would_be_seen(name: str, make_head: MakeHead) -> None:
    folder, settings = heads(make_head)[name]
    assert distance(folder, lies=True, **settings)[0] > 2 * BOUND
