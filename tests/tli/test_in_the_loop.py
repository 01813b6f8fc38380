"""``use_heterogeneous_vocab`` behind the host loop: exact texts, exact distributions; rows B96, B97, B101, B102."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specplug import LLM, MethodSpec, SamplingParams, StepOutcome, hookimpl
from specplug.draft_space import DraftSpace
from specplug.errors import ConfigError
from specplug.hooks import ProcessManager
from specplug.methods import Capabilities
from specplug.proposers.autoregressive import AutoregressiveProposer
from specplug.testing import MarkovTarget, tiny_llama, toy_tokenizer
from specplug.testing.proposers import MethodPlugin, as_method
from specplug.tli import open_space
from specplug.tli.space import TliDraftSpace
from specplug.types import Indirect, Law

PROMPTS = ["The quick brown fox", "def add(first,", "Größe und 東京は", "x"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
Save = Callable[..., str]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Save a model and its tokenizer to a folder of that name."""

    def run(name: str, model: Any, tokenizer: Any) -> str:
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return run


@pytest.fixture
def folder(save: Save, tokenizers: Any, tiny: Any) -> Callable[..., str]:
    """A tiny model with the tokenizer of that name."""

    def make(name: str, seed: int = 0) -> str:
        return save(f"{name}-{seed}".replace(" ", "-"), tiny(tokenizers[name], seed=seed), tokenizers[name])

    return make


def tli(draft: str, k: int = 3, **keys: Any) -> dict[str, Any]:
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": k, "use_heterogeneous_vocab": True}
    return config | keys


class Watcher:
    """Keeps every step's outcome."""

    def __init__(self) -> None:
        self.outcomes: list[StepOutcome] = []

    @hookimpl
    def specplug_accept_metrics(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    @property
    def num_drafted(self) -> int:
        return sum(row.num_draft_tokens for outcome in self.outcomes for row in outcome.rows)

    @property
    def num_accepted(self) -> int:
        return sum(row.num_accepted_tokens for outcome in self.outcomes for row in outcome.rows)


def decode(
    target: Any,
    config: dict[str, Any] | None,
    prompts: Sequence[Any] = PROMPTS,
    params: Any = GREEDY,
    **settings: Any,
) -> tuple[list[list[int]], Watcher]:
    watcher, manager = Watcher(), settings.pop("manager", None) or ProcessManager()
    manager.register(MethodPlugin(MethodSpec("watcher", "observer", lambda *_: watcher)), name="watcher")
    plugins = [*settings.pop("plugins", ()), "watcher"]
    settings = {"strict": True, "seed": 0, "dtype": "float32"} | settings
    with LLM(target, speculative_config=config, plugins=plugins, manager=manager, **settings) as llm:
        outputs = llm.generate(prompts, params)
    return [list(output.outputs[0].token_ids) for output in outputs], watcher


# --- greedy texts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("target", "draft"),
    [("bytes", "marked"), ("marked", "bytes"), ("prefixed", "small bytes"), ("small bytes", "prefixed")],
)
def test_greedy_text_is_the_plain_text_whatever_k(folder: Any, target: str, draft: str, k: int) -> None:
    plain, _ = decode(folder(target), None)
    text, watcher = decode(folder(target), tli(folder(draft, seed=1), k))
    assert text == plain
    assert watcher.num_drafted > 50


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_batch_of_mixed_lengths_is_each_request_alone(folder: Any, method: str) -> None:
    """Other requests in the batch change neither the text nor, with the same seeds, what is drawn."""
    config = tli(folder("marked", seed=1), 3, draft_sample_method=method)
    params = [
        SamplingParams(temperature=float(method != "greedy"), max_tokens=12 + number, seed=number, ignore_eos=True)
        for number in range(len(PROMPTS))
    ]
    prompts = [prompt * (1 + 3 * number) for number, prompt in enumerate(PROMPTS)]
    together, _ = decode(folder("bytes"), config, prompts, params)
    alone = [decode(folder("bytes"), config, [one], each)[0][0] for one, each in zip(prompts, params, strict=True)]
    assert together == alone


# --- a draft that is the target in other ids ------------------------------------------------------------------------


TEXTS = [chr(ord("a") + number) for number in range(26)] + [*"éß東京. ,"]


def renumbered(model: Any, order: Sequence[int]) -> Any:
    """The same model over ids that mean ``order[id]`` of the old ones."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][list(order)]
    settings = {"vocab_size": len(order), "eos_token_id": None, "max_position_embeddings": 256}
    other = tiny_llama(seed=9, **settings)
    other.load_state_dict(state)
    return other


@pytest.fixture
def twins(save: Save) -> tuple[Any, str]:
    """A target, and its own double under other ids: every draft is right if context, map and cache are."""
    order = [*range(len(TEXTS) - 1, -1, -1)]
    target = tiny_llama(vocab_size=len(TEXTS), eos_token_id=None, max_position_embeddings=256)
    tokenizer = toy_tokenizer(TEXTS, eos_token_id=None)
    other = toy_tokenizer([TEXTS[number] for number in order], eos_token_id=None)
    model = renumbered(target, order)
    return save("target", target, tokenizer), save("twin", model, other)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_B86_a_self_draft_under_other_ids_accepts_all(twins: tuple[str, str], k: int) -> None:
    target, draft = twins
    params = SamplingParams(temperature=0.0, max_tokens=30)
    prompts = ["a fox", "東京éß", "the end of it, i say"]
    plain, _ = decode(target, None, prompts, params)
    text, watcher = decode(target, tli(draft, k), prompts, params)
    assert text == plain
    assert watcher.num_accepted == watcher.num_drafted > 30


def test_the_end_can_be_drafted(save: Save) -> None:
    """A draft that could not say it would be cut there each time."""
    texts = ["a", "b", "end"]
    target = MarkovTarget(vocab_size=3, order=1, eos_token_id=2, tokenizer=toy_tokenizer(texts, eos_token_id=2))
    draft = toy_tokenizer(texts[::-1], eos_token_id=0)
    target.logits_after = lambda length, ids: [[9.0, 0, 0], [0, 9.0, 0], [0, 0, 9.0]][min(2, len(ids) - length)]  # type: ignore[method-assign]
    double = MarkovTarget(vocab_size=3, eos_token_id=0, tokenizer=draft)
    double.logits_after = lambda length, ids: target.logits_after(1, ids)[::-1]  # type: ignore[method-assign]
    manager = ProcessManager()
    manager.register(
        as_method("mine", lambda context: AutoregressiveProposer(double, context, name="mine")), name="mine"
    )
    config = {"method": "mine", "num_speculative_tokens": 3}
    prompts = [{"prompt_token_ids": [0]}]
    params = SamplingParams(temperature=0.0, max_tokens=9)
    text, watcher = decode(target, config, prompts, params, manager=manager, plugins=["tli"])
    assert text == [[0, 1, 2]]
    assert [row.num_accepted_tokens for outcome in watcher.outcomes for row in outcome.rows] == [0, 2]


# --- sampled texts --------------------------------------------------------------------------------------------------


VOCAB, LENGTH, NUM_DRAWS = 4, 4, 20_000
LIMIT = 420.0
"""A chi-square value that 255 degrees of freedom, the most there can be, exceed with a chance below 1e-9."""
UNRESTRICTED, UNPROCESSED = "law over all draft tokens", "law before temperature"
TARGET_TEXTS = ["a", "b", "c", "d"]
DRAFT_TEXTS = ["d", "x", "b", "ab", "a"]
TEMPERATURE = 0.4


def make_target() -> MarkovTarget:
    tokenizer = toy_tokenizer(TARGET_TEXTS, eos_token_id=None)
    settings = {"eos_token_id": None, "max_num_seqs": 200, "tokenizer": tokenizer}
    return MarkovTarget(vocab_size=VOCAB, scale=0.5, order=1, **settings)


def make_draft() -> MarkovTarget:
    tokenizer = toy_tokenizer(DRAFT_TEXTS, eos_token_id=None)
    settings = {"eos_token_id": None, "max_num_seqs": 200, "tokenizer": tokenizer}
    return MarkovTarget(vocab_size=len(DRAFT_TEXTS), seed=1, scale=0.5, order=1, **settings)


class WrongSpace(TliDraftSpace):
    """A law that is not what was sampled from."""

    fault = ""

    def restrict(self, draft_logits: torch.Tensor) -> torch.Tensor:
        self._lse = (draft_logits / TEMPERATURE).logsumexp(-1)
        return super().restrict(draft_logits)

    def law(self, draft_logits: torch.Tensor) -> Law:
        law = super().law(draft_logits)
        assert isinstance(law, Indirect)
        if self.fault == UNRESTRICTED:
            return Indirect(law.draft_logits, law.logsumexp + 0.5, law.target_to_draft_ids)
        return super().law(draft_logits * TEMPERATURE)


class Opener:
    """Answers the hook in tli's place."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    @hookimpl
    def specplug_draft_space(self, target: Any, draft: Any) -> DraftSpace:
        space = open_space(target, draft)
        if self.fault:
            space.__class__ = WrongSpace
            space.fault = self.fault  # type: ignore[attr-defined]
        return space


def chi_squared(num_draws: int, fault: str = "", k: int = 2) -> float:
    """Of the joint law of the first tokens, drawn through drafts in the other vocabulary, against the target's."""
    manager = ProcessManager()
    laws = frozenset({"one_hot", "indirect"})
    make = as_method(
        "mine",
        lambda context: AutoregressiveProposer(make_draft(), context, name="mine", is_probabilistic=True),
        capabilities=Capabilities(laws=laws, deterministic=False),
    )
    manager.register(make, name="mine")
    manager.register(MethodPlugin(MethodSpec("opener", "draft_space", lambda *_: Opener(fault))), name="opener")
    params = [
        SamplingParams(temperature=TEMPERATURE, max_tokens=LENGTH, ignore_eos=True, seed=seed)
        for seed in range(num_draws)
    ]
    config = {"method": "mine", "num_speculative_tokens": k}
    prompts = [{"prompt_token_ids": [0]}] * num_draws
    settings = {"plugins": ["opener"], "manager": manager, "max_num_seqs": 200}
    drawn, watcher = decode(make_target(), config, prompts, params, **settings)
    assert 0.1 < watcher.num_accepted / watcher.num_drafted < 0.95
    counts: dict[tuple[int, ...], int] = {}
    for output in drawn:
        counts[tuple(output)] = counts.get(tuple(output), 0) + 1
    return sum((count - expected) ** 2 / expected for count, expected in cells(counts, expected_counts(num_draws)))


def cells(counts: dict[Any, int], expected: dict[Any, float]) -> list[tuple[int, float]]:
    """(drawn, expected) of every outcome; those that expect less than 5 are taken together."""
    pairs = [(counts.get(outcome, 0), each) for outcome, each in expected.items()]
    rare = [pair for pair in pairs if pair[1] < 5]
    rest = (sum(count for count, _ in rare), sum(each for _, each in rare))
    return [pair for pair in pairs if pair[1] >= 5] + ([rest] if rare else [])


def expected_counts(num_draws: int) -> dict[tuple[int, ...], float]:
    target = make_target()
    rows = [
        torch.tensor(target.logits_after(1, [token_id]), dtype=torch.float64).div(TEMPERATURE).softmax(0).tolist()
        for token_id in range(VOCAB)
    ]
    return {
        output: num_draws * math.prod(rows[before][after] for before, after in itertools.pairwise((0, *output)))
        for output in itertools.product(range(VOCAB), repeat=LENGTH)
    }


def test_sampled_text_follows_the_target() -> None:
    assert chi_squared(NUM_DRAWS) < LIMIT


@pytest.mark.parametrize("fault", [UNRESTRICTED, UNPROCESSED])
def test_a_law_that_was_not_sampled_from_is_seen(fault: str) -> None:
    assert chi_squared(5000, fault) > 1.5 * LIMIT


def test_probabilistic_drafts_carry_laws_in_the_drafts_vocabulary(folder: Any) -> None:
    laws: list[str] = []

    class Reader:
        @hookimpl
        def specplug_verify(self, draft: Any) -> None:
            laws.extend(type(span.law).__name__ for span in draft.laws)

    manager = ProcessManager()
    manager.register(MethodPlugin(MethodSpec("reader", "observer", lambda *_: Reader())), name="reader")
    params = SamplingParams(temperature=0.8, max_tokens=8, seed=3, ignore_eos=True)
    config = tli(folder("marked", seed=1), draft_sample_method="probabilistic")
    decode(folder("bytes"), config, params=params, plugins=["reader"], manager=manager)
    assert set(laws) == {"Indirect"}


# --- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(64, 62), (62, 64)])
def test_B96_equal_tokenizers_with_padding_run(save: Save, target_rows: int, draft_rows: int) -> None:
    tokenizer = toy_tokenizer([chr(65 + number) for number in range(60)], eos_token_id=None)
    target = save("target", tiny_llama(vocab_size=target_rows, eos_token_id=None), tokenizer)
    draft = save("draft", tiny_llama(vocab_size=draft_rows, seed=1, eos_token_id=None), tokenizer)
    prompts = [{"prompt_token_ids": [5, 6, 7]}]
    plain, _ = decode(target, None, prompts)
    text, watcher = decode(target, tli(draft), prompts)
    assert text == plain
    assert watcher.num_drafted > 0


def test_B101_no_shared_token_is_a_value_error(save: Save) -> None:
    target = save("target", tiny_llama(vocab_size=2, eos_token_id=None), toy_tokenizer(["a", "b"], eos_token_id=None))
    draft = save("draft", tiny_llama(vocab_size=2, eos_token_id=None), toy_tokenizer(["c", "d"], eos_token_id=None))
    with pytest.raises(ValueError, match="no token of the draft's vocabulary"):
        LLM(target, speculative_config=tli(draft))


def test_B101_one_shared_token_runs_and_warns(save: Save, caplog: pytest.LogCaptureFixture) -> None:
    target = save("target", tiny_llama(vocab_size=3, eos_token_id=None), toy_tokenizer([*"abc"], eos_token_id=None))
    others = ["a", *(chr(200 + number) for number in range(19))]
    draft = save("draft", tiny_llama(vocab_size=20, eos_token_id=None), toy_tokenizer(others, eos_token_id=None))
    prompts = [{"prompt_token_ids": [0]}]
    plain, _ = decode(target, None, prompts)
    text, watcher = decode(target, tli(draft), prompts)
    assert text == plain
    assert watcher.num_drafted > 0
    assert "1 tokens are shared, 5.0 % of the draft's and 33.3 % of the target's" in caplog.text


def test_B102_each_side_loads_its_own_revision(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    loaded: dict[str, str | None] = {}
    load = AutoTokenizer.from_pretrained

    def recording(source: Any, *, revision: str | None = None, **settings: Any) -> Any:
        loaded[str(source)] = revision
        return load(source, **settings)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", recording)
    target, draft = folder("bytes"), folder("marked", seed=1)
    with LLM(target, tokenizer_revision="r1", speculative_config=tli(draft, revision="r2"), dtype="float32") as llm:
        assert loaded == {target: "r1", draft: "r2"}
        assert llm.engine_args.tokenizer_revision == "r1"
        assert llm.config.speculative is not None
        assert llm.config.speculative.revision == "r2"


def test_a_draft_without_a_tokenizer_is_refused_before_weights_load(folder: Any, tmp_path: Path) -> None:
    draft = Path(folder("marked", seed=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (draft / name).unlink()
    with pytest.raises(ConfigError, match=r"the draft folder .* holds none"):
        LLM(str(tmp_path / "not even there"), speculative_config=tli(str(draft)))
