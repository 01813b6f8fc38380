"""PARD-2: the target's states of the token before, projected, are added to what the draft embeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from specplug_pard import PardOptions
from specplug_pard.features import TargetFeatures
from specplug_pard.proposer import PardProposer, build

from specplug import LLM, Batch, ConfigError, Draft, PluginContext, SamplingParams
from specplug.hooks import ProcessManager
from specplug.proposers.draft_cache import Reading
from specplug.testing.models import tiny_llama
from specplug.testing.proposers import as_method

MASK, K, LAYERS, SCALE, DRAFT_HIDDEN = 63, 3, [-1, 1, 0], 0.5, 16
PROMPTS = [[5, 6, 7, 5, 6], [1], list(range(40))]


def draft_module() -> Any:
    return tiny_llama(seed=1, hidden_size=DRAFT_HIDDEN)


def projection(width: int = 3 * 32) -> torch.Tensor:
    return torch.randn(DRAFT_HIDDEN, width, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    def run(weight: torch.Tensor | None = None, **config: Any) -> str:
        model = draft_module()
        values = {"pard_token": MASK, "pard2_target_layers": LAYERS, "pard2_scale": SCALE} | config
        for key, value in values.items():
            setattr(model.config, key, value)
        model.save_pretrained(tmp_path / "draft")
        if weight is not None:
            (tmp_path / "draft" / "pard_warp_model").mkdir()
            file = tmp_path / "draft" / "pard_warp_model" / "model.safetensors"
            save_file({"target_proj.weight": weight}, file)
        return str(tmp_path / "draft")

    return run


def reference(text: Sequence[int], num_masks: int, weight: torch.Tensor) -> list[int]:
    """The drafts by the method's definition, from plain forwards with all hidden states."""
    target, draft = tiny_llama(), draft_module()
    with torch.inference_mode():
        states = target(input_ids=torch.tensor([list(text)]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0] for layer in LAYERS], -1)
        shifted = torch.cat([torch.zeros_like(features[:1]), features[:-1]])
        added = torch.cat([shifted, shifted[-1:].expand(num_masks, -1)]) @ weight.T * SCALE
        ids = torch.tensor([[*text, *[MASK] * num_masks]])
        embedded = draft.get_input_embeddings()(ids) + added
        logits = draft(inputs_embeds=embedded, use_cache=False).logits[0, len(text) - 1 :]
    drafts: list[int] = logits.argmax(-1).tolist()
    return drafts


class Keeps(PardProposer):
    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.drafts: list[tuple[list[list[int]], Draft]] = []

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        draft = super().propose(batch, limits)
        self.drafts.append(([ids.tolist() for ids in batch.token_ids], draft))
        return draft


def decode(folder: str, made: list[Any], prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    def make(context: PluginContext) -> PardProposer:
        proposer = build(PardOptions(model=folder, **options), context, name="pard")
        proposer.__class__ = Keeps
        proposer.drafts = []  # type: ignore[attr-defined]
        made.append(proposer)
        return proposer

    manager = ProcessManager()
    manager.register(as_method("under_test", make), name="under_test")
    config = {"method": "under_test", "num_speculative_tokens": K}
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    rows = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    with LLM(tiny_llama(), speculative_config=config, manager=manager, strict=True, max_num_batched_tokens=16) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(rows, params)]


def plain(prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    with LLM(tiny_llama()) as llm:
        rows = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(rows, params)]


def test_drafts_are_those_of_the_definition(save: Callable[..., str]) -> None:
    """Prompts in chunks, a text of one token, rows that join and leave."""
    made: list[Any] = []
    weight = projection()
    assert decode(save(weight), made) == plain()
    checked, differing = 0, 0
    for texts, draft in made[0].drafts:
        start = 0
        for text, count in zip(texts, draft.num_draft_tokens, strict=True):
            if count:
                found = draft.draft_token_ids[start : start + count].tolist()
                assert found == reference(text, count - 1, weight)
                differing += found != reference(text, count - 1, torch.zeros_like(weight))
                checked += 1
            start += count
    assert checked > 20
    assert differing > 5  # the states matter
    assert not made[0]._features._states


def test_a_reading_that_was_interrupted_finds_its_states_again() -> None:
    model = draft_module()
    states = torch.randn(12, DRAFT_HIDDEN, generator=torch.Generator().manual_seed(3))
    features = TargetFeatures(model, [0], project=lambda given: given, norms=[None])
    features._states["r"] = (0, states)

    def added(reading: Reading) -> torch.Tensor:
        features.prepare([reading])
        ids = torch.tensor([reading.token_ids])
        embeddings = model.get_input_embeddings()
        return (embeddings(ids) - embeddings.weight[ids])[0].detach()  # the hook adds once

    nothing = torch.zeros(1, DRAFT_HIDDEN)
    for _ in range(2):  # the first forward raises somewhere after the embeddings
        torch.testing.assert_close(added(Reading("r", 0, [1] * 8, 0)), torch.cat([nothing, states[:7]]))
    for _ in range(2):
        masked = Reading("r", 8, [1] * 5 + [MASK] * 2, 3, 2)
        torch.testing.assert_close(added(masked), torch.cat([states[7:12], states[11:], states[11:]]))
    assert len(features._states["r"][1]) == 5  # what lies before is gone


def test_without_the_projection_it_drafts_from_tokens_alone(
    save: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Any] = []
    with caplog.at_level("INFO"):
        assert decode(save(), made) == plain()
    assert made[0]._features is None
    assert any("drafts from tokens alone" in record.getMessage() for record in caplog.records)


def test_a_projection_of_another_target_is_refused(save: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="takes 64 values, and 3 layers of this target have 3 x 32"):
        decode(save(projection(64)), [])


def test_layers_that_the_target_lacks_are_refused(save: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="names layer -24, the target has 2"):
        decode(save(projection(), pard2_target_layers=[-1, -8, -24][2:]), [])


def test_another_vocabulary_is_refused(save: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="needs the target's own tokens"):
        decode(save(projection()), [], use_heterogeneous_vocab=True)
