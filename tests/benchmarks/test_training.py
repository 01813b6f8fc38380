"""The training scripts of the benchmarks, for seconds and on a tiny target: what they write loads and drafts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specplug import LLM, SamplingParams
from specplug.testing import tiny_llama

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROMPTS = ["def add(a, b):\n", "Question: What is a map?\n\nAnswer:"]
NUM_FILES = 12


@pytest.fixture(scope="module")
def scripts() -> Iterator[pytest.MonkeyPatch]:
    """The benchmarks' folder on the path, and less text to read."""
    pytest.importorskip("specplug_hidden_states")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        from training import corpus, texts

        source_files = list(texts._source_files())[:: 500 // NUM_FILES]
        patch.setattr(texts, "_source_files", lambda: iter(source_files))
        patch.setattr(corpus, "MOST_PROMPTS", 48)
        yield patch
        for name in list(sys.modules):
            if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with one token for each byte."""
    folder = tmp_path_factory.mktemp("target")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate(["<|end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    model = tiny_llama(
        vocab_size=len(vocabulary), num_hidden_layers=8, max_position_embeddings=1024, eos_token_id=0, bos_token_id=0
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(scripts: pytest.MonkeyPatch, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that both scripts write."""
    import train_heads
    import train_tiny_draft

    folder = tmp_path_factory.mktemp("trained")
    scripts.setattr(train_tiny_draft, "NATURAL_CHARACTERS", 20_000)
    scripts.setattr(train_tiny_draft, "OWN_VOCABULARY", 300)
    for script in (train_tiny_draft, train_heads):
        options = ["--minutes", "0.02", "--threads", "1", "--output", str(folder), "--target", str(target)]
        scripts.setattr(sys, "argv", [script.__name__, *options])
        script.main()
    return folder


def generate(target: Path, config: dict[str, Any] | None) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(target), speculative_config=config, max_model_len=256, dtype="float32", strict=True) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


CONFIGS: dict[str, dict[str, Any]] = {
    "tiny_draft": {"method": "draft_model"},
    "tiny_draft_tli": {"method": "draft_model", "use_heterogeneous_vocab": True},
    "eagle3": {"method": "eagle3"},
    "mlp": {"method": "mlp_speculator"},
    "medusa": {"method": "medusa"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_trained_loads_and_drafts(name: str, target: Path, trained: Path) -> None:
    config = CONFIGS[name] | {"model": str(trained / name), "num_speculative_tokens": 3}
    assert generate(target, config) == generate(target, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_times_and_acceptance_are_reported(name: str, trained: Path) -> None:
    report = json.loads((trained / name / "training.json").read_text())
    assert report["name"] == name and report["steps"] >= 1 and report["held_out"]["num_positions"] > 0
    assert report["training"]["cpu_seconds"] > 0 and report["continuations"]["tokens"] > 0


def test_prompts_are_none_of_the_benchmarks(scripts: pytest.MonkeyPatch) -> None:
    from prompts import EDITS
    from training import texts

    modules = {module for module, _, _ in EDITS}
    assert not modules & {path.stem for path in texts._source_files() if path.parent.name == "lib"}
    prompts = texts.training_prompts(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())), 32)
    assert len({prompt.text for prompt in prompts}) == 32
    assert sum(prompt.is_held_out for prompt in prompts) == 2


def test_sampled_cross_entropy_has_the_expectation_of_the_whole(scripts: pytest.MonkeyPatch) -> None:
    from training.losses import Candidates, sampled_cross_entropy, soft_cross_entropy

    torch.manual_seed(0)
    states, head = torch.randn(16, 8), torch.randn(400, 8) * 0.3
    label_ids, label_probs = torch.randint(400, (16, 1)), torch.ones(16, 1)
    whole = soft_cross_entropy(states @ head.T, label_ids, label_probs).mean()
    sampled = [sampled_cross_entropy(states, head, Candidates(label_ids, label_probs, 400, 100)) for _ in range(200)]
    assert float(torch.stack(sampled).mean()) == pytest.approx(float(whole), abs=0.02)
    everything = sampled_cross_entropy(states, head, Candidates(label_ids, label_probs, 400, 400))
    assert float(everything) == pytest.approx(float(whole), abs=1e-5)


def test_chains_count_until_the_first_wrong_token(scripts: pytest.MonkeyPatch) -> None:
    from training.draft import run_lengths

    assert run_lengths([True, True, False, True]) == [2, 1, 0, 1]


def test_eagle3_is_unrolled_as_it_drafts(scripts: pytest.MonkeyPatch, target: Path, tmp_path: Path) -> None:
    """Outputs of the training-time test from one start, and of the plugin's head reading the same tokens in turn."""
    build = pytest.importorskip("specplug_eagle.build")
    checkpoint = pytest.importorskip("specplug_eagle.checkpoint")
    from train_heads import save
    from training.eagle3 import Eagle3
    from training.head_data import DraftVocabulary, HeadBatch

    from specplug.config import resolve_engine_args
    from specplug.models.cache import RaggedCache
    from specplug.models.loading import load_target

    num_steps, num_read, num_tokens = 3, 7, 14
    engine, _ = resolve_engine_args(str(target), {"dtype": "float32", "max_model_len": 64})
    runner = load_target(engine)
    torch.manual_seed(0)
    every_third = torch.arange(0, runner.vocab_size, 3)
    places = torch.full((runner.vocab_size,), -1)
    places[every_third] = torch.arange(len(every_third))
    trained = Eagle3(runner.model, (2, 4, 5), DraftVocabulary(every_third, places), num_steps=num_steps)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16())
    save(trained, tmp_path)
    head, space = build.load_head(checkpoint.Checkpoint.read(tmp_path, "eagle3"), runner, 64)

    token_ids = torch.randint(runner.vocab_size, (1, num_tokens))
    states = torch.randn(1, num_tokens, 3, runner.hidden_size)
    nothing = torch.zeros(0)
    with torch.inference_mode():
        expected = trained.outputs(HeadBatch(token_ids, states, nothing, nothing, nothing, nothing))
        cache = RaggedCache(head.windows, max_num_seqs=1, max_model_len=64, max_query_tokens=32, device=runner.device)
        cache.acquire()
        ids, features = token_ids[0, 1 : num_read + 1], head.features(states[0, :num_read].flatten(1))
        for step in range(num_steps):
            plan = cache.begin([len(ids)])
            outputs = head.run(ids, features, plan, cache)
            cache.end()
            cache.finish([len(ids)])
            assert torch.allclose(outputs[-1], expected[step][0, num_read - 1 + step], atol=1e-4)
            logits = trained.lm_head(trained.norm(expected[step][0, num_read - 1 + step]))
            assert torch.allclose(head.logits(outputs[-1:])[0], logits, atol=1e-3)
            place = num_read + 1 + step
            ids, features = token_ids[0, place : place + 1], outputs[-1:]
    assert torch.equal(space.to_target_ids(torch.arange(len(every_third))), every_third)
