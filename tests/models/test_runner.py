"""Tiny random models through the packed forward: every row as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from threading import Thread
from typing import Any

import pytest
import torch

from specplug.errors import ModelError
from specplug.models.runner import TargetRunner, layer_windows
from specplug.testing.architectures import SUPPORTED_ARCHITECTURES, VOCAB_SIZE, plain_logits, ragged_logits, tiny_model

MakeRunner = Callable[..., TargetRunner]
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture
def make_runner() -> Iterator[MakeRunner]:
    runners: list[TargetRunner] = []

    def make(model: Any, tokenizer: Any = None, **limits: int) -> TargetRunner:
        sizes = {"max_num_seqs": 4, "max_model_len": 128, "max_query_tokens": 16} | limits
        runners.append(TargetRunner(model, tokenizer, **sizes))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def sequences(*lengths: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def all_logits(runner: TargetRunner, ids: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return runner.forward(ids, counts, torch.arange(len(ids))).logits


@pytest.mark.parametrize("name", SUPPORTED_ARCHITECTURES)
def test_ragged_rows_with_chunks_and_rollbacks_equal_each_row_alone(name: str, make_runner: MakeRunner) -> None:
    model = tiny_model(name)
    texts = sequences(60, 13, 35, 28)
    expected = plain_logits(model, texts)
    found = ragged_logits(make_runner(model), texts)
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, **TOLERANCE)


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_B82_rejections_past_the_window(name: str, attention: str, make_runner: MakeRunner) -> None:
    """40 tokens one by one against a window of 8, four wrong tokens rejected behind each."""
    model = tiny_model(name)
    model.set_attn_implementation(attention)
    texts = sequences(40, 33)
    expected = plain_logits(model, texts)
    found = ragged_logits(make_runner(model, max_query_tokens=5), texts, chunks=(1,), junk=(4,))
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, **TOLERANCE)


def test_the_window_matters_in_these_comparisons() -> None:
    text = sequences(40)
    with_window = plain_logits(tiny_model("mistral"), text)[0]
    without = plain_logits(tiny_model("mistral", sliding_window=None), text)[0]
    torch.testing.assert_close(with_window[:8], without[:8], **TOLERANCE)
    assert (with_window[8:] - without[8:]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_that_move_keep_their_text(name: str, make_runner: MakeRunner) -> None:
    model = tiny_model(name)
    first, second, third, fourth = sequences(30, 30, 30, 30)
    runner = make_runner(model)
    expected = plain_logits(model, [first, second, third, fourth])
    for _ in range(3):
        runner.acquire(None)  # type: ignore[arg-type]
    all_logits(runner, torch.cat([first[:15], second[:9], third[:12]]), [15, 9, 12])
    assert runner.release(0) == 2
    logits = all_logits(runner, torch.cat([third[12:16], second[9:10]]), [4, 1])
    torch.testing.assert_close(logits[:4], expected[2][12:16], **TOLERANCE)
    torch.testing.assert_close(logits[4:], expected[1][9:10], **TOLERANCE)
    assert runner.acquire(None) == 2  # type: ignore[arg-type]
    logits = all_logits(runner, torch.cat([third[16:18], fourth[:14]]), [2, 0, 14])
    torch.testing.assert_close(logits[:2], expected[2][16:18], **TOLERANCE)
    torch.testing.assert_close(logits[2:], expected[3][:14], **TOLERANCE)
    assert runner.release(2) is None


def test_B92_rows_that_accept_different_lengths(make_runner: MakeRunner) -> None:
    model = tiny_model("llama")
    texts = sequences(20, 20, 20)
    expected = plain_logits(model, texts)
    runner = make_runner(model)
    for _ in texts:
        runner.acquire(None)  # type: ignore[arg-type]
    all_logits(runner, torch.cat([text[:5] for text in texts]), [5, 5, 5])
    all_logits(runner, torch.cat([text[5:9] for text in texts]), [4, 4, 4])
    accepted = (0, 2, 3)
    for row, count in enumerate(accepted):
        runner.rollback(row, 5 + 1 + count)
    logits = all_logits(runner, torch.cat([t[6 + n : 8 + n] for t, n in zip(texts, accepted, strict=True)]), [2, 2, 2])
    for row, count in enumerate(accepted):
        torch.testing.assert_close(logits[2 * row : 2 * row + 2], expected[row][6 + count : 8 + count], **TOLERANCE)


def test_B81_rollback_of_a_row(make_runner: MakeRunner) -> None:
    model = tiny_model("llama")
    (text,) = sequences(12)
    runner = make_runner(model)
    row = runner.acquire(None)  # type: ignore[arg-type]
    all_logits(runner, text[:6], [6])
    for length in (9, 8, -1):
        with pytest.raises(ValueError, match="cannot be rolled back"):
            runner.rollback(row, length)
    runner.rollback(row, 0)
    torch.testing.assert_close(all_logits(runner, text, [12]), plain_logits(model, [text])[0], **TOLERANCE)


def test_logits_of_the_positions_asked_for_only(make_runner: MakeRunner) -> None:
    model = tiny_model("llama")
    texts = sequences(6, 3)
    expected = plain_logits(model, texts)
    runner = make_runner(model)
    for _ in texts:
        runner.acquire(None)  # type: ignore[arg-type]
    output = runner.forward(torch.cat(texts), [6, 3], torch.tensor([4, 5, 8]))
    assert output.logits.shape == (3, VOCAB_SIZE)
    torch.testing.assert_close(
        output.logits, torch.stack([expected[0][4], expected[0][5], expected[1][2]]), **TOLERANCE
    )
    assert output.hidden_states == {}


def test_a_model_that_computes_all_logits_gives_those_asked_for(make_runner: MakeRunner) -> None:
    model = tiny_model("llama")
    (text,) = sequences(6)
    expected = plain_logits(model, [text])[0]
    full = model.forward

    def forward(
        input_ids: Any, position_ids: Any = None, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        name = "cache" if "cache" in signature(full).parameters else "past_key_values"
        return full(input_ids, position_ids=position_ids, attention_mask=attention_mask,
                    **{name: past_key_values}, **kwargs)  # fmt: skip

    model.forward = forward
    runner = make_runner(model)
    runner.acquire(None)  # type: ignore[arg-type]
    found = runner.forward(text, [6], torch.tensor([1, 4])).logits
    torch.testing.assert_close(found, expected[[1, 4]], **TOLERANCE)


def test_no_logits_at_all(make_runner: MakeRunner) -> None:
    runner = make_runner(tiny_model("llama"))
    runner.acquire(None)  # type: ignore[arg-type]
    output = runner.forward(sequences(4)[0], [4], torch.tensor([], dtype=torch.int64))
    assert output.logits.shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("name", SUPPORTED_ARCHITECTURES)
def test_taps_equal_output_hidden_states(name: str, make_runner: MakeRunner) -> None:
    model = tiny_model(name)
    (text,) = sequences(7)
    with torch.inference_mode():
        plain = model(input_ids=text[None], output_hidden_states=True, use_cache=False)
    runner = make_runner(model)
    runner.acquire(None)  # type: ignore[arg-type]
    runner.tap([3, 0, 1, 2])
    states = runner.forward(text, [7], torch.tensor([6])).hidden_states
    assert sorted(states) == [0, 1, 2, 3]
    for layer in (0, 1, 2):
        torch.testing.assert_close(states[layer], plain.hidden_states[layer][0], **TOLERANCE)
    assert states[3].shape == (7, 32)  # before the final norm, which output_hidden_states has applied to the last


def test_the_last_tap_is_before_the_final_norm(make_runner: MakeRunner) -> None:
    model = tiny_model("llama")
    (text,) = sequences(7)
    with torch.inference_mode():
        plain = model(input_ids=text[None], output_hidden_states=True, use_cache=False).hidden_states[-1][0]
    runner = make_runner(model)
    runner.acquire(None)  # type: ignore[arg-type]
    runner.tap([3])
    (state,) = runner.forward(text, [7], torch.tensor([6])).hidden_states.values()
    torch.testing.assert_close(model.model.norm(state), plain, **TOLERANCE)


def test_taps_change_and_end(make_runner: MakeRunner) -> None:
    model = tiny_model("llama")
    runner = make_runner(model)
    runner.acquire(None)  # type: ignore[arg-type]
    (text,) = sequences(3)
    runner.tap([1])
    runner.tap([2])
    assert list(runner.forward(text, [3], torch.tensor([2])).hidden_states) == [2]
    runner.tap([])
    assert runner.forward(text, [3], torch.tensor([2])).hidden_states == {}
    for layer in (-1, 4):
        with pytest.raises(ValueError, match="the model has layers 0 to 3"):
            runner.tap([layer])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_generate_on_the_same_object_is_unchanged(name: str, make_runner: MakeRunner) -> None:
    model = tiny_model(name)
    ids = torch.stack(sequences(9, 9))

    def generate() -> torch.Tensor:
        output: torch.Tensor = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        return output

    before = generate()
    runner = make_runner(model)
    runner.acquire(None)  # type: ignore[arg-type]
    runner.tap([0, 1])
    all_logits(runner, ids[0], [9])
    assert torch.equal(generate(), before)
    runner.close()
    assert torch.equal(generate(), before)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_close_gives_the_model_back_as_it_was(attention: str, make_runner: MakeRunner) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(attention)
    model.train()
    first, second = make_runner(model), make_runner(model)
    second.tap([1])
    assert (model.config._attn_implementation, model.training) == ("specplug", False)
    first.close()
    first.close()
    assert (model.config._attn_implementation, model.training) == ("specplug", False)
    second.close()
    assert (model.config._attn_implementation, model.training) == (attention, True)
    assert not any(module._forward_hooks for module in model.modules())


def test_two_runners_on_one_model_keep_apart(make_runner: MakeRunner) -> None:
    model = tiny_model("llama")
    one, two = sequences(20, 20)
    expected = plain_logits(model, [one, two])
    first, second = make_runner(model), make_runner(model)
    for runner in (first, second):
        runner.acquire(None)  # type: ignore[arg-type]
    all_logits(first, one[:10], [10])
    all_logits(second, two[:8], [8])
    torch.testing.assert_close(all_logits(first, one[10:20], [10]), expected[0][10:], **TOLERANCE)
    torch.testing.assert_close(all_logits(second, two[8:20], [12]), expected[1][8:], **TOLERANCE)


def test_B85_a_static_cache_asked_of_generate_plays_no_part(make_runner: MakeRunner) -> None:
    """Our cache is always our own: what the generation config asks for is for ``generate``."""
    model = tiny_model("llama")
    model.generation_config.cache_implementation = "static"
    texts = sequences(30, 17)
    expected = plain_logits(model, texts)
    runner = make_runner(model)
    for ours, plain in zip(ragged_logits(runner, texts, junk=(3,)), expected, strict=True):
        torch.testing.assert_close(ours, plain, **TOLERANCE)
    assert [type(layer).__name__ for layer in runner.cache.layers] == ["RaggedLayer"] * 3


def test_a_failing_forward_leaves_the_rows_as_they_were(make_runner: MakeRunner) -> None:
    model = tiny_model("llama")
    (text,) = sequences(10)
    runner = make_runner(model)
    runner.acquire(None)  # type: ignore[arg-type]
    all_logits(runner, text[:4], [4])
    hook = model.model.layers[1].register_forward_hook(_fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        all_logits(runner, text[4:9], [5])
    hook.remove()
    assert runner.cache.lengths == [4]
    torch.testing.assert_close(all_logits(runner, text[4:], [6]), plain_logits(model, [text])[0][4:], **TOLERANCE)


def _fail(*_: object) -> None:
    raise RuntimeError("out of luck")


def test_a_closed_runner_says_so(make_runner: MakeRunner) -> None:
    runner = make_runner(tiny_model("llama"))
    runner.acquire(None)  # type: ignore[arg-type]
    runner.close()
    with pytest.raises(RuntimeError, match="the target is closed"):
        all_logits(runner, sequences(3)[0], [3])


def test_the_number_of_ids_must_match(make_runner: MakeRunner) -> None:
    runner = make_runner(tiny_model("llama"))
    runner.acquire(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="3 input ids for 4 query tokens"):
        all_logits(runner, sequences(3)[0], [4])


def test_a_step_in_another_thread(make_runner: MakeRunner) -> None:
    """inference_mode is per thread: buffers made in one thread are written in another."""
    model = tiny_model("llama")
    (text,) = sequences(10)
    runner = make_runner(model)
    runner.acquire(None)  # type: ignore[arg-type]
    all_logits(runner, text[:4], [4])
    found: list[torch.Tensor] = []
    thread = Thread(target=lambda: found.append(all_logits(runner, text[4:], [6])))
    thread.start()
    thread.join()
    runner.release(0)
    torch.testing.assert_close(found[0], plain_logits(model, [text])[0][4:], **TOLERANCE)


def test_what_the_loop_reads_of_a_target(make_runner: MakeRunner) -> None:
    runner = make_runner(tiny_model("gemma3", eos_token_id=[2, 5]), tokenizer=range(90), max_query_tokens=500)
    assert (runner.vocab_size, runner.tokenizer_vocab_size) == (VOCAB_SIZE, 90)
    assert (runner.hidden_size, runner.num_layers) == (32, 3)
    assert (runner.device, runner.dtype) == (torch.device("cpu"), torch.float32)
    assert runner.eos_token_ids == {2, 5}
    assert runner.max_query_tokens == runner.max_model_len == 128


def test_eos_of_the_generation_config_comes_first(make_runner: MakeRunner) -> None:
    model = tiny_model("llama", eos_token_id=7)
    model.generation_config.eos_token_id = 9
    assert make_runner(model).eos_token_ids == {9}
    model.generation_config.eos_token_id = None
    assert make_runner(model).eos_token_ids == {7}
    model.config.eos_token_id = None
    assert make_runner(model).eos_token_ids == frozenset()


def test_windows_per_layer() -> None:
    assert layer_windows(tiny_model("gemma3").config) == [8, None, 8]
    assert layer_windows(tiny_model("mistral").config) == [8, 8, 8]
    assert layer_windows(tiny_model("gpt2").config) == [None, None, None]


@pytest.mark.parametrize("name", ["gpt_oss", "falcon", "bloom", "rwkv"])
def test_a_model_that_cannot_be_driven_is_named_and_left_as_it_was(name: str, make_runner: MakeRunner) -> None:
    model = tiny_model(name)
    attention = model.config._attn_implementation
    with pytest.raises(ModelError, match=f'model type "{name}" cannot be driven'):
        runner = make_runner(model)
        runner.acquire(None)  # type: ignore[arg-type]
        try:
            all_logits(runner, sequences(3)[0], [3])
        finally:
            runner.close()
    assert model.config._attn_implementation == attention


def test_a_suspended_runner_has_given_the_model_back(make_runner: MakeRunner) -> None:
    model = tiny_model("llama")
    model.train()
    attention = model.config._attn_implementation
    runner = make_runner(model)
    runner.tap([1])
    for _ in range(2):
        runner.suspend()
    assert model.config._attn_implementation == attention
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match="suspended"):
        runner.forward(torch.tensor([1]), [1], torch.tensor([0]))
    for _ in range(2):
        runner.resume()
    runner.acquire(None)  # type: ignore[arg-type]
    output = runner.forward(torch.tensor([1]), [1], torch.tensor([0]))
    assert output.hidden_states[1].shape[0] == 1
    runner.suspend()
    runner.close()
    assert model.config._attn_implementation == attention
    runner.resume()
    assert model.config._attn_implementation == attention, "closed is closed"
