from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specplug_suffix import SuffixOptions, SuffixProposer
from specplug_suffix.acceptance import FIRST_RATES
from specplug_suffix.proposer import PROMPT_TOKENS_PER_STEP

from specplug import LLM, Batch, ConfigError, Request, SamplingParams, TokenIds
from specplug.hooks import ProcessManager, process_manager
from specplug.proposers import CompositeProposer
from specplug.testing import FixedProposer, MarkovTarget, ScriptedTarget, as_method

VOCAB_SIZE = 1000


def ids(token_ids: Sequence[int]) -> TokenIds:
    return TokenIds(np.asarray(token_ids, dtype=np.int32))


def proposer(k: int = 8, **keys: Any) -> SuffixProposer:
    options = SuffixOptions(**{"suffix_backoff": False, **keys})
    return SuffixProposer(options, num_speculative_tokens=k, vocab_size=VOCAB_SIZE)


class Host:
    """Calls the hooks of one proposer; requests with their texts by name."""

    def __init__(self, made: SuffixProposer) -> None:
        self.made = made
        self.requests: dict[str, Request] = {}
        self.texts: dict[str, list[int]] = {}

    def start(self, name: str, prompt: Sequence[int], salt: str | None = None) -> None:
        self.requests[name] = Request(name, ids(prompt), SamplingParams(), seed=0, cache_salt=salt)
        self.texts[name] = list(prompt)
        self.made.specplug_start_request(self.requests[name])

    def batch(self, names: Sequence[str], num_computed: int | None = None) -> Batch:
        texts = [self.texts[name] for name in names]
        return Batch(
            requests=tuple(self.requests[name] for name in names),
            token_ids=tuple(map(ids, texts)),
            num_computed_tokens=tuple(len(text) - 1 if num_computed is None else num_computed for text in texts),
            remaining=(100,) * len(names),
            num_verify_steps=(0,) * len(names),
        )

    def write(self, **new: Sequence[int]) -> None:
        """A step that wrote these tokens."""
        for name, token_ids in new.items():
            self.texts[name] += token_ids
        self.made.specplug_advance(self.batch(list(new)))

    def draft(self, *names: str, limit: int = 8) -> Any:
        return self.made.propose(self.batch(names), [limit] * len(names))

    def drafts(self, *names: str, limit: int = 8) -> list[list[int]]:
        draft = self.draft(*names, limit=limit)
        flat = iter(draft.draft_token_ids.tolist())
        return [[next(flat) for _ in range(count)] for count in draft.num_draft_tokens]

    def run(self, name: str, prompt: Sequence[int], output: Sequence[int], salt: str | None = None) -> None:
        self.start(name, prompt, salt)
        self.write(**{name: output})
        self.finish(name)

    def finish(self, name: str) -> None:
        self.made.specplug_finish_request(self.requests[name])


def test_drafts_are_longer_where_a_step_costs_more_than_its_tokens() -> None:
    totals = {}
    for step_price in (2.0, 2000.0):
        made = Host(proposer(suffix_backoff=True))
        names = [f"r{number}" for number in range(8)]
        for number, name in enumerate(names):
            made.start(name, [*range(10), 50 + number] * 2)
        made.write(**{name: [0] for name in names})
        batch = replace(made.batch(names), step_price=step_price)
        totals[step_price] = sum(made.made.propose(batch, [8] * 8).num_draft_tokens)
    assert 0 < totals[2.0] < totals[2000.0]


def test_drafts_sources_and_confidence() -> None:
    host = Host(proposer())
    host.run("old", [500], [21, 22, 23, 24])
    host.start("a", [1, 2, 3, 1])
    host.start("b", [40])
    host.start("c", [41])
    host.write(a=[2], b=[21, 22], c=[77])
    draft = host.draft("a", "b", "c")
    assert draft.num_draft_tokens == (4, 2, 0)
    assert draft.draft_token_ids.tolist() == [3, 1, 2, 3, 23, 24]
    assert [(span.start, span.stop, span.source) for span in draft.sources] == [
        (0, 4, "suffix:local"),
        (4, 6, "suffix:shared"),
    ]
    rate = FIRST_RATES[1]  # both matches are two tokens long
    assert draft.confidence.tolist() == pytest.approx([rate] * 6)
    assert host.made.expected_accepted_tokens("a") == pytest.approx(rate + rate**2 + rate**3 + rate**4)
    assert host.made.expected_accepted_tokens("c") == host.made.expected_accepted_tokens("unknown") == 0.0
    host.write(a=[3, 1, 2, 3, 1], b=[99], c=[78])
    host.draft("a", "b", "c")
    assert {(row.origin, row.num_accepted_tokens, row.num_misses) for row in host.made.acceptance} == {
        ("local", 4, 0),
        ("shared", 0, 1),
    }


def test_long_prompts_are_indexed_step_by_step_for_all_requests_together() -> None:
    host = Host(proposer())
    first, second = list(range(500)) * 18, list(range(500, 900)) * 5
    host.start("a", first)
    host.start("b", second)
    for name in ("a", "b"):
        host.texts[name].append(first[0] if name == "a" else second[0])
    known = []
    assert host.drafts("a", "b") == [[], []]
    announced = list(host.made._texts.values())
    for _ in range(4):
        host.write(a=[], b=[])
        known.append([len(host.made._texts[name]) for name in ("a", "b")])
        assert [bool(draft) for draft in host.drafts("a", "b")] == [known[-1][0] == 9001, known[-1][1] == 2001]
    assert known == [[4096, 0], [8192, 0], [9001, 2001], [9001, 2001]]
    assert PROMPT_TOKENS_PER_STEP == 4096
    assert all(one is other for one, other in zip(announced, host.made._texts.values(), strict=True))


def test_a_request_that_was_never_announced_is_served() -> None:
    host = Host(proposer())
    host.start("a", [1, 2, 3])
    host.texts["a"] += [1]
    host.made._texts.clear()
    assert host.drafts("a") == [[]]
    host.write(a=[2])
    assert host.drafts("a") == [[3, 1, 2, 3]]


def test_cache_salts_keep_outputs_apart() -> None:
    host = Host(proposer())
    host.run("a", [1], [31, 32, 33], salt="tenant a")
    for name, salt in (("a2", "tenant a"), ("b", "tenant b"), ("n", None)):
        host.start(name, [1, 5], salt)
    host.write(a2=[31], b=[31], n=[31])
    assert host.drafts("a2", "b", "n") == [[32, 33], [], []]


def test_B124_a_paused_request_keeps_its_state_until_it_finishes() -> None:
    def steps(pause: bool) -> list[list[int]]:
        host = Host(proposer(suffix_decoding_max_cached_requests=0))
        host.start("a", [1, 2, 3, 4, 1])
        host.start("b", [7, 8, 7])
        drafts = []
        for token in (2, 3, 4, 1):
            host.write(a=[token])
            if pause:
                for other in (8, 7, 9):
                    host.write(b=[other])
                    host.drafts("b")
            drafts += host.drafts("a")
        host.finish("a")
        assert "a" not in host.made._texts
        return drafts

    assert steps(pause=True) == steps(pause=False)
    assert any(steps(pause=False))


def test_B68_ranks_that_see_the_same_draft_the_same() -> None:
    def drafts() -> list[list[list[int]]]:
        chance = random.Random(0)
        host = Host(proposer(suffix_cached_tokens=300))
        seen = []
        for wave in range(20):
            names = [f"{wave} {number}" for number in range(4)]
            for name in names:
                host.start(name, chance.choices(range(3), k=5))
            for _ in range(20):
                host.write(**{name: chance.choices(range(3), k=2) for name in names})
                seen.append(host.drafts(*names))
            for name in names:
                host.finish(name)
        return seen

    assert drafts() == drafts()


@pytest.mark.parametrize("live", [True, False])
def test_ten_thousand_requests_in_a_row_hold_no_more_memory(live: bool) -> None:
    host = Host(proposer(suffix_cached_tokens=500, suffix_live=live))
    chance = random.Random(0)
    kept = []
    for number in range(10_000):
        host.run(f"r{number}", [1, 2, 3], chance.choices(range(VOCAB_SIZE), k=4), salt=f"tenant {number % 50}")
        kept.append((host.made.num_cached_tokens, len(host.made._texts), len(host.made._drafter.shared._namespaces)))
        host.requests.clear()
        host.texts.clear()
    assert max(kept) <= (500, 0, 50)
    assert host.made.num_cached_requests <= 125


def test_save_and_load(tmp_path: Path) -> None:
    chance = random.Random(0)
    host = Host(proposer())
    host.made.warm([[900, 901, 902, 903]])
    texts = [chance.choices(range(5), k=60) for _ in range(6)]
    for number in range(6):
        host.start(f"w{number}", [999], salt="x" if number % 2 else None)
    for start in range(0, 60, 3):
        host.write(**{f"w{number}": text[start : start + 3] for number, text in enumerate(texts)})
    for number in range(6):
        host.finish(f"w{number}")
    file = tmp_path / "index.safetensors"
    host.made.save(file)
    assert [path.name for path in tmp_path.iterdir()] == ["index.safetensors"]
    other = Host(proposer())
    other.made.load(file)
    assert other.made.num_cached_tokens == host.made.num_cached_tokens == 360
    for number in range(40):
        prompt = [900, 901] if number == 0 else chance.choices(range(5), k=4)
        drafts = []
        for each in (host, other):
            each.start(f"q{number}", prompt[:-1], salt=("x", None, "y")[number % 3])
            each.write(**{f"q{number}": prompt[-1:]})
            drafts.append(each.drafts(f"q{number}"))
            each.finish(f"q{number}")
        assert drafts[0] == drafts[1]


def test_files_that_do_not_fit_are_refused_whole(tmp_path: Path) -> None:
    made = proposer()
    made.warm([[1, 2, 3]])
    made.save(tmp_path / "index.safetensors")
    small = SuffixProposer(SuffixOptions(), num_speculative_tokens=8, vocab_size=50)
    with pytest.raises(ValueError, match="1000 token ids; this target has 50"):
        small.load(tmp_path / "index.safetensors")
    (tmp_path / "other.safetensors").write_bytes(b"no index")
    with pytest.raises(ValueError, match="no index of specplug-suffix"):
        made.load(tmp_path / "other.safetensors")
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(1, dtype=np.int32)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match="has the format None"):
        made.load(tmp_path / "foreign.safetensors")
    assert small.num_cached_tokens == 0


def corpus(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


class Tokenizer:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def test_a_corpus_of_ids_and_texts(tmp_path: Path) -> None:
    file = corpus(tmp_path / "texts.jsonl", [5, 6, 7, 8], "abcd")
    host = Host(proposer(suffix_corpus=str(file)))
    host.made.read_corpus(Tokenizer())
    host.start("a", [1], salt="anyone")
    host.start("b", [1])
    host.write(a=[5, 6], b=[ord("b")])
    assert host.drafts("a", "b") == [[7, 8], [ord("c"), ord("d")]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"a": 1}, "line 2: write a list of token ids, or a text in quotes"),
        ([1, True], "line 2: write a list"),
        ([1, 1000], "line 2: token ids run from 0 to 999; found 1 to 1000"),
        ([-1, 2], "found -1 to 2"),
        ("text", "line 2: a text, and the target has no tokenizer"),
    ],
)
def test_a_corpus_that_does_not_fit_is_a_configuration_error(tmp_path: Path, line: Any, message: str) -> None:
    made = proposer(suffix_corpus=str(corpus(tmp_path / "texts.jsonl", [1, 2], line)))
    with pytest.raises(ConfigError, match="suffix_corpus.*" + message.replace("(", r"\(")):
        made.read_corpus(None)


def test_a_saved_index_as_corpus_is_for_all(tmp_path: Path) -> None:
    writer = Host(proposer())
    writer.run("a", [1], [5, 6, 7, 8], salt="tenant")
    writer.made.save(tmp_path / "index.safetensors")
    host = Host(proposer(suffix_corpus=str(tmp_path / "index.safetensors")))
    host.made.read_corpus(None)
    host.start("b", [1])
    host.write(b=[5, 6])
    assert host.drafts("b") == [[7, 8]]


# --- in the host loop ---------------------------------------------------------------------------------------


def generate(target: Any, prompts: list[list[int]], config: dict[str, Any] | None, **sampling: Any) -> list[Any]:
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
    with LLM(target, speculative_config=config, strict=True) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [output.outputs[0] for output in outputs]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("keys", [{}, {"suffix_decoding_max_tree_depth": 4, "suffix_decoding_max_cached_requests": 2}])
def test_text_is_the_plain_text(temperature: float, keys: dict[str, Any]) -> None:
    prompts = [[1, 2, 3], [4, 5, 4, 5, 4], [6], [1, 2, 3]]
    sampling = {"max_tokens": 40, "temperature": temperature, "seed": 3}
    plain = generate(MarkovTarget(), prompts, None, **sampling)
    drafted = generate(MarkovTarget(), prompts, {"method": "suffix", **keys}, **sampling)
    assert [list(output.token_ids) for output in drafted] == [list(output.token_ids) for output in plain]
    assert sum(output.spec_decode_metrics.num_draft_tokens for output in drafted) > 0


def test_B122_cache_as_small_as_the_tree() -> None:
    config = {"method": "suffix", "suffix_decoding_max_tree_depth": 4, "suffix_decoding_max_cached_requests": 4}
    plain, drafted = (generate(MarkovTarget(), [[1, 2, 1]], each, max_tokens=30) for each in (None, config))
    assert list(drafted[0].token_ids) == list(plain[0].token_ids)


def test_B125_sixty_four_interleaved_requests_that_end_at_random() -> None:
    chance = random.Random(0)
    prompts = [chance.choices(range(9), k=chance.randint(1, 12)) for _ in range(64)]
    params = [SamplingParams(temperature=0.0, max_tokens=chance.randint(1, 40)) for _ in prompts]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    with LLM(MarkovTarget()) as plain:
        expected = [list(output.outputs[0].token_ids) for output in plain.generate(requests, params)]
    made = proposer()
    manager = ProcessManager()
    manager.register(as_method("mine", lambda context: made), name="mine")
    config = {"method": "mine", "num_speculative_tokens": 8}
    with LLM(MarkovTarget(), speculative_config=config, manager=manager, strict=True) as llm:
        seen = [list(output.outputs[0].token_ids) for output in llm.generate(requests, params)]
    assert seen == expected
    assert not made._texts, "all state of requests is gone"
    assert made.num_cached_requests == 64


def test_B158_a_hybrid_counts_the_tokens_of_each_proposer_once() -> None:
    target = ScriptedTarget([11, 12, 13, 11, 12, 13, 11, 12, 13], vocab_size=32, eos_token_id=None)
    manager = ProcessManager()

    def make(context: Any) -> CompositeProposer:
        fixed = FixedProposer([[12, 13], [30]])
        return CompositeProposer([("suffix", context.create("suffix", {})), ("fixed", fixed)])

    manager.register(as_method("hybrid", make), name="hybrid")
    config = {"method": "hybrid", "num_speculative_tokens": 4}
    params = SamplingParams(temperature=0.0, max_tokens=9)
    with LLM(target, speculative_config=config, manager=manager, strict=True) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [1]}], params)
    metrics = output.outputs[0].spec_decode_metrics
    assert list(output.outputs[0].token_ids) == [11, 12, 13] * 3
    assert set(metrics.sources) == {"fixed", "suffix:local"}, "suffix had nothing at the first step"
    assert sum(source.num_draft_tokens for source in metrics.sources.values()) == metrics.num_draft_tokens


def test_the_method_is_installed_and_light() -> None:
    spec = process_manager().spec("suffix")
    assert (spec.kind, spec.options) == ("proposer", SuffixOptions)
    code = (
        "import sys, specplug_suffix; sys.exit(', '.join({'torch', 'numpy', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
