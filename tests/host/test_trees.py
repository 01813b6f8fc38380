"""Trees of draft tokens in the loop: the text of plain decoding, more of it per step, and everything counted once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from specplug import LLM, Draft, RequestOutput, SamplingParams, hookimpl
from specplug.hooks import ProcessManager
from specplug.methods import Capabilities
from specplug.testing.architectures import tiny_model
from specplug.testing.models import tiny_llama, toy_tokenizer
from specplug.testing.proposers import OracleProposer, as_method
from specplug.testing.toys import MarkovTarget, ScriptedTarget, TableTarget
from specplug.testing.tree_proposers import OracleTreeProposer, RandomTreeProposer
from specplug.trees import tree_of
from specplug.types import Batch, Dense, LawSpan, SourceSpan, StepOutcome, Verification

Decode = Callable[..., list[RequestOutput]]
MakeLLM = Callable[..., LLM]


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def continuations(prompts: Sequence[Sequence[int]], outputs: Sequence[RequestOutput]) -> dict[tuple[int, ...], Any]:
    return {tuple(prompt): text for prompt, text in zip(prompts, ids(outputs), strict=True)}


def num_accepted(outputs: Sequence[RequestOutput]) -> int:
    return sum(output.outputs[0].spec_decode_metrics.num_accepted_tokens for output in outputs)


class FixedTrees:
    """The same tree for every request at every step, cut to its limit."""

    def __init__(self, tokens: Sequence[int], parents: Sequence[int], **change: Any) -> None:
        self.tokens, self.parents, self.change = tokens, parents, change

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        draft = Draft.from_trees([self.tokens] * len(batch), [self.parents] * len(batch))
        return draft.truncate(limits)


# --- exactness --------------------------------------------------------------------------------------------------


PROMPTS = [[5, 6] * 6, [1, 2, 3, 4, 1, 2], [7], [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 8]]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_give_the_plain_text_in_fewer_steps(name: str, temperature: float, decode: Decode) -> None:
    """Greedy, and seed-exact at temperature 1, past gemma3's and mistral's window of 8 tokens and their rings."""
    params = [SamplingParams(temperature=temperature, seed=row, max_tokens=40, ignore_eos=True) for row in range(4)]
    engine = {"max_model_len": 96, "max_num_batched_tokens": 32}
    plain = decode(tiny_model(name), PROMPTS, params, **engine)
    texts = continuations(PROMPTS, plain)
    for proposer in (
        OracleTreeProposer(texts, vocab_size=97, width=3),
        OracleTreeProposer(texts, vocab_size=97, width=2),
        RandomTreeProposer(97, seed=3),
    ):
        drafted = decode(tiny_model(name), PROMPTS, params, proposer, 12, **engine)
        assert ids(drafted) == ids(plain)
        if isinstance(proposer, OracleTreeProposer):
            assert num_accepted(drafted) >= 4 * 24  # of 39: the budget of 32 tokens leaves each row 7 nodes


def test_the_first_path_of_these_trees_is_wrong(decode: Decode) -> None:
    """What is accepted above lies on other paths: by first children nothing would be."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    plain = decode(tiny_llama(), PROMPTS, params)
    texts = continuations(PROMPTS, plain)

    class FirstPaths(OracleTreeProposer):
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            return super().specplug_propose(batch=batch, limits=limits).to_chains()

    drafted = decode(tiny_llama(), PROMPTS, params, FirstPaths(texts, vocab_size=64), 9)
    assert (ids(drafted), num_accepted(drafted)) == (ids(plain), 0)


def test_a_batch_of_different_trees_is_each_alone(decode: Decode) -> None:
    params = [SamplingParams(temperature=1.0, seed=row, max_tokens=24, ignore_eos=True) for row in range(4)]
    together = decode(tiny_llama(), PROMPTS, params, RandomTreeProposer(64, seed=1), 9)
    for row, prompt in enumerate(PROMPTS):
        (alone,) = decode(tiny_llama(), [prompt], params[row], RandomTreeProposer(64, seed=1), 9)
        assert ids([alone]) == ids([together[row]])


def test_chains_and_trees_in_one_batch(decode: Decode) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    plain = decode(tiny_llama(), PROMPTS, params)
    texts = continuations(PROMPTS, plain)
    trees, chains = OracleTreeProposer(texts, vocab_size=64), OracleProposer(texts, vocab_size=64)

    class Mixed:
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            drafts = [each.specplug_propose(batch=batch, limits=limits) for each in (trees, chains)]
            rows = [
                drafts[int(request.request_id) % 2].select_rows([row]) for row, request in enumerate(batch.requests)
            ]
            tokens = [row.draft_token_ids.tolist() for row in rows]
            parents = [row.parents or range(-1, row.num_slots - 1) for row in rows]
            return Draft.from_trees(tokens, parents)

    drafted = decode(tiny_llama(), PROMPTS, params, Mixed(), 8)
    assert ids(drafted) == ids(plain)
    assert [output.outputs[0].spec_decode_metrics.histogram[8] > 0 for output in drafted] == [False, True] * 2
    assert [output.outputs[0].spec_decode_metrics.histogram[4] > 0 for output in drafted][::2] == [True] * 2


def test_a_tree_of_width_1_is_the_chain_step_by_step(decode: Decode) -> None:
    params = [SamplingParams(temperature=0.8, seed=row, max_tokens=24, logprobs=2) for row in range(4)]
    plain = decode(tiny_llama(), PROMPTS, params)
    texts = continuations(PROMPTS, plain)
    chains = decode(tiny_llama(), PROMPTS, params, OracleProposer(texts, vocab_size=64), 5)
    trees = decode(tiny_llama(), PROMPTS, params, OracleTreeProposer(texts, vocab_size=64, width=1), 5)
    for one, other in zip(chains, trees, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs  # bit for bit
        assert one.outputs[0].spec_decode_metrics == other.outputs[0].spec_decode_metrics


def test_trees_with_dense_laws_are_verified_by_match(decode: Decode, caplog: pytest.LogCaptureFixture) -> None:
    """Also under ``standard``, which is for chains: seed-exact, whatever the laws say."""
    target = TableTarget(probs=[0.4, 0.3, 0.2, 0.1], eos_token_id=None)
    params = [SamplingParams(seed=seed, max_tokens=30) for seed in range(6)]
    plain = decode(target, [[1]] * 6, params)

    class DenseTrees(FixedTrees):
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            draft = FixedTrees.specplug_propose(self, batch=batch, limits=limits)
            law = Dense(torch.zeros(draft.num_slots, 4))
            laws = (LawSpan(0, draft.num_slots, law),) if draft.num_slots else ()
            return Draft(draft.draft_token_ids, draft.num_draft_tokens, laws, parents=draft.parents)

    from specplug.verify import dispatch

    dispatch.say_once.cache_clear()
    caplog.set_level(logging.INFO, logger="specplug")
    proposer = DenseTrees([0, 1, 2, 0, 1], [-1, -1, -1, 0, 1])
    drafted = decode(target, [[1]] * 6, params, proposer, 5, laws=frozenset({"dense"}), rule="standard")
    # prompts end without a draft and the last steps have room for a chain only: these are verified by standard
    assert [row[1:-2] for row in ids(drafted)] == [row[1:-2] for row in ids(plain)]
    assert num_accepted(drafted) > 60
    assert [r.getMessage() for r in caplog.records].count(
        "verification: draft trees are verified by match, because standard and block take chains"
    ) == 1


def test_stop_strings_and_ends_inside_a_path_cut_it(decode: Decode) -> None:
    texts = ["<p>", "ab", "c", "d", "ba", "e", "f", "g", "h", "</s>", "a", "b", " "]
    target = ScriptedTarget([1, 3, 2, 10, 5, 6, 7], vocab_size=13, tokenizer=toy_tokenizer(texts))
    oracle = OracleTreeProposer({(0,): [1, 3, 2, 10, 5, 6, 7, 9, 9, 9]}, vocab_size=13)
    for stop in ({"stop": ["ca"]}, {"stop_token_ids": [10]}, {"max_tokens": 4}, {}):
        params = SamplingParams(temperature=0.0, **{"max_tokens": 12, **stop})
        (plain,), (drafted,) = (decode(target, [[0]], params, proposer, 8) for proposer in (None, oracle))
        assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
        assert (drafted.outputs[0].text, drafted.outputs[0].finish_reason) == (
            plain.outputs[0].text,
            plain.outputs[0].finish_reason,
        )


def test_an_interrupted_step_leaves_the_rows_as_commit_left_them(make_llm: MakeLLM) -> None:
    """Between the moves of accepted entries and the commit, and after it."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with make_llm(tiny_llama()) as llm:
        plain = llm.generate([list(prompt) for prompt in PROMPTS], params)
    trees = OracleTreeProposer(continuations(PROMPTS, plain), vocab_size=64)
    with make_llm(tiny_llama(), trees, 8) as llm:
        session = llm._session
        for number, prompt in enumerate(PROMPTS):
            llm.add_request(str(number), list(prompt), params)
        compact, num_calls = session.target.compact, 0

        def interrupted(*moves: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            compact(*moves)
            if num_calls % 3 == 1:
                raise KeyboardInterrupt

        session.target.compact = interrupted
        outputs: dict[str, RequestOutput] = {}
        while llm.has_unfinished_requests():
            try:
                outputs |= {output.request_id: output for output in llm.step() if output.finished}
            except KeyboardInterrupt:
                continue
    assert num_calls > 6
    assert sorted(ids(list(outputs.values()))) == sorted(ids(plain))


# --- what proposers see -----------------------------------------------------------------------------------------


class Following(OracleTreeProposer):
    """Keeps what ``advance`` tells: the toys' hidden states are (token id, position, layer)."""

    hidden_state_layers = (1,)

    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]], **settings: Any) -> None:
        super().__init__(texts, **settings)
        self.seen: dict[str, list[int]] = {}

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        for row, request_id in enumerate(batch.request_ids):
            new = batch.new_token_ids[row].tolist()
            first = batch.num_computed_tokens[row] - len(new)
            states = batch.new_hidden_states[1][row]
            assert states.tolist() == [[token, first + offset, 1] for offset, token in enumerate(new)]
            self.seen.setdefault(request_id, []).extend(new)


def test_advance_covers_exactly_the_kept_path_in_order(decode: Decode) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    plain = decode(MarkovTarget(max_query_tokens=4), PROMPTS, params)
    proposer = Following(continuations(PROMPTS, plain), vocab_size=16)
    drafted = decode(MarkovTarget(max_query_tokens=8), PROMPTS, params, proposer, 6)
    assert ids(drafted) == ids(plain)
    assert num_accepted(drafted) > 30
    for number, (prompt, output) in enumerate(zip(PROMPTS, drafted, strict=True)):
        text = [*prompt, *output.outputs[0].token_ids]
        assert proposer.seen[str(number)] == text[:-1]  # the newest token was never read


def test_tapped_states_of_a_real_model_follow_the_path(decode: Decode) -> None:
    model = tiny_model("gemma3")
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    plain = decode(model, PROMPTS, params)

    class Tapping(OracleTreeProposer):
        hidden_state_layers = (0, 2)

        def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]]) -> None:
            super().__init__(texts, vocab_size=97)
            self.states: dict[str, list[torch.Tensor]] = {}

        @hookimpl
        def specplug_advance(self, batch: Batch) -> None:
            for row, request_id in enumerate(batch.request_ids):
                self.states.setdefault(request_id, []).append(batch.new_hidden_states[2][row].clone())

    proposer = Tapping(continuations(PROMPTS, plain))
    decode(model, PROMPTS, params, proposer, 8)
    for number, (prompt, output) in enumerate(zip(PROMPTS, plain, strict=True)):
        text = [*prompt, *output.outputs[0].token_ids[:-1]]
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states[2][0]
        torch.testing.assert_close(torch.cat(proposer.states[str(number)]), expected, atol=2e-5, rtol=2e-5)


# --- counting ---------------------------------------------------------------------------------------------------


def test_B113_trees_count_path_lengths(make_llm: MakeLLM) -> None:
    """Five nodes on paths of two: two drafted tokens; the bonus is in the length and in no rate."""
    target = ScriptedTarget([3, 4, 5, 6, 7, 8, 10, 11, 12], vocab_size=16)
    steps: list[StepOutcome] = []

    class Watching(FixedTrees):
        @hookimpl
        def specplug_accept_metrics(self, outcome: StepOutcome) -> None:
            steps.append(outcome)

    proposer = Watching([9, 4, 7, 8, 5], [-1, -1, -1, 0, 1])
    with make_llm(target, proposer, 5) as llm:
        (output,) = llm.generate([[1, 2]], SamplingParams(temperature=0.0, max_tokens=9))
        metrics = output.outputs[0].spec_decode_metrics
        totals = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    first = steps[1].rows[0]
    assert (first.num_draft_tokens, first.num_draft_nodes, first.num_accepted_tokens) == (2, 5, 2)
    assert first.sources[0].num_draft_tokens == 2
    assert metrics.num_accepted_tokens == 3  # 4 5, then 6 by the target, then 7
    assert metrics.num_draft_tokens == sum(step.rows[0].num_draft_tokens for step in steps)
    assert (
        metrics.num_draft_nodes == sum(step.rows[0].num_draft_nodes or 0 for step in steps) > metrics.num_draft_tokens
    )
    assert metrics.draft_acceptance_rate == 3 / metrics.num_draft_tokens
    assert metrics.mean_acceptance_length == 1 + 3 / metrics.num_drafts
    assert totals["specplug:num_draft_nodes"] == metrics.num_draft_nodes
    assert totals["vllm:spec_decode_num_draft_tokens"] == metrics.num_draft_tokens


def test_sources_of_one_tree_count_the_paths_through_them(make_llm: MakeLLM) -> None:
    target = ScriptedTarget([3, 4, 5, 6, 7], vocab_size=16)
    steps: list[StepOutcome] = []

    class TwoSources(FixedTrees):
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            draft = FixedTrees.specplug_propose(self, batch=batch, limits=limits)
            if draft.num_slots < 5:
                return Draft.empty(len(batch))
            return Draft(
                draft.draft_token_ids,
                draft.num_draft_tokens,
                draft.laws,
                (SourceSpan(0, 3, "deep"), SourceSpan(3, 5, "flat")),
                parents=draft.parents,
            )

        @hookimpl
        def specplug_accept_metrics(self, outcome: StepOutcome) -> None:
            steps.append(outcome)

    proposer = TwoSources([9, 9, 9, 4, 5], [-1, 0, 1, -1, -1])
    with make_llm(target, proposer, 5) as llm:
        llm.generate([[1, 2]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    deep, flat = steps[1].rows[0].sources
    assert (deep.source, deep.num_draft_tokens, deep.num_accepted_tokens) == ("deep", 3, 0)
    assert (flat.source, flat.num_draft_tokens, flat.num_accepted_tokens) == ("flat", 1, 1)


# --- where trees cannot be verified -----------------------------------------------------------------------------


class ChainsOnly(MarkovTarget):
    """A target from before there were trees."""

    supports_trees = False

    def forward(self, input_ids: Any, num_query_tokens: Any, logits_indices: Any) -> Any:
        return super().forward(input_ids, num_query_tokens, logits_indices)


def flattened(llm: LLM) -> int:
    return next(int(m.value) for m in llm.get_metrics() if m.name == "specplug:num_flattened_trees")  # type: ignore[attr-defined]


def test_a_target_without_trees_gets_first_paths_said_once_and_counted(
    make_llm: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with make_llm(MarkovTarget()) as llm:
        plain = llm.generate([list(prompt) for prompt in PROMPTS], params)
    for target, expected in ((ChainsOnly(), True), (MarkovTarget(), False)):
        caplog.clear()
        with make_llm(target, RandomTreeProposer(16), 6) as llm:
            assert ids(llm.generate([list(prompt) for prompt in PROMPTS], params)) == ids(plain)
            assert (flattened(llm) > 10) is expected
        said = [record.getMessage() for record in caplog.records if "trees are cut" in record.getMessage()]
        assert len(said) == expected
        assert all("the target takes chains only" in line for line in said)


def test_synthetic_verifies_first_paths(make_llm: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    manager = ProcessManager()
    manager.register(as_method("trees", lambda context: FixedTrees([3, 4, 5], [-1, -1, 0])))
    config = {
        "method": "trees",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 1.0, 1.0],
    }
    with LLM(MarkovTarget(), speculative_config=config, manager=manager, strict=True) as llm:
        (output,) = llm.generate([[1]], SamplingParams(max_tokens=8, ignore_eos=True))
        assert flattened(llm) > 0
    assert output.outputs[0].token_ids[1:3] == [3, 5]
    assert sum("the verification rule takes chains only" in record.getMessage() for record in caplog.records) == 1


# --- verifier plugins -------------------------------------------------------------------------------------------


TREE = ([3, 4, 5], [-1, -1, 1])


def verifying(answer: Callable[[int], Verification]) -> tuple[ProcessManager, dict[str, Any]]:
    class Verifier:
        @hookimpl
        def specplug_verify(self, batch: Batch, draft: Draft, target_logits: Any) -> Verification | None:
            return answer(len(batch)) if draft.num_slots == 3 else None

    class Both(FixedTrees, Verifier):
        pass

    manager = ProcessManager()
    manager.register(as_method("both", lambda context: Both(*TREE), capabilities=Capabilities(tree=True)))
    return manager, {"method": "both", "num_speculative_tokens": 3}


def accepting(tokens: list[int], nodes: list[int] | None) -> Callable[[int], Verification]:
    def answer(num_rows: int) -> Verification:
        indices = None if nodes is None else torch.tensor([nodes] * num_rows, dtype=torch.int32).reshape(num_rows, -1)
        num_nodes = sum(node >= 0 for node in nodes or [])
        padded = tokens + [-1] * (3 - len(tokens))
        return Verification(
            torch.tensor([padded] * num_rows, dtype=torch.int32),
            torch.tensor([num_nodes] * num_rows),
            accepted_draft_indices=indices,
        )

    return answer


def test_a_verifier_plugin_decides_on_a_tree() -> None:
    manager, config = verifying(accepting([4, 5, 8], [1, 2]))
    with LLM(MarkovTarget(), speculative_config=config, manager=manager, strict=True) as llm:
        (output,) = llm.generate([[1]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert output.outputs[0].token_ids[1:7] == [4, 5, 8] * 2
    assert output.outputs[0].spec_decode_metrics.num_verified_accepted_tokens >= 4


@pytest.mark.parametrize(
    ("tokens", "nodes", "what"),
    [
        ([4, 5, 8], None, "shape"),
        ([4, 8], [1], "shape"),
        ([3, 5, 8], [0, 2], "value"),
        ([5, 8, -1], [2, -1], "value"),
        ([4, 5, 8], [1, 7], "value"),
        ([3, 5, 8], [1, 2], "value"),
    ],
    ids=["no nodes", "too narrow", "no path", "not from the root", "no node", "other tokens"],
)
def test_a_verifier_plugin_that_accepts_no_path_is_not_followed(
    tokens: list[int], nodes: list[int] | None, what: str
) -> None:
    with LLM(MarkovTarget()) as llm:
        (plain,) = llm.generate([[1]], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    manager, config = verifying(accepting(tokens, nodes))
    with LLM(MarkovTarget(), speculative_config=config, manager=manager) as llm:
        (output,) = llm.generate([[1]], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        assert set(llm._session.hooks.faults) == {f"verify_{what}:both"}
    assert ids([output]) == ids([plain])


def test_accepted_nodes_that_came_from_a_device_are_looked_at_after_the_copy() -> None:
    from specplug.host.commit import to_host

    draft = Draft.from_trees([[3, 4, 5], [3, 4, 5]], [TREE[1], TREE[1]])
    verification = Verification(
        torch.tensor([[4, 5, 8], [3, 5, 8]], dtype=torch.int32),
        torch.tensor([2, 2]),
        accepted_draft_indices=torch.tensor([[1, 2], [0, 2]]),
    )
    decided = to_host(verification, draft)
    assert decided.is_invalid == [False, True]
    assert decided.accepted_nodes == [[1, 2], [0, 2]]
    assert tree_of((-1, -1, 1)).has_path([1, 2])
