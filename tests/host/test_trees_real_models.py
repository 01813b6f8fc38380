"""Trees on the two packaged real models: the plain text in fp32, greedy and seeded, also past Gemma's window of 512."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specplug import LLM, RequestOutput, SamplingParams
from specplug.demo.models import GEMMA3, SMOLLM2, gemma3_path, smollm2_path
from specplug.hooks import ProcessManager
from specplug.testing.proposers import as_method
from specplug.testing.tree_proposers import OracleTreeProposer, RandomTreeProposer

pytestmark = pytest.mark.slow

TEXT = "The harbour wakes before the town does. Boats come in low with the tide, and the ice trucks are waiting. "


def outputs_of(
    model: Path, prompts: list[str], params: list[SamplingParams], proposer: object | None = None
) -> list[RequestOutput]:
    manager, config = ProcessManager(), None
    if proposer is not None:
        manager.register(as_method("trees", lambda context: proposer))
        config = {"method": "trees", "num_speculative_tokens": 12}
    with LLM(
        str(model), dtype="float32", max_num_seqs=4, max_model_len=768, speculative_config=config, manager=manager,
        strict=True,
    ) as llm:  # fmt: skip
        return llm.generate(prompts, params)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("find", "repeats"), [(smollm2_path, (1, 2)), (gemma3_path, (1, 24))], ids=["smollm2", "gemma3"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_write_the_plain_text(find: Callable[[], Path], repeats: tuple[int, int], temperature: float) -> None:
    package = SMOLLM2 if find is smollm2_path else GEMMA3
    if not package.is_installed():
        pytest.skip(f"{package.name} is not installed: {package.install}")
    prompts = [TEXT * repeat for repeat in repeats]
    params = [
        SamplingParams(temperature=temperature, seed=row, max_tokens=40, ignore_eos=True) for row in range(len(prompts))
    ]
    plain = outputs_of(find(), prompts, params)
    right = {tuple(output.prompt_token_ids): text for output, text in zip(plain, ids(plain), strict=True)}
    if find is gemma3_path:
        assert max(map(len, right)) > 512, "the prompt must reach past the window"
    vocab_size = 49152 if find is smollm2_path else 262144
    for proposer in (OracleTreeProposer(right, vocab_size=vocab_size, width=3), RandomTreeProposer(vocab_size)):
        assert ids(outputs_of(find(), prompts, params, proposer)) == ids(plain)
