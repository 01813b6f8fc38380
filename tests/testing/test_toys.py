"""The toy targets are what they say they are, alone and in the host loop."""

from __future__ import annotations

import math

import pytest
import torch

from specplug import LLM, SamplingParams
from specplug.errors import ModelError
from specplug.models.target import Target
from specplug.testing import MarkovTarget, ScriptedTarget, TableTarget, tiny_llama, toy_tokenizer
from specplug.testing.driver import make_token_ids
from specplug.types import Request

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def make_request(prompt: list[int], request_id: str = "r") -> Request:
    return Request(request_id, make_token_ids(prompt), GREEDY, seed=0)


def read(target: Target, ids: list[int], counts: list[int]) -> torch.Tensor:
    return target.forward(torch.tensor(ids), counts, torch.arange(len(ids))).logits


def test_a_script_ignores_the_draft() -> None:
    target = ScriptedTarget([1, 9, 2, 3])
    target.acquire(make_request([5, 5]))
    logits = read(target, [5, 5, 7, 7], [4])
    assert logits.argmax(-1).tolist()[1:] == [1, 9, 2]
    assert sorted(logits[1].tolist())[-2:] == [0.0, 10.0]


def test_a_script_ends_with_the_end_of_sequence_or_its_last_token() -> None:
    assert ScriptedTarget([1, 2]).continuation([5], 9) == [1, 2, 9]
    assert ScriptedTarget([1, 2], vocab_size=4).continuation([3], 5) == [1, 2, 2, 2, 2]


def test_a_table_gives_exactly_its_probabilities() -> None:
    target = TableTarget([0.5, 0.3, 0.2, 0.0])
    target.acquire(make_request([1]))
    assert torch.allclose(read(target, [1], [1]).softmax(-1), torch.tensor([[0.5, 0.3, 0.2, 0.0]]))


def test_a_table_may_depend_on_the_last_token_or_the_whole_context() -> None:
    by_last = TableTarget({0: [0.0, 1.0], 1: [1.0, 0.0]})
    assert by_last.continuation([0], 4) == [1, 0, 1, 0]
    by_length = TableTarget(lambda ids: [1.0, 0.0] if len(ids) % 3 else [0.0, 1.0], vocab_size=2)
    assert by_length.continuation([0], 5) == [0, 0, 1, 0, 0]
    with pytest.raises(ValueError, match="no row after token 1; it has rows after"):
        TableTarget({0: [0.0, 1.0]}).continuation([0], 2)


def test_a_table_of_logits_is_passed_on_as_it_is() -> None:
    assert list(TableTarget(logits=[2.0, 1.0, 0.0]).logits_after(0, [1])) == [2.0, 1.0, 0.0]
    assert list(TableTarget([1.0, 0.0]).logits_after(0, [1])) == [0.0, -math.inf]


def test_tables_are_checked() -> None:
    with pytest.raises(ValueError, match="not a distribution"):
        TableTarget([0.5, 0.6])
    with pytest.raises(ValueError, match="give either probs or logits"):
        TableTarget()
    with pytest.raises(ValueError, match="needs vocab_size"):
        TableTarget(lambda ids: [1.0])


def test_rows_roll_back_and_move_as_the_protocol_says() -> None:
    target = MarkovTarget(max_num_seqs=2)
    assert [target.acquire(make_request([1, 2], "a")), target.acquire(make_request([3, 4], "b"))] == [0, 1]
    with pytest.raises(ModelError, match="all 2 rows"):
        target.acquire(make_request([5]))
    first = read(target, [1, 2, 3, 4], [2, 2])
    target.rollback(1, 1)
    assert torch.equal(read(target, [4], [0, 1])[0], first[3])
    with pytest.raises(ValueError, match="cannot roll back to 3"):
        target.rollback(1, 3)
    assert target.release(0) == 1
    assert torch.equal(read(target, [6], [1]), torch.tensor([target.logits_after(2, [3, 4, 6])]))
    assert target.release(0) is None


def test_a_target_refuses_ids_and_lengths_out_of_range() -> None:
    target = MarkovTarget(max_model_len=3)
    target.acquire(make_request([1]))
    with pytest.raises(ValueError, match="input id 16 is outside"):
        read(target, [16], [1])
    with pytest.raises(ValueError, match="would hold 4 tokens; max_model_len is 3"):
        read(target, [1, 1, 1, 1], [4])
    with pytest.raises(ValueError, match="do not match the counts"):
        read(MarkovTarget(), [1, 1], [])


def test_hidden_states_name_token_position_and_layer() -> None:
    target = MarkovTarget()
    target.tap([0, 2])
    target.acquire(make_request([4, 5]))
    output = target.forward(torch.tensor([4, 5]), [2], torch.tensor([], dtype=torch.int64))
    assert output.logits.shape == (0, 16)
    assert output.hidden_states[0].tolist() == [[4.0, 0.0, 0.0], [5.0, 1.0, 0.0]]
    assert output.hidden_states[2].tolist() == [[4.0, 0.0, 2.0], [5.0, 1.0, 2.0]]


def test_the_host_writes_a_toys_continuation() -> None:
    target = MarkovTarget(max_query_tokens=3)
    prompts = [[5, 6, 5, 6, 5], [7], [1, 2, 3]]
    with LLM(target) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [target.continuation(p, 8) for p in prompts]


def test_a_toy_tokenizer_gives_text_to_a_toy_target() -> None:
    tokenizer = toy_tokenizer(["ab", "cd", "ef", "gh", "a", "é ", "<", "7", "8", "</s>"])
    assert tokenizer("abcdaé <").input_ids == [0, 1, 4, 5, 6]
    assert tokenizer.decode([0, 1, 9], skip_special_tokens=True) == "abcd"
    with LLM(ScriptedTarget([1, 2, 5, 9], vocab_size=10, tokenizer=tokenizer)) as llm:
        (output,) = llm.generate("ab", GREEDY)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("cdefé ", "stop")
    with pytest.raises(ValueError, match="must differ"):
        toy_tokenizer(["a", "a"])


def test_tiny_models_are_reproducible_and_leave_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    one, other = tiny_llama(), tiny_llama()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert (one.config.vocab_size, one.config.max_position_embeddings, one.dtype) == (64, 64, torch.float32)


def test_a_tiny_sliding_window_model_sees_its_window_only() -> None:
    model = tiny_llama(sliding_window=8)
    with torch.inference_mode():
        far, near = (model(torch.tensor([[first, *range(20)]])).logits[0, -1] for first in (30, 40))
        assert torch.allclose(far, near, atol=1e-6)  # two layers reach back twice the window, 14 tokens
        assert not torch.allclose(
            *(tiny_llama()(torch.tensor([[first, *range(20)]])).logits[0, -1] for first in (30, 40))
        )
