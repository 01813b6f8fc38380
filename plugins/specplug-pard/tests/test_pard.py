"""PARD behind the host loop, with tiny random models: rows B140, B141, and what one forward for K drafts must be."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from specplug_pard.options import PardOptions, mask_token
from specplug_pard.proposer import PardProposer

from specplug import LLM, Batch, ConfigError, Dense, Draft, PluginContext, SamplingParams
from specplug.config import resolve_speculative_config
from specplug.config.engine import EngineArgs
from specplug.hooks import ProcessManager, process_manager
from specplug.models.runner import TargetRunner
from specplug.proposers.draft_sampling import DraftSampler
from specplug.proposers.model_proposer import Slots
from specplug.testing import ProposerConformance, Rig
from specplug.testing.architectures import tiny_model
from specplug.testing.models import tiny_llama
from specplug.testing.proposers import as_method

MASK = 63
PROMPTS = [[5, 6] * 5, [1, 2, 3], [7], list(range(40))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
Save = Callable[..., str]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Save a model as a PARD draft, with the given keys in its config."""

    def run(model: Any, name: str = "draft", **config: Any) -> str:
        for key, value in config.items():
            setattr(model.config, key, value)
        model.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return run


def pard(folder: str, k: int = 4, **keys: Any) -> dict[str, Any]:
    return {
        "method": "draft_model",
        "model": folder,
        "parallel_drafting": True,
        "num_speculative_tokens": k,
        **keys,
    }


def runner(model: Any, **how: Any) -> TargetRunner:
    return TargetRunner(model, **({"max_num_seqs": 8, "max_model_len": 64, "max_query_tokens": 16} | how))


def decode(
    target: Any,
    config: Mapping[str, Any] | None = None,
    params: Any = GREEDY,
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    proposer: Callable[[PluginContext], object] | None = None,
    k: int = 4,
) -> list[list[int]]:
    manager = ProcessManager()
    if proposer is not None:
        manager.register(as_method("under_test", proposer, laws=frozenset({"dense"})), name="under_test")
        config = {"method": "under_test", "num_speculative_tokens": k}
    rows = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    with LLM(target, speculative_config=config, manager=manager, strict=True, seed=0) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(rows, params)]


class Keeps(PardProposer):
    """Keeps the drafts and the texts they follow, and counts forwards."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.drafts: list[tuple[list[list[int]], Draft]] = []
        self.num_forwards: list[int] = []
        self._count = 0
        forward = self.draft.forward

        def counted(*args: Any) -> Any:
            self._count += 1
            return forward(*args)

        self.draft.forward = counted  # type: ignore[method-assign]

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        self._count = 0
        draft = super().propose(batch, limits)
        self.num_forwards.append(self._count)
        self.drafts.append(([ids.tolist() for ids in batch.token_ids], draft))
        return draft

    def draw(self, rows: Sequence[Slots], sampler: DraftSampler) -> None:
        super().draw(rows, sampler)
        for row in rows:  # no mask stays in the cache
            assert (
                self.cache.length(row.request_id)
                == row.reading.num_tokens
                == row.reading.num_past + len(row.reading.token_ids) - (row.count - 1)
            )


def keeping(made: list[Keeps], model: Any, **how: Any) -> Callable[[PluginContext], Keeps]:
    def make(context: PluginContext) -> Keeps:
        made.append(Keeps(runner(model), context, mask_token_id=MASK, name="pard", **how))
        return made[-1]

    return make


def reference_logits(model: Any, text: Sequence[int], num_masks: int) -> torch.Tensor:
    """``[num_masks + 1, vocab]``: a plain forward over the text and the masks."""
    with torch.inference_mode():
        ids = torch.tensor([[*text, *[MASK] * num_masks]])
        return model(input_ids=ids, use_cache=False).logits[0, len(text) - 1 :]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_greedy_text_is_the_plain_text_whatever_k(save: Save, k: int) -> None:
    plain = decode(tiny_llama())
    assert decode(tiny_llama(), pard(save(tiny_llama(seed=1), pard_token=MASK), k)) == plain
    assert decode(tiny_llama(), pard(save(tiny_llama(), "same", pard_token=MASK), k)) == plain


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral", "gpt2"])
def test_other_architectures(save: Save, name: str) -> None:
    plain = decode(tiny_model(name))
    assert decode(tiny_model(name), pard(save(tiny_model(name, seed=1), name, pard_token=96), 3)) == plain


def test_the_drafts_are_those_of_one_forward_over_text_and_masks() -> None:
    made: list[Keeps] = []
    model = tiny_llama(seed=1)
    decode(tiny_llama(), proposer=keeping(made, model))
    proposer = made[0]
    assert set(proposer.num_forwards) == {1}
    reference = tiny_llama(seed=1)
    assert len(proposer.drafts) >= 10
    for texts, draft in proposer.drafts:
        start = 0
        for text, count in zip(texts, draft.num_draft_tokens, strict=True):
            if count:
                wanted = reference_logits(reference, text, count - 1).argmax(-1).tolist()
                assert draft.draft_token_ids[start : start + count].tolist() == wanted
            start += count


def test_laws_are_those_of_each_position() -> None:
    made: list[Keeps] = []
    params = SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True, seed=3)
    decode(tiny_llama(), params=params, proposer=keeping(made, tiny_llama(seed=1), is_probabilistic=True))
    reference = tiny_llama(seed=1)
    seen = 0
    for texts, draft in made[0].drafts:
        start = 0
        (span,) = draft.laws
        assert isinstance(span.law, Dense)
        for text, count in zip(texts, draft.num_draft_tokens, strict=True):
            wanted = reference_logits(reference, text, count - 1)[:count] / 0.7
            torch.testing.assert_close(span.law.draft_logits[start : start + count], wanted, atol=1e-4, rtol=1e-4)
            start += count
            seen += count
    assert seen > 40


def test_limits_differ_between_rows() -> None:
    """Near their ends requests get shorter drafts; each asks for as many masks as it needs."""
    made: list[Keeps] = []
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (3, 16, 2, 9)]
    text = decode(tiny_llama(), params=params, proposer=keeping(made, tiny_llama(seed=1)))
    assert text == decode(tiny_llama(), params=params)
    assert any(len(set(draft.num_draft_tokens)) > 2 for _, draft in made[0].drafts)


def test_a_batch_is_each_request_alone(save: Save) -> None:
    config = pard(save(tiny_llama(seed=1), pard_token=MASK), 3, draft_sample_method="probabilistic")
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=14, ignore_eos=True)
        for number, temperature in enumerate((0.0, 0.9, 0.7, 1.2))
    ]
    together = decode(tiny_llama(), config, params)
    alone = [
        decode(tiny_llama(), config, [each], prompts=[prompt])[0] for prompt, each in zip(PROMPTS, params, strict=True)
    ]
    assert together == alone


# --- B141: the sequence is not shifted --------------------------------------------------------------------------


def test_B141_the_first_token_reaches_the_draft(save: Save) -> None:
    """Prompts that differ in their first token only: a draft that never read it would say the same."""
    made: list[Keeps] = []
    prompts = [[first, 3, 4] for first in range(8)]
    decode(tiny_llama(), prompts=prompts, proposer=keeping(made, tiny_llama(seed=1)), params=GREEDY)
    texts, draft = made[0].drafts[0]
    assert [text[0] for text in texts] == list(range(8))
    count = draft.num_draft_tokens[0]
    drafts = draft.draft_token_ids.view(8, count).tolist()
    reference = tiny_llama(seed=1)
    wanted = [reference_logits(reference, text, count - 1).argmax(-1).tolist() for text in texts]
    assert drafts == wanted
    shifted = [reference_logits(reference, text[1:], count - 1).argmax(-1).tolist() for text in texts]
    assert drafts != shifted  # the control: without the first token it would be something else


# --- B140: the mask token -------------------------------------------------------------------------------------


def early_fault(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_speculative_config(config, process_manager().methods, engine=EngineArgs(model="target"))
    return str(caught.value)


def test_B140_no_mask_token_and_one_outside_the_vocabulary(save: Save) -> None:
    assert "names no mask token" in early_fault(pard(save(tiny_llama(), "none")))
    text = early_fault(pard(save(tiny_llama(), "beyond", pard_token=64)))
    assert "pard_token=64 is outside the draft's 64 ids" in text


def test_B140_a_mask_token_that_ends_texts_too(save: Save, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        decode(tiny_llama(), pard(save(tiny_llama(eos_token_id=9), pard_token=9)))
    assert any("pard_token=9 of the PARD draft is its eos_token_id too" in each.getMessage() for each in caplog.records)


def test_the_mask_token_is_looked_up_in_vllms_order() -> None:
    full = {
        "vocab_size": 64,
        "dflash_config": {"mask_token_id": 1},
        "mask_token_id": 2,
        "dspark_noise_token_id": 3,
        "pard_token": 4,
        "ptd_token_id": 5,
    }
    assert mask_token(full, given=6) == 6
    for wanted, key in enumerate(["dflash_config", "mask_token_id", "dspark_noise_token_id", "pard_token"], 1):
        assert mask_token(full) == wanted
        del full[key]
    assert mask_token(full) == 5
    assert mask_token({"text_config": {"vocab_size": 300}, "pard_token": 299}) == 299


@pytest.mark.parametrize("value", [True, False, "63", "<mask>", 63.0, [63]])
def test_a_mask_token_that_is_no_number(save: Save, value: object) -> None:
    text = early_fault(pard(save(tiny_llama(), pard_token=value)))
    assert f"pard_token={json.dumps(value)} in the draft's config.json is no token id" in text
    assert "without quotes" in text


@pytest.mark.parametrize("value", [True, "63"])
def test_the_key_of_its_own_takes_a_number(save: Save, value: object) -> None:
    assert "pard_mask_token_id" in early_fault(pard(save(tiny_llama()), pard_mask_token_id=value))


def test_an_id_outside_the_vocabulary_says_where_it_was_written() -> None:
    with pytest.raises(ValueError, match="pard_mask_token_id=64 is outside the draft's 64 ids; correct the key"):
        mask_token({"vocab_size": 64}, given=64)
    with pytest.raises(ValueError, match=r"ptd_token_id=-1 is outside .*; the config.json is damaged"):
        mask_token({"ptd_token_id": -1})


def test_the_key_of_its_own_goes_before_the_checkpoint(save: Save) -> None:
    folder = save(tiny_llama(seed=1), "bare")
    assert decode(tiny_llama(), pard(folder, pard_mask_token_id=MASK)) == decode(tiny_llama())
    assert PardOptions(model=folder, pard_mask_token_id=3).pard_mask_token_id == 3


def test_without_parallel_drafting_it_is_a_draft_model(save: Save) -> None:
    folder = save(tiny_llama(), pard_token=MASK)
    for parallel, name in ((True, "pard"), (False, "draft_model")):
        resolved = resolve_speculative_config(
            pard(folder) | {"parallel_drafting": parallel}, process_manager().methods, engine=EngineArgs(model="t")
        )
        assert resolved.plugins[0].name == name


# --- lengths and conformance --------------------------------------------------------------------------------------


def test_masks_stay_within_the_drafts_positions(save: Save) -> None:
    folder = save(tiny_llama(seed=1, max_position_embeddings=16), pard_token=MASK)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    assert decode(tiny_llama(), pard(folder, 6), params) == decode(tiny_llama(), params=params)


def make_target() -> TargetRunner:
    return runner(tiny_llama(), max_query_tokens=8)


class TestConformance(ProposerConformance):
    rig = Rig(make_target=make_target, num_tokens=24)

    def make_proposer(self, context: PluginContext) -> object:
        session = context.session
        draft = runner(tiny_llama(seed=1), max_num_seqs=session.max_num_seqs, max_model_len=session.max_model_len)
        return PardProposer(draft, context, mask_token_id=MASK, name="pard")
