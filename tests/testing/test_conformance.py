"""The kit on proposers that are right: every check passes; and the guards of the class."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specplug.hooks import hookimpl
from specplug.methods import Capabilities, PluginContext
from specplug.testing import (
    CHECKS,
    CheckFailed,
    ProposerConformance,
    RandomProposer,
    Rig,
    SamplingProposer,
    run_checks,
    tiny_llama,
)
from specplug.testing.proposers import FixedProposer
from specplug.types import Batch, Draft

pytest_plugins = ["pytester"]


class TestRandom(ProposerConformance):
    def make_proposer(self, context: PluginContext) -> object:
        return RandomProposer(context.session.vocab_size)


class TestSampling(ProposerConformance):
    rig = Rig(capabilities=Capabilities(laws=frozenset({"dense"})))

    def make_proposer(self, context: PluginContext) -> object:
        return SamplingProposer([1 / context.session.vocab_size] * context.session.vocab_size)


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
