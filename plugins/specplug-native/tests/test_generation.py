"""In the host: the text in bfloat16 is the same, token for token, with drafts and without."""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from specplug_native.decoder import NativeDecoder
from specplug_native.library import load_library

from specplug import LLM, SamplingParams
from specplug.config.kernels import GROUP
from specplug.errors import ConfigError, ModelError
from specplug.testing.architectures import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.skipif(load_library() is None, reason="this processor has no AVX-512 with bfloat16")

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 224, "head_dim": 32, "initializer_range": 0.05}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "ngram_backoff": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("target"), "llama")


def saved(folder: Path, name: str, seed: int = 0, **overrides: Any) -> Path:
    tiny_model(name, seed=seed, **{**SIZES, **overrides}).to(torch.bfloat16).save_pretrained(folder)
    return folder


def prompts() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    blocks = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in range(3, 60, 5)]
    return [{"prompt_token_ids": block * 2 + block[:2]} for block in blocks]


def texts(folder: Path, params: SamplingParams, **arguments: Any) -> tuple[list[list[int]], dict[str, float]]:
    with LLM(str(folder), skip_tokenizer_init=True, max_model_len=256, max_num_seqs=5, strict=True, **arguments) as llm:
        outputs = llm.generate(prompts(), params)
        counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        return [list(output.outputs[0].token_ids) for output in outputs], counts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "config",
    [NGRAM, {**NGRAM, "num_speculative_tokens": 17}, {"method": "draft_model", "num_speculative_tokens": 3}],
    ids=["ngram", "ngram, 17 tokens", "draft_model"],
)
def test_drafts_change_no_token(folder: Path, tmp_path: Path, config: dict[str, Any], temperature: float) -> None:
    if config["method"] == "draft_model":
        config = config | {"model": str(saved(tmp_path, "llama", seed=0))}
    params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True, seed=1)
    plain, _ = texts(folder, params, kernels="native")
    drafted, counts = texts(folder, params, kernels="native", speculative_config=config)
    assert drafted == plain
    assert counts["vllm:spec_decode_num_accepted_tokens"] > 0


def test_a_sliding_window_past_its_length(tmp_path: Path) -> None:
    folder = saved(tmp_path, "mistral", sliding_window=24)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    plain, _ = texts(folder, params, kernels="native")
    assert texts(folder, params, kernels="native", speculative_config=NGRAM)[0] == plain


def test_auto_takes_it_where_it_can(folder: Path) -> None:
    for dtype, asked, got in (
        ("bfloat16", "auto", "native"),
        ("float32", "auto", "torch"),
        ("bfloat16", "torch", "torch"),
    ):
        with LLM(str(folder), dtype=dtype, kernels=asked, skip_tokenizer_init=True) as llm:
            assert llm.kernels == got


def test_what_cannot_be_is_told(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r'kernels="native" cannot run this model .*float32.*; write kernels="auto"'):
        LLM(str(folder), dtype="float32", kernels="native", skip_tokenizer_init=True)
    with pytest.raises(
        ConfigError,
        match='kernels="nativ": no kernels of that name are installed; write one of: "auto", "torch", "native"',
    ):
        LLM(str(folder), kernels="nativ", skip_tokenizer_init=True)


def test_a_broken_package_is_passed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = EntryPoint("broken", "no_such_module:kernels", GROUP)
    monkeypatch.setattr("specplug.config.kernels.entry_points", lambda group: (broken,))
    with caplog.at_level(logging.WARNING, "specplug"), LLM(str(folder), skip_tokenizer_init=True):
        assert 'kernels "broken" (unknown) cannot be imported' in caplog.text
    with pytest.raises(ModelError, match=r'kernels "broken" .* cannot be imported: No module'):
        LLM(str(folder), kernels="broken", skip_tokenizer_init=True)


def test_a_decoder_that_gives_other_logits_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = NativeDecoder.forward

    def wrong(self: NativeDecoder, *args: Any, **kwargs: Any) -> Any:
        logits, tapped = forward(self, *args, **kwargs)
        return logits.roll(1, -1), tapped

    monkeypatch.setattr(NativeDecoder, "forward", wrong)
    with pytest.raises(ModelError, match="gave other logits than a plain forward"):
        LLM(str(folder), skip_tokenizer_init=True)
