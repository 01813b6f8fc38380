"""On a CUDA device, where there is one: the dispatch, no host sync, and capture in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from specplug.testing.verify_cases import VerifyCase, differences, random_inputs
from specplug.verify.dispatch import verifier_for
from specplug.verify.inputs import VerifyInputs
from specplug.verify.torch_rules import TorchRules

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("triton") is None, reason="needs a CUDA device and Triton"
)

CASE = VerifyCase(3001, batch_size=12, device="cuda", has_filters=True, seed=5)


@pytest.fixture
def inputs() -> VerifyInputs:
    return random_inputs(CASE)


@pytest.fixture
def no_sync() -> Iterator[None]:
    verifier_for(torch.device("cuda")).verify(random_inputs(CASE))  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_the_device_gives_what_the_cpu_gives(inputs: VerifyInputs) -> None:
    found = verifier_for(inputs.target_logits.device).verify(inputs)
    assert found.output_token_ids.device.type == "cuda"
    assert differences(found, TorchRules().verify(random_inputs(replace(CASE, device="cpu")))) == []


def test_draft_ids_may_come_from_the_host(inputs: VerifyInputs) -> None:
    found = verifier_for(inputs.target_logits.device).verify(
        replace(inputs, draft_token_ids=inputs.draft_token_ids.cpu())
    )
    assert differences(found, verifier_for(inputs.target_logits.device).verify(inputs)) == []


def test_nothing_waits_for_the_device(inputs: VerifyInputs, no_sync: None) -> None:
    verifier_for(inputs.target_logits.device).verify(inputs)


def test_a_captured_graph_replays_the_same_result(inputs: VerifyInputs) -> None:
    from specplug.verify.kernels.problem import pack
    from specplug.verify.kernels.rules import launch

    problem = pack(inputs)
    launch(problem)
    torch.cuda.synchronize()
    want = replace(problem.verification(), output_token_ids=problem.out.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(problem)
    problem.out.fill_(-7)
    graph.replay()
    torch.cuda.synchronize()
    assert differences(problem.verification(), want) == []
