"""The vLLM door against a stand-in of vLLM's runner, and in our own host; no vLLM is needed.

``test_vllm_real.py`` runs vLLM itself.
"""

from __future__ import annotations

import logging
import random
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specplug import LLM, SamplingParams
from specplug.adapters import token_door
from specplug.adapters.step_times import StepTimes
from specplug.adapters.vllm import CustomClassProposer, DraftModelProposer, NgramProposer, WorkerExtension
from specplug.adapters.vllm_metrics import MetricsExport
from specplug.adapters.vllm_options import ENVIRONMENT
from specplug.adapters.vllm_symbols import SYMBOLS, mismatches
from specplug.errors import ConfigError
from specplug.hooks import ProcessManager
from specplug.hooks.markers import hookimpl
from specplug.methods import Capabilities
from specplug.metrics import Counter
from specplug.proposers import RowProposer
from specplug.testing import MarkovTarget, ProposerConformance
from specplug.testing.proposers import FixedProposer, RandomProposer, as_method
from specplug.types import Batch, Draft, TokenIds


def vllm_config(
    *,
    num_speculative_tokens: int = 4,
    max_num_seqs: int = 8,
    max_model_len: int = 256,
    vocab_size: int = 64,
    world_size: int = 2,
    options: dict[str, Any] | None = None,
    **speculative: Any,
) -> Any:
    """What vLLM hands the constructor, as far as the door reads it. With one rank drafts depend on the clock."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=num_speculative_tokens, **speculative),
        model_config=SimpleNamespace(
            max_model_len=max_model_len,
            get_vocab_size=lambda: vocab_size,
            dtype="torch.float32",
            tokenizer=None,
            skip_tokenizer_init=True,
            served_model_name="toy",
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, async_scheduling=False),
        device_config=SimpleNamespace(device="cpu"),
        parallel_config=SimpleNamespace(rank=0, world_size=world_size),
        additional_config={"specplug": options} if options else {},
    )


@dataclass
class ScriptedRequest:
    name: str
    prompt: list[int]
    script: list[int]
    """What follows the prompt, far enough."""
    max_tokens: int
    num_chunks: int = 1
    """Steps that the prompt takes."""
    num_done: int = 0
    was_aborted: bool = False

    @property
    def output(self) -> list[int]:
        """What the user gets: cut at ``max_tokens``, which the proposer does not see."""
        return self.script[: min(self.num_done, self.max_tokens)]


class MiniRunner:
    """``requests`` arrive as rows become free. ``seed`` draws cancellations, preemptions and row moves."""

    def __init__(self, proposer: Any, config: Any, requests: list[ScriptedRequest], *, seed: int | None = None) -> None:
        self.proposer = proposer
        self.k: int = config.speculative_config.num_speculative_tokens
        self.max_model_len: int = config.model_config.max_model_len
        self.max_num_seqs: int = config.scheduler_config.max_num_seqs
        self.waiting = list(requests)
        self.rows: list[ScriptedRequest] = []
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = self.num_skipped = 0
        self.largest_answer = 0
        self._token_ids = np.full((self.max_num_seqs, self.max_model_len), 7, dtype=np.int32)
        self._num_tokens = np.zeros(self.max_num_seqs, dtype=np.int32)
        self._drafts: dict[str, list[int]] = {}
        self._random = None if seed is None else random.Random(seed)

    def run(self) -> None:
        while self.waiting or self.rows:
            self.step()

    def step(self) -> None:
        if self._random is not None:
            self._disturb(self._random)
        while self.waiting and len(self.rows) < self.max_num_seqs:
            self.rows.append(self.waiting.pop(0))
        sampled = [self._decode(request) for request in self.rows]
        for row, request in enumerate(self.rows):
            text = request.prompt + request.script[: request.num_done]
            self._token_ids[row, : len(text)] = text
            self._num_tokens[row] = len(text)
        longest = int(self._num_tokens[: len(self.rows)].max(initial=0))
        if longest + self.k > self.max_model_len:  # vLLM then drafts zeros for all
            self.num_skipped += 1
            self._drafts = {}
        elif self.rows:
            self._propose(sampled)
        self.rows = [each for each in self.rows if each.num_done < each.max_tokens and not self._is_full(each)]

    def _propose(self, sampled: list[list[int]]) -> None:
        answer = self.proposer.propose(sampled, self._num_tokens, self._token_ids, slot_mappings=None)
        assert len(answer) == len(sampled)
        self.largest_answer = max([self.largest_answer, *map(len, answer)])
        self._drafts = {
            request.name: draft for request, draft, new in zip(self.rows, answer, sampled, strict=True) if new
        }

    def _decode(self, request: ScriptedRequest) -> list[int]:
        if request.num_chunks > 1:
            request.num_chunks -= 1
            return []
        draft = self._drafts.get(request.name, [])
        following = request.script[request.num_done :]
        num_accepted = 0
        while num_accepted < len(draft) and draft[num_accepted] == following[num_accepted]:
            num_accepted += 1
        if draft:
            self.num_drafts += 1
            self.num_draft_tokens += len(draft)
            self.num_accepted_tokens += num_accepted
        room = self.max_model_len - len(request.prompt) - request.num_done
        new = following[: min(num_accepted + 1, room)]
        request.num_done += len(new)
        return new

    def _is_full(self, request: ScriptedRequest) -> bool:
        return len(request.prompt) + request.num_done >= self.max_model_len

    def _disturb(self, source: random.Random) -> None:
        if self.rows and source.random() < 0.1:  # a client gives up
            self.rows.pop(source.randrange(len(self.rows))).was_aborted = True
        if self.rows and source.random() < 0.1:  # memory is short: one goes back, without its draft
            request = self.rows.pop(source.randrange(len(self.rows)))
            self._drafts.pop(request.name, None)
            request.num_chunks = 2
            self.waiting.insert(source.randrange(len(self.waiting) + 1), request)
        if source.random() < 0.3:
            source.shuffle(self.rows)


# --- the options --------------------------------------------------------------------------------------------------


def built(config: Any, kind: type[CustomClassProposer] = NgramProposer) -> CustomClassProposer:
    proposer = kind(config)
    proposer.load_model(None)
    return proposer


def options_of(proposer: CustomClassProposer) -> dict[str, Any]:
    return dict(proposer._options.speculative_config)


def test_options_come_from_additional_config_then_environment_then_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, '{"prompt_lookup_min": 3, "prompt_lookup_max": 4}')
    seen = options_of(NgramProposer(vllm_config(options={"prompt_lookup_min": 2})))
    assert seen == {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def test_vllms_own_suffix_keys_act_where_they_differ_from_its_defaults() -> None:
    suffix = pytest.importorskip("specplug_suffix.vllm").SuffixProposer
    config = vllm_config(suffix_decoding_max_tree_depth=24, suffix_decoding_max_cached_requests=0)
    seen = options_of(suffix(config))
    assert seen == {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_cached_requests": 0}


def test_the_generic_class_takes_its_method_from_the_options() -> None:
    proposer = built(vllm_config(options={"method": "ngram"}), CustomClassProposer)
    assert proposer.is_drafting
    with pytest.raises(ConfigError, match="no method"):
        CustomClassProposer(vllm_config())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_mx": 3}, "Did you mean prompt_lookup_max"),
        ({"num_speculative_tokens": 3}, "write it in speculative_config"),
        ({"rejection_sample_method": "block"}, "the server verifies"),
        ({"method": "suffix"}, 'drafts with "ngram"'),
        ({"draft_sample_method": "probabilistic"}, "drafts are greedy there"),
        ({"metrics_port": 70000}, "no port"),
        ({"step_price": 0}, "is a number above 0"),
        ({"step_price": "20"}, "is a number above 0"),
        ([], None),
        ("ngram", "not a mapping"),
    ],
)
def test_options_that_cannot_be_are_refused_before_weights_load(options: Any, message: str | None) -> None:
    if message is None:
        NgramProposer(vllm_config(options=options))
        return
    with pytest.raises(ConfigError, match=message):
        NgramProposer(vllm_config(options=options))


def test_all_faults_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        NgramProposer(vllm_config(num_speculative_tokens=200, options={"method": "suffix", "metrics_port": 0}))
    assert len(caught.value.faults) == 3
    assert "at most 128 draft tokens" in str(caught.value)


def test_the_environment_must_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "{prompt_lookup_min: 2}")
    with pytest.raises(ConfigError, match="is no JSON"):
        NgramProposer(vllm_config())


def test_a_draft_model_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="model"):
        DraftModelProposer(vllm_config())


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("specplug.adapters.vllm.NgramProposer", "ngram"),
        ("specplug.adapters.vllm.DraftModelProposer", "draft_model"),
        ("specplug_suffix.vllm.SuffixProposer", "suffix"),
        ("specplug_pard.vllm.PardProposer", "pard"),
    ],
)
def test_every_class_path_of_the_page_names_its_method(path: str, method: str) -> None:
    module, _, name = path.rpartition(".")
    assert getattr(pytest.importorskip(module), name).method == method
    assert f"`{path}`" in (Path(__file__).parents[2] / "docs" / "doors" / "vllm.md").read_text()


# --- the server ---------------------------------------------------------------------------------------------------


def test_B157_switches_that_rule_the_door_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config()
    config.scheduler_config.async_scheduling = True
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ConfigError) as caught:
        NgramProposer(config)
    assert "unset the variable" in str(caught.value)
    assert "--no-async-scheduling" in str(caught.value)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    config.scheduler_config.async_scheduling = None
    NgramProposer(config)


def test_what_the_server_will_not_honour_is_said_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    config = vllm_config(
        rejection_sample_method="block",
        num_speculative_tokens_per_batch_size=[(1, 4, 2)],
        draft_sample_method="probabilistic",
    )
    with caplog.at_level(logging.INFO, logger="specplug"):
        built(config)
    for words in (
        'method "ngram", at most 4',
        "min_p or logit_bias",
        'acts like "standard"',
        "move it to",
        "no draft pro",
    ):
        assert words in caplog.text
    with caplog.at_level(logging.INFO, logger="specplug"):
        caplog.clear()
        built(vllm_config())
    assert "block" not in caplog.text


def test_only_the_first_rank_announces_and_exports(caplog: pytest.LogCaptureFixture) -> None:
    config = vllm_config()
    config.parallel_config.rank = 1
    with caplog.at_level(logging.INFO, logger="specplug"):
        proposer = built(config)
    assert not caplog.records
    assert proposer._export is None
    assert proposer.is_drafting


# --- what a step costs --------------------------------------------------------------------------------------------


class Clock:
    """The server's time: ``step_s`` for a step and ``token_s`` for each token in it."""

    def __init__(self, *, step_s: float, token_s: float = 0.001) -> None:
        self.now_s, self.step_s, self.token_s = 0.0, step_s, token_s

    def __call__(self) -> float:
        return self.now_s


def drafted(proposer: CustomClassProposer, clock: Clock, *, num_steps: int = 80, num_rows: int = 8) -> list[int]:
    """Draft tokens of each step, while ``num_rows`` requests count to five, wrongly at every fifth token or so."""
    source = random.Random(0)
    texts = [[10 + row, 1, 2, 3, 4, 5, 1] for row in range(num_rows)]
    token_ids, num_tokens = np.zeros((8, 4096), dtype=np.int32), np.zeros(8, dtype=np.int32)
    new = [[1]] * num_rows
    totals = []
    for _ in range(num_steps):
        for row, text in enumerate(texts):
            token_ids[row, : len(text)], num_tokens[row] = text, len(text)
        drafts = proposer.propose(new, num_tokens, token_ids)
        totals.append(sum(map(len, drafts)))
        clock.now_s += clock.step_s + clock.token_s * (num_rows + totals[-1])
        new = [_written(text, draft, source) for text, draft in zip(texts, drafts, strict=True)]
    return totals


def _written(text: list[int], draft: list[int], source: random.Random) -> list[int]:
    """Write until the draft is wrong, and a token beyond it if it never is."""
    start = len(text)
    for token in [*draft, None]:
        text.append(text[-1] % 5 + 1 if source.random() < 0.8 else source.randrange(1, 6))
        if text[-1] != token:
            break
    return text[start:]


def timed_by(clock: Clock, **options: Any) -> CustomClassProposer:
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    proposer = built(vllm_config(max_model_len=4096, world_size=1, options=lookup | options))
    if proposer._step_times is not None:
        proposer._step_times = StepTimes(clock=clock)
    return proposer


def test_the_door_measures_what_a_step_costs_and_drafts_by_it() -> None:
    found = {}
    for step_price in (4.0, 20.0, 200.0):
        clock = Clock(step_s=0.001 * step_price)
        proposer = timed_by(clock)
        assert proposer.step_price == 20.0, "the guess"
        found[step_price] = sum(drafted(proposer, clock)[40:])
        assert proposer.step_price == pytest.approx(step_price, rel=0.1)
    assert found[4.0] < found[20.0] < found[200.0]


def test_with_a_price_that_is_given_drafts_do_not_depend_on_the_clock() -> None:
    totals = []
    for clock in (Clock(step_s=0.001), Clock(step_s=1.0)):
        proposer = timed_by(clock, step_price=20)
        totals.append(drafted(proposer, clock))
        assert proposer.step_price == 20
    assert totals[0] == totals[1]
    assert sum(totals[0])


@pytest.mark.parametrize("parallel", [{"world_size": 2}, {}])
def test_ranks_draft_alike_whatever_their_clocks_say(parallel: dict[str, int]) -> None:
    """Where vLLM does not say how many there are, there may be several."""
    totals = []
    for rank in range(2):
        config = vllm_config(max_model_len=4096, options={"prompt_lookup_min": 1, "prompt_lookup_max": 3})
        config.parallel_config = SimpleNamespace(rank=rank, **parallel)
        proposer = built(config)
        assert proposer._step_times is None
        assert proposer.step_price is None
        totals.append(drafted(proposer, Clock(step_s=0.001 if rank else 1.0)))
    assert totals[0] == totals[1]
    assert sum(totals[0])


SOURCE = """
class ModelConfig:
    max_model_len: int = None
    def get_vocab_size(self): ...
class GPUModelRunner:
    def propose_draft_token_ids(self):
        self.drafter.propose(sampled_token_ids, self.batch.num_tokens_no_spec, token_ids_cpu, slot_mappings=None)
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", None),
        ("max_model_len", "longest", "ModelConfig.max_model_len is gone"),
        ("get_vocab_size(self)", "get_vocab_size(self, rank)", "ModelConfig.get_vocab_size takes (rank), not ()"),
        ("get_vocab_size", "vocab_size", "ModelConfig.get_vocab_size() is gone"),
        ("propose(sampled_token_ids,", "propose(k, sampled_token_ids,", "no longer calls propose(sampled_token_ids"),
        ("slot_mappings=None", "mappings=None", "no longer calls propose(sampled_token_ids"),
        ("def propose_draft_token_ids", "def propose_drafts", "propose_draft_token_ids() is gone"),
    ],
)
def test_the_symbol_check_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, fault: str | None
) -> None:
    wanted = [
        symbol
        for symbol in SYMBOLS
        if symbol.name in ("max_model_len", "get_vocab_size", "propose_draft_token_ids")
        and symbol.owner in ("ModelConfig", "GPUModelRunner")
    ]
    monkeypatch.setattr("specplug.adapters.vllm_symbols.SYMBOLS", tuple(wanted))
    for file in {symbol.file for symbol in wanted}:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SOURCE.replace(old, new) if old else SOURCE)
    found = mismatches(tmp_path)
    assert found == [] if fault is None else len(found) == 1 and fault in found[0]


def test_another_release_switches_drafting_off_softly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = SimpleNamespace(__file__=str(tmp_path / "__init__.py"), __version__="0.99.0")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    proposer = built(vllm_config())
    assert "vLLM 0.99.0 differs" in caplog.text
    assert "config/vllm.py: the file is gone" in caplog.text
    assert not proposer.is_drafting
    assert proposer.propose([[1], [2]], np.array([1, 1], dtype=np.int32), np.ones((2, 8), dtype=np.int32)) == [[], []]
    assert proposer.metrics() == []


# --- decoding -----------------------------------------------------------------------------------------------------


def request(name: str, *, seed: int, max_tokens: int = 40, prompt_len: int = 12) -> ScriptedRequest:
    """A request whose output repeats a phrase of its own, now and then with another token."""
    source = random.Random(seed)
    phrase = [source.randrange(60) for _ in range(7)]
    script: list[int] = []
    while len(script) < 400:
        script += [*phrase, source.randrange(60)]
    prompt = [source.randrange(60) for _ in range(prompt_len + seed % 5)]
    return ScriptedRequest(name, prompt + phrase, script, max_tokens=max_tokens, num_chunks=1 + seed % 3)


def counts(proposer: CustomClassProposer) -> dict[str, Any]:
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(drafter=proposer)
    return worker.specplug_metrics()


NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 4, "ngram_backoff": False}


def suffix_class() -> type[CustomClassProposer]:
    found: type[CustomClassProposer] = pytest.importorskip("specplug_suffix.vllm").SuffixProposer
    return found


def options_for(kind: type[CustomClassProposer]) -> dict[str, Any]:
    return NGRAM if kind is NgramProposer else {"suffix_backoff": False}


@pytest.fixture(params=["ngram", "suffix"])
def proposer_class(request: pytest.FixtureRequest) -> type[CustomClassProposer]:
    return NgramProposer if request.param == "ngram" else suffix_class()


def test_counts_are_the_servers_own(proposer_class: type[CustomClassProposer]) -> None:
    config = vllm_config(options=options_for(proposer_class))
    proposer = built(config, proposer_class)
    requests = [request(f"r{seed}", seed=seed) for seed in range(20)]
    runner = MiniRunner(proposer, config, requests)
    runner.run()
    seen = counts(proposer)
    assert runner.num_accepted_tokens > 100
    assert seen["specplug:num_drafts"] == runner.num_drafts
    assert seen["specplug:num_draft_tokens"] == runner.num_draft_tokens
    assert seen["specplug:num_verified_accepted_tokens"] == runner.num_accepted_tokens
    assert seen["specplug:num_requests"] == 20


def test_64_requests_with_cancellations_preemptions_and_moving_rows(proposer_class: type[CustomClassProposer]) -> None:
    config = vllm_config(max_num_seqs=16, num_speculative_tokens=8, options=options_for(proposer_class))
    proposer = built(config, proposer_class)
    requests = [request(f"r{seed}", seed=seed, max_tokens=5 + 3 * (seed % 25)) for seed in range(64)]
    runner = MiniRunner(proposer, config, requests, seed=1)
    runner.run()
    assert sum(each.was_aborted for each in requests) > 3
    for each in requests:
        assert each.was_aborted or each.output == each.script[: each.max_tokens], "none lost, none mixed up"
    assert proposer.is_drafting
    assert proposer._door is not None and not proposer._door.hooks.faults
    assert proposer._door.num_requests <= 16, "no leaked state"
    assert runner.largest_answer <= 8
    assert runner.num_accepted_tokens > 500
    # a draft that was dropped with its preempted request is no draft here and was none there
    assert counts(proposer)["specplug:num_verified_accepted_tokens"] == runner.num_accepted_tokens


def test_B153_a_row_inside_its_prompt_gets_no_draft() -> None:
    proposer = built(vllm_config(options={"prompt_lookup_min": 1, "prompt_lookup_max": 2}))
    texts = np.zeros((3, 16), dtype=np.int32)
    texts[0, :6], texts[1, :6], texts[2, :6] = [5, 6, 5, 6, 5, 6], [5, 6, 5, 6, 5, 6], [9, 8, 9, 8, 9, 8]
    lengths = np.full(3, 6, dtype=np.int32)
    first, second, third = proposer.propose([[], [6], []], lengths, texts)
    assert (first, third) == ([], [])
    assert second[:2] == [5, 6]


def test_equal_prompts_do_not_share_a_state() -> None:
    config = vllm_config(options=NGRAM)
    proposer = built(config)
    same = [request("r0", seed=3), request("r1", seed=3)]
    same[1].script = request("other", seed=9).script
    MiniRunner(proposer, config, same).run()
    assert counts(proposer)["specplug:num_requests"] == 2


def test_two_ranks_draft_alike(proposer_class: type[CustomClassProposer]) -> None:
    answers = []
    for _ in range(2):
        config = vllm_config(max_num_seqs=4)
        proposer = built(config, proposer_class)
        seen: list[list[list[int]]] = []
        runner = MiniRunner(_Recorder(proposer, seen), config, [request(f"r{n}", seed=n) for n in range(9)], seed=2)
        runner.run()
        answers.append(seen)
    assert answers[0] == answers[1]
    assert any(draft for step in answers[0] for draft in step)


class Tree:
    """The first child of the root is a leaf; the second goes on."""

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Any) -> Draft:
        return Draft.from_trees([[5, 6, 7]] * len(batch), [[-1, -1, 1]] * len(batch))


def test_of_a_tree_one_path_is_proposed_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = ProcessManager()
    manager.register(as_method("mine", lambda context: Tree(), capabilities=Capabilities(tree=True)))
    monkeypatch.setattr(token_door, "process_manager", lambda: manager)
    config = vllm_config(options={"method": "mine"})
    with caplog.at_level(logging.INFO, logger="specplug"):
        proposer = built(config, CustomClassProposer)
    assert "one path is proposed" in caplog.text
    text = np.zeros((1, 16), dtype=np.int32)
    (draft,) = proposer.propose([[1]], np.array([4], dtype=np.int32), text)
    assert draft in ([5], [6, 7])
    assert proposer.is_drafting


@dataclass
class _Recorder:
    inner: Any
    answers: list[list[list[int]]]

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        answer: list[list[int]] = self.inner.propose(*args, **kwargs)
        self.answers.append(answer)
        return answer


def test_steps_that_vllm_skips_near_its_limit_lose_no_request() -> None:
    """One row within K of max_model_len silences the batch; afterwards the others go on where they are."""
    config = vllm_config(max_model_len=64, num_speculative_tokens=6, options=NGRAM)
    proposer = built(config)
    long = request("long", seed=1, max_tokens=400, prompt_len=20)
    others = [request(f"r{seed}", seed=seed, max_tokens=25, prompt_len=3) for seed in (2, 4, 5)]
    runner = MiniRunner(proposer, config, [long, *others])
    runner.run()
    assert runner.num_skipped > 1
    assert long.num_done == 64 - len(long.prompt)
    for each in others:
        assert each.output == each.script[:25]
    assert counts(proposer)["specplug:num_requests"] == 4


# --- faults -------------------------------------------------------------------------------------------------------


class Raising(RowProposer):
    def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
        raise RuntimeError("on purpose")


class TooMuch:
    """Ids that are none, and more of them than were asked for."""

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Any) -> Draft:
        return Draft.from_lists([[70, -3, 1, 2, 3, 4, 5, 6, 7][row % 2 * 2 :] for row in range(len(batch))])


@pytest.fixture
def serve_method(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], type[CustomClassProposer]]:
    """A class for a method that is made on the spot."""

    def make(proposer: Callable[[Any], object]) -> type[CustomClassProposer]:
        manager = ProcessManager()
        manager.register(as_method("mine", proposer))
        monkeypatch.setattr(token_door, "process_manager", lambda: manager)

        class Mine(CustomClassProposer):
            method = "mine"

        return Mine

    return make


def test_a_proposer_that_raises_costs_drafts_only(
    serve_method: Callable[[Any], type[CustomClassProposer]], caplog: pytest.LogCaptureFixture
) -> None:
    config = vllm_config()
    proposer = built(config, serve_method(lambda context: Raising()))
    requests = [request(f"r{seed}", seed=seed) for seed in range(6)]
    MiniRunner(proposer, config, requests).run()
    assert all(each.output == each.script[:40] for each in requests)
    assert not proposer.is_drafting
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "on purpose" in caplog.text
    assert proposer._door is not None
    assert proposer._door.hooks.faults == {"propose_raised:mine": 1}


@pytest.mark.parametrize(
    "make",
    [
        lambda context: TooMuch(),
        lambda context: RandomProposer(64, seed=3),
        lambda context: FixedProposer([[63] * 20] * 99, clip=False),
    ],
)
def test_B152_what_is_returned_is_always_in_range(
    make: Callable[[Any], object], serve_method: Callable[[Any], type[CustomClassProposer]]
) -> None:
    config = vllm_config()
    seen: list[list[list[int]]] = []
    proposer = built(config, serve_method(make))
    requests = [request(f"r{seed}", seed=seed) for seed in range(6)]
    MiniRunner(_Recorder(proposer, seen), config, requests, seed=1).run()
    for draft in (draft for step in seen for draft in step):
        assert len(draft) <= 4
        assert all(type(token) is int and 0 <= token < 64 for token in draft)
    assert all(each.was_aborted or each.output == each.script[:40] for each in requests)


def test_a_fault_of_the_door_itself_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    proposer = built(vllm_config())
    lengths = np.array([3], dtype=np.int32)
    for _ in range(3):
        assert proposer.propose([[1], [2]], lengths, np.ones((2, 8), dtype=np.int32)) == [[], []]
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    assert not proposer.is_drafting


# --- counts for others --------------------------------------------------------------------------------------------


def test_counts_are_served_at_a_port_of_their_own() -> None:
    pytest.importorskip("prometheus_client")
    source = [Counter(name="specplug:num_drafts", value=7)]
    with _free_port() as port:
        pass
    export = MetricsExport(lambda: source, model_name="toy", port=port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        export.close()
    assert 'specplug:num_drafts_total{model_name="toy"} 7.0' in text


class _free_port:
    def __enter__(self) -> int:
        import socket

        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port: int = found.getsockname()[1]
            return port

    def __exit__(self, *_: object) -> None: ...


def test_a_taken_port_costs_the_counts_only(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client")
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        export = MetricsExport(lambda: [], model_name=None, port=taken.getsockname()[1])
    export.close()
    assert "no counts are served" in caplog.text


def test_counts_join_those_of_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where vLLM adds up what its processes write, ours are written there too; totals never fall."""
    prometheus_client = pytest.importorskip("prometheus_client")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr("specplug.adapters.vllm_metrics.UPDATE_INTERVAL_S", 0.01)
    name, total = "specplug:test_counts_join", 3
    sample = {"model_name": "m", "source": "a"}

    def seen() -> float | None:
        value: float | None = prometheus_client.REGISTRY.get_sample_value(f"{name}_total", sample)
        return value

    def wait_for(value: float) -> None:
        deadline = time.monotonic() + 10
        while seen() != value and time.monotonic() < deadline:
            time.sleep(0.01)
        assert seen() == value

    export = MetricsExport(lambda: [Counter(name=name, labels={"source": "a"}, value=total)], model_name="m", port=None)
    wait_for(3.0)
    total = 5
    wait_for(5.0)
    total = 9
    export.close()
    assert seen() == 9.0, "nothing is lost at the end"


def test_workers_without_our_class_have_no_counts() -> None:
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace()
    assert worker.specplug_metrics() == {}


# --- the same class in our host -----------------------------------------------------------------------------------


class TestNgramClassInOurHost(ProposerConformance):
    method = "custom_class"
    options = {"model": "specplug.adapters.vllm.NgramProposer"}
    expected_failures = {"leaked_state": "vLLM's calls name no request and no end of one: max_num_seqs are kept"}


@pytest.mark.parametrize("path", ["specplug.adapters.vllm.NgramProposer", "specplug_suffix.vllm.SuffixProposer"])
def test_in_our_host_the_text_is_that_of_plain_decoding(path: str) -> None:
    if path.startswith("specplug_suffix"):
        pytest.importorskip("specplug_suffix")
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6] * 6, [1, 2, 3, 4, 1, 2], [7], [3, 1, 4, 1, 5] * 4)]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    own = {} if "suffix" in path else {"prompt_lookup_min": 1, "prompt_lookup_max": 3}

    def outputs(config: dict[str, Any] | None) -> tuple[list[list[int]], Any]:
        with LLM(MarkovTarget(), speculative_config=config, additional_config={"specplug": own}) as llm:
            found = llm.generate(prompts, params)
            return [list(each.outputs[0].token_ids) for each in found], llm.acceptance.aggregate()

    plain, _ = outputs(None)
    spec = {"method": "custom_class", "model": path, "num_speculative_tokens": 4}
    texts, acceptance = outputs(spec)
    assert texts == plain
    assert acceptance.num_accepted_tokens > 0
