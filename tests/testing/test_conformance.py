"""The kit on proposers that are right: every check passes; and the guards of the class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from specplug.hooks import hookimpl
from specplug.methods import Capabilities, PluginContext
from specplug.testing import (
    CHECKS,
    CheckFailed,
    HookDriver,
    ProposerConformance,
    RandomProposer,
    RandomTreeProposer,
    Rig,
    SamplingProposer,
    run_checks,
    tiny_llama,
)
from specplug.testing.proposers import FixedProposer
from specplug.types import Batch, Draft, Request

pytest_plugins = ["pytester"]


class TestRandom(ProposerConformance):
    def make_proposer(self, context: PluginContext) -> object:
        return RandomProposer(context.session.vocab_size)


class TestSampling(ProposerConformance):
    rig = Rig(capabilities=Capabilities(laws=frozenset({"dense"})))

    def make_proposer(self, context: PluginContext) -> object:
        return SamplingProposer([1 / context.session.vocab_size] * context.session.vocab_size)


class TestRandomTrees(ProposerConformance):
    rig = Rig(num_speculative_tokens=6, capabilities=Capabilities(tree=True))

    def make_proposer(self, context: PluginContext) -> object:
        return RandomTreeProposer(context.session.vocab_size)


class TreesFromStates:
    """Knows the text by the states it was told of alone (the toys' first feature is the token read)."""

    hidden_state_layers = (1,)

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}

    @hookimpl
    def specplug_start_request(self, request: Request) -> None:
        self.texts[request.request_id] = []

    @hookimpl
    def specplug_finish_request(self, request: Request) -> None:
        del self.texts[request.request_id]

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        for row, request_id in enumerate(batch.request_ids):
            self.texts[request_id] += map(int, batch.new_hidden_states[1][row][:, 0].tolist())

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        """All that ever followed the newest token, with what followed that, most recent first."""
        trees = [self._tree(batch, row, limit) for row, limit in enumerate(limits)]
        return Draft.from_trees([tokens for tokens, _ in trees], [parents for _, parents in trees])

    def _tree(self, batch: Batch, row: int, limit: int) -> tuple[list[int], list[int]]:
        text = self.texts[batch.request_ids[row]]
        tokens: list[int] = []
        parents: list[int] = []
        for at in range(len(text) - 2, -1, -1):
            if text[at] == batch.token_ids[row][-1] and text[at + 1] not in tokens:
                follow = text[at + 1 : at + 4]
                parents += [-1, *range(len(tokens), len(tokens) + len(follow) - 1)]
                tokens += follow
        return tokens[:limit], parents[:limit]


class TestTreesFromStates(ProposerConformance):
    rig = Rig(num_speculative_tokens=6, capabilities=Capabilities(tree=True, hidden_state_layers=(1,)))

    def make_proposer(self, context: PluginContext) -> object:
        return TreesFromStates()


def test_some_of_these_trees_are_accepted_off_their_first_path() -> None:
    rig, accepted = TestTreesFromStates.rig, []
    driver = HookDriver(lambda context: TreesFromStates(), rig)
    for number, prompt in enumerate(rig.prompts):
        driver.start(str(number), prompt)
    for _ in range(rig.num_tokens):
        driver.step()
        accepted += [tuple(row.kept_nodes) for row in driver.rows if row.kept_nodes]
    assert any(nodes != tuple(range(len(nodes))) for nodes in accepted)
    assert any(len(nodes) == 3 for nodes in accepted)


def test_a_tree_needs_to_be_declared() -> None:
    with pytest.raises(CheckFailed, match="does not declare Capabilities"):
        CHECKS["contract"](lambda context: RandomTreeProposer(16), Rig(num_speculative_tokens=6))


@pytest.mark.parametrize("parents", [(1, -1), (-1, 1), (-1,)])
def test_parents_that_are_no_tree_fail_the_contract(parents: tuple[int, ...]) -> None:
    class Broken:
        @hookimpl
        def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
            draft = Draft.from_lists([[1, 2] if limit > 1 else [] for limit in limits])
            return replace(draft, parents=parents * (draft.num_slots // 2))

    with pytest.raises(CheckFailed, match="parent"):
        CHECKS["contract"](lambda context: Broken(), Rig(capabilities=Capabilities(tree=True)))


class TestExpectedFailure(ProposerConformance):
    expected_failures = {"proposes": "it has nothing to say, on purpose"}

    def make_proposer(self, context: PluginContext) -> object:
        return FixedProposer([])


def test_checks_cannot_be_overridden() -> None:
    with pytest.raises(TypeError, match="test_conformance overrides the conformance checks"):
        type("TestX", (ProposerConformance,), {"test_conformance": None})


def test_expected_failures_need_a_known_check_and_a_reason() -> None:
    with pytest.raises(TypeError, match="names 'rolback'; the checks are contract, proposes"):
        type("TestX", (ProposerConformance,), {"expected_failures": {"rolback": "why"}})
    with pytest.raises(TypeError, match=r"\['rollback'\] must say why"):
        type("TestX", (ProposerConformance,), {"expected_failures": {"rollback": " "}})


def test_every_check_says_where_to_look_when_it_fails() -> None:
    for name, check in CHECKS.items():
        assert "When it fails:" in (check.__doc__ or ""), name


def test_run_checks_needs_no_pytest() -> None:
    results = run_checks(lambda context: FixedProposer([[1]] * 50), Rig(num_tokens=8))
    failed = {result.name for result in results if result.failure}
    assert [result.name for result in results] == list(CHECKS)
    assert failed == {"second_process"}  # a lambda cannot be sent to another process


def test_an_expected_failure_that_passes_is_reported(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_plugin="""
        from specplug.testing import ProposerConformance, RandomProposer

        class TestPlugin(ProposerConformance):
            expected_failures = {"proposes": "we thought so"}

            def make_proposer(self, context):
                return RandomProposer(context.session.vocab_size)
        """
    )
    result = pytester.runpytest_subprocess("-q", "-k", "proposes", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*we thought so*"])


def test_a_failure_shows_where_to_look(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_plugin="""
        from specplug.testing import ProposerConformance, FixedProposer

        class TestPlugin(ProposerConformance):
            def make_proposer(self, context):
                return FixedProposer([[1] * 9] * 50, clip=False)
        """
    )
    result = pytester.runpytest_subprocess("-q", "-k", "contract", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*got 9 draft tokens; its limit is*", "*When it fails: look at how*"])


class _HiddenStateReader:
    """Proposes the token that the tapped states of the newest read position name, and complains about gaps."""

    hidden_state_layers = (1,)

    def __init__(self) -> None:
        self._positions: dict[str, int] = {}

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        for request_id, states in zip(batch.request_ids, batch.new_hidden_states[1], strict=True):
            for _, position, layer in states.tolist():
                if layer != 1 or position != self._positions.get(request_id, 0):
                    raise CheckFailed(f"{request_id} read position {position} of layer {layer} out of turn")
                self._positions[request_id] = int(position) + 1

    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        rows = list(zip(batch.request_ids, batch.token_ids, limits, strict=True))
        for request_id, token_ids, limit in rows:
            if limit and self._positions[request_id] != len(token_ids) - 1:
                raise CheckFailed(f"{request_id} has {len(token_ids)} tokens, states of {self._positions[request_id]}")
        return Draft.from_lists([token_ids[-1:][:limit] for _, token_ids, limit in rows])


def test_hidden_states_reach_proposers_without_gaps() -> None:
    for name in ("proposes", "rollback", "greedy_equality", "length_limits"):
        CHECKS[name](lambda context: _HiddenStateReader(), Rig(num_tokens=12))


@pytest.mark.parametrize("sliding_window", [None, 8])
def test_greedy_equality_on_a_transformers_model(sliding_window: int | None) -> None:
    from specplug.config import resolve_engine_args
    from specplug.models.loading import load_target

    def make_target() -> object:
        engine_args, _ = resolve_engine_args(tiny_llama(sliding_window=sliding_window), {})
        return load_target(engine_args)

    rig = Rig(make_target=make_target, num_tokens=12)  # type: ignore[arg-type]
    CHECKS["greedy_equality"](lambda context: RandomProposer(64), rig)
    CHECKS["rollback"](lambda context: RandomProposer(64), rig)
