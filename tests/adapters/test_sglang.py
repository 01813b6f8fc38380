"""The SGLang door, against a recording stand-in of its n-gram worker, and against its sources where they are.

``SPECPLUG_SGLANG_SOURCES`` names a folder with an unpacked wheel; no server is started.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import os
import sys
import types
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specplug.adapters.server_symbols import Function, source_mismatches
from specplug.adapters.sglang import (
    ALGORITHM,
    ENVIRONMENT,
    DraftSource,
    algorithm_class,
    chain_trees,
    read_options,
    register,
    worker_class,
)
from specplug.adapters.sglang_symbols import SYMBOLS, TESTED_RELEASES, mismatches
from specplug.errors import ConfigError

MANIFEST = Path(__file__).parent / "goldens" / "sglang_0_5_23.json"
NUM_NODES = 5
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4, "ngram_backoff": False}


# --- trees ------------------------------------------------------------------------------------------------------


def test_drafts_become_chains_and_leftover_nodes_hang_under_the_root() -> None:
    tokens, masks = chain_trees([9, 8], [[1, 2], []], 4)
    assert tokens.tolist() == [9, 1, 2, 0, 8, 0, 0, 0]
    assert masks.reshape(2, 4, 4).tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]],
    ]


def test_a_full_draft_fills_the_tree() -> None:
    tokens, masks = chain_trees([9], [[1, 2, 3]], 4)
    assert tokens.tolist() == [9, 1, 2, 3]
    assert np.array_equal(masks.reshape(4, 4), np.tri(4))


# --- the worker, executed ---------------------------------------------------------------------------------------


@dataclass
class StandInRequest:
    """``script``: what plain decoding writes. ``pending``: accepted tokens that are not in ``output_ids`` yet."""

    rid: str
    origin_input_ids_unpadded: array[int]
    script: list[int]
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    pending: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return [*self.origin_input_ids_unpadded, *self.output_ids, *self.pending]

    @property
    def is_done(self) -> bool:
        return len(self.output_ids) + len(self.pending) >= len(self.script)

    def following(self) -> list[int]:
        return self.script[len(self.output_ids) + len(self.pending) :]


@dataclass
class StandInBatch:
    reqs: list[StandInRequest]
    spec_info: Any = None
    has_grammar: bool = False

    def grammar_needs_sync(self) -> bool:
        return self.has_grammar


class RecordingCorpus:
    def __init__(self, corpora: dict[str, int]) -> None:
        self._corpora = corpora

    def list_external_corpora(self) -> dict[str, int]:
        return self._corpora


class StandInWorker:
    """What the n-gram worker does around its draft source, with a script for a model."""

    corpora: dict[str, int] = {}
    overlap = False

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.enable_overlap = self.overlap
        self.model_runner = target_worker.model_runner
        self.draft_token_num = NUM_NODES
        self.device = "cpu"
        self._prev_decode_rids: set[str] = set()
        self.ngram_corpus: Any = RecordingCorpus(self.corpora)
        self.accepted: list[int] = []

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        self.max_batch_size = 8

    def clear_cache_pool(self) -> None:
        self.ngram_corpus.reset()
        self._prev_decode_rids = set()

    def forward_batch_generation(self, batch: StandInBatch) -> None:
        """A decode step: drafts, verification by walking the tree, departures."""
        tokens, mask = self._prepare_draft_tokens(batch)  # type: ignore[attr-defined]
        bs, nodes = len(batch.reqs), self.draft_token_num
        assert tokens.shape == (bs * nodes,)
        assert mask.shape == (bs * nodes * nodes,)
        accept_tokens = np.zeros((bs, nodes), dtype=np.int32)
        accept_lens = np.ones(bs, dtype=np.int32)
        for row, request in enumerate(batch.reqs):
            own, tree = tokens.reshape(bs, nodes)[row], mask.reshape(bs, nodes, nodes)[row]
            assert own[0] == request.text[-1]
            accepted = walk(own, tree, request.following())
            self.accepted.append(len(accepted) - 1)
            accept_tokens[row, : len(accepted)] = accepted
            accept_lens[row] = len(accepted)
            request.output_ids.extend(request.pending)
            request.pending = list(accepted)
            if not self.enable_overlap or batch.grammar_needs_sync():
                request.output_ids.extend(request.pending)
                request.pending = []
        import torch

        batch.spec_info = types.SimpleNamespace(
            accept_tokens=torch.from_numpy(accept_tokens.reshape(-1)), accept_lens=torch.from_numpy(accept_lens)
        )
        self._update_ngram_corpus(batch)  # type: ignore[attr-defined]
        current = {request.rid for request in batch.reqs}
        departed = self._prev_decode_rids - current
        if departed:
            self.ngram_corpus.erase_match_state(list(departed))
        self._prev_decode_rids = current


def walk(tokens: np.ndarray[Any, Any], tree: np.ndarray[Any, Any], following: Sequence[int]) -> list[int]:
    """Follow the model down the tree: accepted draft tokens and one more."""
    parents = [max((j for j in range(i) if tree[i, j]), default=-1) for i in range(len(tokens))]
    node, accepted = 0, []
    for token_id in following:
        accepted.append(token_id)
        children = [i for i in range(1, len(tokens)) if parents[i] == node and tokens[i] == token_id]
        if not children:
            break
        node = children[0]
    return accepted


def make_worker(monkeypatch: pytest.MonkeyPatch, options: Any = NGRAM, *, overlap: bool = False) -> Any:
    monkeypatch.setenv(ENVIRONMENT, json.dumps(options))
    monkeypatch.setattr(StandInWorker, "overlap", overlap)
    config = types.SimpleNamespace(vocab_size=64, context_len=256)
    target_worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(model_config=config))
    worker = worker_class(StandInWorker)(None, 0, 0, target_worker)
    worker.alloc_memory_pool(memory_pool_config=None)
    return worker


def make_request(name: str, seed: int, num_tokens: int = 60) -> StandInRequest:
    """A request that repeats a phrase; it has its first token, as after the prompt's forward."""
    phrase = [(seed * 7 + 3 * i) % 60 for i in range(6)]
    script = (phrase * (num_tokens // 6 + 1))[:num_tokens]
    request = StandInRequest(name, array("q", [60, *phrase]), script)
    request.output_ids.append(script[0])
    return request


def run(worker: Any, requests: list[StandInRequest], *, has_grammar: bool = False) -> None:
    batch = StandInBatch(list(requests), has_grammar=has_grammar)
    import torch

    lengths = torch.zeros(len(requests), dtype=torch.int32)  # the extend step's tokens were processed already
    batch.spec_info = types.SimpleNamespace(
        accept_tokens=torch.zeros(len(requests) * NUM_NODES, dtype=torch.int32), accept_lens=lengths
    )
    while batch.reqs:
        worker.forward_batch_generation(batch)
        kept = [row for row, request in enumerate(batch.reqs) if not request.is_done]
        index = [row * NUM_NODES + node for row in kept for node in range(NUM_NODES)]
        batch.spec_info.accept_tokens = batch.spec_info.accept_tokens[index]
        batch.spec_info.accept_lens = batch.spec_info.accept_lens[kept]
        batch.reqs = [batch.reqs[row] for row in kept]


@pytest.mark.parametrize("has_grammar", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_continue_the_whole_text(monkeypatch: pytest.MonkeyPatch, overlap: bool, has_grammar: bool) -> None:
    """With overlap the last step's tokens come from ``spec_info``: missing or doubled, nothing would be accepted."""
    worker = make_worker(monkeypatch, overlap=overlap)
    requests = [make_request(f"r{seed}", seed, 60 + seed) for seed in range(4)]
    run(worker, requests, has_grammar=has_grammar)
    for request in requests:
        assert [*request.output_ids, *request.pending] == request.script
    assert sum(worker.accepted) / len(worker.accepted) > 3, "four draft tokens at most"


def test_acceptance_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(monkeypatch)
    run(worker, [make_request("a", 1)])
    found = {metric.name: getattr(metric, "value", 0) for metric in worker.ngram_corpus.metrics()}
    assert found["vllm:spec_decode_num_accepted_tokens"] == sum(worker.accepted[:-1]), "the last step is not shown"
    assert found["specplug:num_requests"] == 1


def test_departed_requests_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(monkeypatch)
    door = worker.ngram_corpus._door
    first, second = make_request("a", 1), make_request("b", 2)
    worker.forward_batch_generation(StandInBatch([first, second]))
    assert door.num_requests == 2
    worker.forward_batch_generation(StandInBatch([second]))
    assert door.num_requests == 1
    worker.clear_cache_pool()
    assert door.num_requests == 0
    worker.forward_batch_generation(StandInBatch([make_request("a", 3)]))
    assert door.num_requests == 1


def test_a_proposer_that_raises_leaves_the_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(monkeypatch, {"method": "custom_class", "model": f"{__name__}.Raises"})
    request = make_request("a", 1, 20)
    run(worker, [request])
    assert list(request.output_ids) == request.script
    assert set(worker.accepted) == {0}


class Raises:
    def __init__(self, vllm_config: Any) -> None:
        pass

    def propose(self, *args: Any, slot_mappings: Any = None) -> list[list[int]]:
        raise RuntimeError("on purpose")


def test_corpora_of_sglang_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(monkeypatch)
    assert worker.ngram_corpus.list_external_corpora() == {}
    with pytest.raises(ValueError, match="suffix_corpus"):
        worker.ngram_corpus.load_external_corpus_named("texts", [[1]])
    with pytest.raises(ValueError, match="suffix_corpus"):
        worker.ngram_corpus.remove_external_corpus("texts")
    monkeypatch.setattr(StandInWorker, "corpora", {"texts": 3})
    with pytest.raises(ConfigError, match="texts"):
        make_worker(monkeypatch)


def test_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_options("")[0]["method"] == "ngram"
    assert read_options('{"method": "suffix", "plugins": ["x"]}') == ({"method": "suffix"}, ["x"])
    for text in ("{", "[1]"):
        with pytest.raises(ConfigError, match=ENVIRONMENT):
            read_options(text)
    with pytest.raises(ConfigError, match="prompt_lookup_maxi"):
        make_worker(monkeypatch, {**NGRAM, "prompt_lookup_maxi": 2})


# --- registration -----------------------------------------------------------------------------------------------


class StandInAlgorithm:
    """SGLang's class for registered algorithms: the predicates, and not what the scheduler calls besides."""

    def __init__(
        self, name: str, factory: Any, *, supports_overlap: bool = False, validate_server_args: Any = None
    ) -> None:
        self.name, self.factory, self.supports_overlap = name, factory, supports_overlap

    def is_eagle(self) -> bool:
        return False

    def is_standalone(self) -> bool:
        return False

    def is_ngram(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        raise AssertionError("not overridden")


class StandInEnumeration:
    registered: dict[str, Any] = {}

    def carries_draft_hidden_states(self) -> bool:
        return self.is_eagle()  # type: ignore[attr-defined,no-any-return]

    def need_topk(self) -> bool:
        return self.is_eagle() or self.is_standalone()  # type: ignore[attr-defined,no-any-return]

    def create_future_map(self, device: Any, req_to_token_pool: Any, needs_cpu_seq_lens: bool = True,
                          needs_confidence_relay: bool = False) -> Any:  # fmt: skip
        return (device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def get_platform_worker_cls(self) -> None:
        return None

    @classmethod
    def register(cls, name: str, *, supports_overlap: bool, spec_class: type) -> Any:
        def decorate(factory: Any) -> Any:
            cls.registered[name] = spec_class(name, factory, supports_overlap=supports_overlap)
            return factory

        return decorate


def test_the_algorithm_has_what_the_scheduler_calls() -> None:
    algorithm: Any = algorithm_class(StandInAlgorithm, StandInEnumeration)(ALGORITHM, None, supports_overlap=True)
    assert algorithm.is_ngram()
    assert not algorithm.has_draft_kv()
    assert not algorithm.carries_draft_hidden_states()
    assert not algorithm.need_topk()
    assert algorithm.create_future_map("cpu", "pool")[:3] == ("cpu", algorithm, "pool")
    assert algorithm.get_platform_worker_cls() is None


@pytest.fixture
def sglang_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Modules by the names that ``register`` imports; returns the folder where sources would lie."""
    handled: list[Any] = []
    modules = {
        "sglang": {"__file__": str(tmp_path / "sglang" / "__init__.py"), "__version__": "0.0"},
        "sglang.srt": {},
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.speculative_hook": {"_handle_ngram": handled.append, "handled": handled},
        "sglang.srt.speculative": {},
        "sglang.srt.speculative.ngram_worker": {"NGRAMWorker": StandInWorker},
        "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": StandInEnumeration},
        "sglang.srt.speculative.spec_registry": {"CustomSpecAlgo": StandInAlgorithm},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(StandInEnumeration, "registered", {})
    return tmp_path / "sglang"


def test_registration(sglang_modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specplug.adapters.sglang_symbols.SYMBOLS", ())
    register()
    algorithm = StandInEnumeration.registered[ALGORITHM]
    assert algorithm.supports_overlap
    algorithm.handle_server_args("arguments")
    assert sys.modules["sglang.srt.arg_groups.speculative_hook"].handled == ["arguments"]
    assert issubclass(algorithm.factory("arguments"), StandInWorker)


def test_an_unknown_release_is_left_alone(sglang_modules: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        register()
    assert StandInEnumeration.registered == {}
    (record,) = caplog.records
    assert "0.5.23" in record.getMessage()
    assert "the file is gone" in record.getMessage()


def test_the_entry_point_is_declared() -> None:
    from importlib.metadata import entry_points

    (found,) = (each for each in entry_points(group="sglang.srt.plugins") if each.name == "specplug")
    assert found.load() is register


# --- against the sources ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources() -> Path:
    """The folder of ``sglang``: an unpacked wheel, or the installed package."""
    named = os.environ.get("SPECPLUG_SGLANG_SOURCES")
    spec = None if named else importlib.util.find_spec("sglang")
    if named:
        return Path(named) / "sglang"
    if spec is None or spec.origin is None:
        pytest.skip("no SGLang: set SPECPLUG_SGLANG_SOURCES to a folder with an unpacked wheel")
    return Path(spec.origin).parent


def functions() -> dict[str, list[str]]:
    return {
        f"{each.file}:{each.owner or ''}.{each.name}": list(each.parameters)
        for each in SYMBOLS
        if isinstance(each, Function)
    }


def test_the_manifest_holds_the_signatures_that_are_used() -> None:
    assert json.loads(MANIFEST.read_text()) == functions()


def test_sources_have_what_is_used(sources: Path) -> None:
    assert mismatches(sources) == []


def test_a_changed_signature_is_seen(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("class Worker:\n    def prepare(self, batch, more): ...\n")
    symbol = Function("worker.py", "Worker", "prepare", ("batch",))
    assert source_mismatches(tmp_path, [symbol]) == ["worker.py: Worker.prepare takes (batch, more), not (batch)"]
    assert TESTED_RELEASES == ("0.5.23",)


def test_sglangs_own_code_reads_our_trees_as_chains(sources: Path) -> None:
    """``_derive_tree_links`` of the release, run by itself on our masks."""
    import torch

    tree = ast.parse((sources / "srt/speculative/ngram_worker.py").read_text())
    function = next(
        each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "_derive_tree_links"
    )
    scope: dict[str, Any] = {"np": np, "torch": torch}
    exec(compile(ast.Module([function], []), "ngram_worker.py", "exec"), scope)
    _, masks = chain_trees([9, 8], [[1, 2], []], 4)
    following, siblings = scope["_derive_tree_links"](masks.astype(bool), 2, 4)
    assert following.tolist() == [[1, 2, -1, -1], [1, -1, -1, -1]]
    assert siblings.tolist() == [[-1, 3, -1, -1], [-1, 2, 3, -1]]


def test_the_draft_source_has_what_the_worker_calls(sources: Path) -> None:
    """Every method of the corpus that SGLang's worker calls outside of what we override."""
    tree = ast.parse((sources / "srt/speculative/ngram_worker.py").read_text())
    worker = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "NGRAMWorker")
    called = {
        node.attr
        for method in worker.body
        if isinstance(method, ast.FunctionDef) and method.name not in ("_prepare_draft_tokens", "_update_ngram_corpus")
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "ngram_corpus"
    }
    assert "erase_match_state" in called
    assert {name for name in called if not hasattr(DraftSource, name)} == set()
