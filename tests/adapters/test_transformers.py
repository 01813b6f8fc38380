"""The transformers door: what ``model.generate`` returns without it, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from specplug.adapters import transformers as door
from specplug.adapters.transformers import generate, release, sessions
from specplug.errors import ConfigError, ModelError, RequestError
from specplug.testing import toy_tokenizer
from specplug.testing.architectures import SUPPORTED_ARCHITECTURES, tiny_model

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
    "ngram_backoff": False,
}
VOCAB_SIZE = 97
PAD = 0


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


def prompts(*lengths: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """Left-padded prompts that repeat themselves, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    rows, longest = [], max(lengths)
    for length in lengths:
        phrase = torch.randint(3, VOCAB_SIZE, (5,), generator=generator)
        ids = phrase.repeat(1 + length // 5)[:length]
        rows.append(torch.cat([torch.full((longest - length,), PAD), ids]))
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
    return {"input_ids": torch.stack(rows), "attention_mask": mask}


def ours(model: Any, inputs: dict[str, torch.Tensor], spec: dict[str, Any] | None = None, **options: Any) -> Any:
    return model.generate(**inputs, custom_generate=generate, spec=spec or NGRAM, **options)


def drafted(model: Any) -> int:
    counts = {metric.name: metric for metric in sessions(model)[-1].get_metrics()}
    return int(counts["vllm:spec_decode_num_draft_tokens"].value)


# --- the same text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(12,), (12, 5, 9), (3, 20, 11, 7, 15, 4, 8, 16, 6, 13)], ids=["1", "3", "10"])
@pytest.mark.parametrize("name", SUPPORTED_ARCHITECTURES)
def test_greedy_text_is_that_of_plain_generate(name: str, lengths: Sequence[int]) -> None:
    model = tiny_model(name)
    inputs = prompts(*lengths)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD}
    plain = model.generate(**inputs, **options)
    assert torch.equal(ours(model, inputs, **options), plain)
    assert drafted(model) > 0
    assert torch.equal(model.generate(**inputs, **options), plain)


@pytest.mark.parametrize("method", ["suffix"])
def test_greedy_text_with_plugins_of_others(llama: Any, method: str) -> None:
    pytest.importorskip(f"specplug_{method}")
    inputs = prompts(12, 5, 9)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD}
    found = ours(llama, inputs, {"method": method, "num_speculative_tokens": 8}, **options)
    assert torch.equal(found, llama.generate(**inputs, **options))


def test_ends_of_sequence_and_padding(llama: Any) -> None:
    """Rows end at different lengths; what comes after their end is padding, as in plain ``generate``."""
    inputs = prompts(12, 5, 9, 7)
    options: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 5}
    free = llama.generate(**inputs, **options, eos_token_id=-1)[:, inputs["input_ids"].shape[1] :]
    ends = [int(free[0, 6]), int(free[2, 15])]
    plain = llama.generate(**inputs, **options, eos_token_id=ends)
    assert (plain[:, -1] == 5).any(), "a row must end early for this to be a test"
    assert torch.equal(ours(llama, inputs, **options, eos_token_id=ends), plain)
    assert torch.equal(ours(llama, inputs, **options, eos_token_id=-1)[:, inputs["input_ids"].shape[1] :], free)


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 9},
        {"min_length": 20},
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[7], [11, 12]]},
        {"suppress_tokens": [3, 4, 5, 6, 7, 8, 9, 10]},
        {"begin_suppress_tokens": list(range(3, 60))},
        {"sequence_bias": [[[9], -8.0], [[14], 2.5]]},
        {"forced_eos_token_id": 2},
        {"exponential_decay_length_penalty": (4, 1.3)},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 5},
        {"renormalize_logits": True, "remove_invalid_values": True},
        {"max_length": 31, "max_new_tokens": None},
        {"use_cache": False},
    ],
    ids=lambda options: "+".join(options),
)
def test_parameters_of_generate_act(llama: Any, options: dict[str, Any]) -> None:
    inputs = prompts(12, 5, 9)
    all_options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD} | options
    plain = llama.generate(**inputs, **all_options)
    assert torch.equal(ours(llama, inputs, **all_options), plain)


def test_parameters_change_the_text(llama: Any) -> None:
    """Else the test above would say nothing."""
    inputs = prompts(12, 5, 9)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD}
    plain = llama.generate(**inputs, **options)
    for changed in (
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"begin_suppress_tokens": list(range(60))},
    ):
        assert not torch.equal(llama.generate(**inputs, **options, **changed), plain), changed


def test_prefix_allowed_tokens_are_asked_by_row(llama: Any) -> None:
    inputs = prompts(12, 5)

    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        return list(range(10 + 20 * batch_id, 30 + 20 * batch_id))

    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "prefix_allowed_tokens_fn": allowed}
    plain = llama.generate(**inputs, **options)
    assert torch.equal(ours(llama, inputs, **options), plain)


class AfterToken(StoppingCriteria):
    """Ends a row after a token id."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token_id


def test_own_stopping_criteria_are_asked_after_every_token(llama: Any) -> None:
    inputs = prompts(12, 5, 9)
    options: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": PAD}
    free = llama.generate(**inputs, **options)
    criteria = StoppingCriteriaList([AfterToken(int(free[1, inputs["input_ids"].shape[1] + 10]))])
    plain = llama.generate(**inputs, **options, stopping_criteria=criteria)
    assert not torch.equal(plain, free)
    found = ours(llama, inputs, **options, stopping_criteria=criteria, return_dict_in_generate=True)
    assert torch.equal(found.sequences, plain)
    assert all(record.num_emitted_tokens for record in found.spec_decode_metrics)


def test_max_time_ends_all_rows(llama: Any) -> None:
    inputs = prompts(12, 5)
    found = ours(llama, inputs, max_new_tokens=200, do_sample=False, pad_token_id=PAD, max_time=0.0)
    assert inputs["input_ids"].shape[1] < found.shape[1] < 100
    criteria = StoppingCriteriaList([MaxTimeCriteria(1000.0)])
    whole = ours(llama, inputs, max_new_tokens=20, do_sample=False, pad_token_id=PAD, stopping_criteria=criteria)
    assert torch.equal(whole, llama.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=PAD))


def test_prompts_without_a_mask_and_with_a_hole(llama: Any) -> None:
    ids = prompts(14)["input_ids"]
    options = {"max_new_tokens": 16, "do_sample": False}
    plain = llama.generate(ids, **options)
    assert torch.equal(llama.generate(ids, custom_generate=generate, spec=NGRAM, **options), plain)
    mask = torch.ones_like(ids)
    mask[0, 4:7] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert torch.equal(ours(llama, inputs, **options), llama.generate(**inputs, **options))


def test_return_dict(llama: Any) -> None:
    inputs = prompts(12, 5)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD, "return_dict_in_generate": True}
    plain, found = llama.generate(**inputs, **options), ours(llama, inputs, **options)
    assert type(found) is type(plain)
    assert torch.equal(found.sequences, plain.sequences)
    lengths = (plain.sequences[:, 12:] != PAD).sum(dim=1).tolist()
    assert [record.num_emitted_tokens for record in found.spec_decode_metrics] == lengths
    assert sum(record.num_accepted_tokens for record in found.spec_decode_metrics) > 0


# --- sampling ---------------------------------------------------------------------------------------------------


def test_sampling_follows_torchs_seed(llama: Any) -> None:
    inputs = prompts(12, 12)
    inputs["input_ids"][1] = inputs["input_ids"][0]
    options = {"max_new_tokens": 24, "do_sample": True, "top_k": 0, "pad_token_id": PAD}

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        found: torch.Tensor = ours(llama, inputs, **options)
        return found

    first = run(1)
    assert torch.equal(run(1), first)
    assert not torch.equal(run(2), first)
    assert not torch.equal(first[0], first[1]), "rows with one prompt are samples of their own"
    second: torch.Tensor = ours(llama, inputs, **options)
    assert not torch.equal(second, run(2)), "a second call goes on in the random stream"


def test_sampled_text_does_not_depend_on_the_drafts(llama: Any) -> None:
    """N-gram drafts are verified by sample-and-match: the text is that without drafts."""
    inputs = prompts(12, 5)
    options = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.4, "top_k": 0, "pad_token_id": PAD}
    found = []
    for lookup in (1, 50):
        torch.manual_seed(5)
        spec = {**NGRAM, "prompt_lookup_min": lookup, "prompt_lookup_max": lookup}
        found.append(ours(llama, inputs, spec, **options))
    assert torch.equal(*found)


def test_return_sequences_are_samples_of_their_own(llama: Any) -> None:
    found = ours(llama, prompts(9, 6), max_new_tokens=16, do_sample=True, num_return_sequences=3, pad_token_id=PAD)
    assert found.shape[0] == 6
    assert len({tuple(row.tolist()) for row in found}) == 6


SAMPLING: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_k": 0, "top_p": 0.5},
    {"top_k": 0, "min_p": 0.3, "temperature": 1.3},
    {"top_k": 8, "top_p": 0.8, "min_p": 0.1},
    {"top_k": 0, "typical_p": 0.5},
    {"top_k": 0, "epsilon_cutoff": 0.03},
    {"top_k": 0, "eta_cutoff": 0.05},
    {"top_k": 0, "repetition_penalty": 1.5, "temperature": 0.7},
]


@pytest.mark.parametrize("options", SAMPLING, ids=lambda options: "+".join(options))
def test_second_token_has_the_distribution_of_plain_generate(llama: Any, options: dict[str, Any]) -> None:
    """The second token is drawn behind a draft. Compared with the scores that plain ``generate`` reports."""
    rows, first = sample_pairs(llama, options)
    assert is_plausible(rows, second_token_law(llama, first, options))


def test_another_temperature_is_not_plausible(llama: Any) -> None:
    """The test above sees a wrong law."""
    rows, first = sample_pairs(llama, {"top_k": 0})
    assert len(rows) > 100
    assert not is_plausible(rows, second_token_law(llama, first, {"top_k": 0, "temperature": 0.7}))


def sampled(options: dict[str, Any]) -> dict[str, Any]:
    common = {"max_new_tokens": 3, "do_sample": True, "temperature": 0.4, "pad_token_id": PAD, "eos_token_id": -1}
    return common | options


def sample_pairs(model: Any, options: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Second tokens behind the most frequent first one, and that one."""
    torch.manual_seed(11)
    found = ours(model, prompts(12), num_return_sequences=800, **sampled(options))[:, 12:]
    first = Counter(found[:, 0].tolist()).most_common(1)[0][0]
    return found[found[:, 0] == first][:, 1], first


def second_token_law(model: Any, first: int, options: dict[str, Any]) -> torch.Tensor:
    ids = torch.cat([prompts(12)["input_ids"], torch.tensor([[first]])], dim=1)
    settings = {**sampled(options), "output_scores": True, "return_dict_in_generate": True}
    scores: torch.Tensor = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings).scores[0]
    return scores.softmax(-1)[0]


def is_plausible(tokens: torch.Tensor, law: torch.Tensor) -> bool:
    """Whether the chi-square statistic is within five standard deviations, rare tokens taken together."""
    expected = law.double() * len(tokens)
    counts = torch.bincount(tokens, minlength=len(law)).double()
    if counts[law == 0].sum():
        return False
    often = expected > 5
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    wanted = torch.cat([expected[often], expected[~often].sum()[None]])
    observed, wanted = observed[wanted > 1], wanted[wanted > 1]
    degrees = max(len(wanted) - 1, 1)
    return float(((observed - wanted) ** 2 / wanted).sum()) < degrees + 5 * (2 * degrees) ** 0.5 + 10


def test_processors_given_by_hand(llama: Any) -> None:
    """They act as in plain ``generate``: in place of one of their kind; greedy search is not changed by a filter."""
    inputs = prompts(12, 5)
    processors = LogitsProcessorList([TopKLogitsWarper(1)])
    options = {"max_new_tokens": 16, "pad_token_id": PAD}
    greedy = llama.generate(**inputs, do_sample=False, **options)
    assert torch.equal(ours(llama, inputs, do_sample=True, logits_processor=processors, **options), greedy)
    warm = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    assert torch.equal(ours(llama, inputs, do_sample=False, logits_processor=warm, **options), greedy)


# --- streaming --------------------------------------------------------------------------------------------------


class Collector:
    """A streamer as transformers has them."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.has_ended = False

    def put(self, value: torch.Tensor) -> None:
        assert not self.has_ended
        self.values.append(value)

    def end(self) -> None:
        self.has_ended = True


def test_a_streamer_gets_prompt_and_tokens_in_pieces(llama: Any) -> None:
    inputs, collector = prompts(12), Collector()
    found = ours(llama, inputs, max_new_tokens=24, do_sample=False, spec_streamer=collector)
    assert torch.equal(collector.values[0], inputs["input_ids"])
    assert torch.equal(torch.cat(collector.values[1:]), found[0, 12:])
    assert collector.has_ended
    assert len(collector.values) < 25, "accepted tokens come together"


def test_a_callable_streams_any_number_of_rows(llama: Any) -> None:
    inputs = prompts(12, 5, 9)
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD}
    found = ours(llama, inputs, spec_streamer=lambda row, ids: streamed[row].extend(ids), **options)
    assert all(len(ids) > 10 for ids in streamed.values())
    for row, ids in streamed.items():
        assert found[row, 12:].tolist() == [*ids, *[PAD] * (found.shape[1] - 12 - len(ids))]


def test_a_streamer_that_raises_leaves_nothing_behind(llama: Any) -> None:
    attention = llama.config._attn_implementation

    def stop(row: int, ids: list[int]) -> None:
        raise InterruptedError("the reader went away")

    with pytest.raises(InterruptedError):
        ours(llama, prompts(12, 5), max_new_tokens=24, do_sample=False, spec_streamer=stop, pad_token_id=PAD)
    assert not sessions(llama)[-1].has_unfinished_requests()
    assert llama.config._attn_implementation == attention
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD}
    assert torch.equal(ours(llama, prompts(12, 5), **options), llama.generate(**prompts(12, 5), **options))


# --- sessions ---------------------------------------------------------------------------------------------------


def test_sessions_are_kept_by_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD}
    ours(model, prompts(9), **options)
    (first,) = sessions(model)
    ours(model, prompts(9, 4), **options)
    assert sessions(model) == [first]
    ours(model, prompts(9), {**NGRAM, "num_speculative_tokens": 2}, **options)
    assert len(sessions(model)) == 2
    ours(model, prompts(*range(4, 14)), **options)
    assert first not in sessions(model), "more rows than it has"
    for number in range(3, 9):
        ours(model, prompts(9), {**NGRAM, "num_speculative_tokens": number}, **options)
    assert len(sessions(model)) == 4
    release(model)
    assert sessions(model) == []


def test_the_model_is_given_back_as_it_was() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = [type(module) for module in model.modules()]
    ours(model, prompts(12, 5), max_new_tokens=8, do_sample=False, pad_token_id=PAD)
    assert model.config._attn_implementation == "eager"
    assert all(module.training for module in model.modules())
    assert [type(module) for module in model.modules()] == modules
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert model(input_ids=torch.tensor([[1, 2]]), output_attentions=True).attentions is not None


def test_copies_of_the_model_begin_without_sessions() -> None:
    model = tiny_model("llama")
    options = {"max_new_tokens": 8, "do_sample": False}
    plain = ours(model, prompts(9), **options)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert sessions(twin) == []
        assert torch.equal(ours(twin, prompts(9), **options), plain)


def test_sessions_go_with_the_model() -> None:
    model = tiny_model("llama")
    ours(model, prompts(9), max_new_tokens=4, do_sample=False)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def in_threads(num: int, work: Callable[[int], None]) -> None:
    """Run ``work(number)`` in threads that change places as often as can be; raises what the first of them raised."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(num) as pool:
            for done in [pool.submit(work, number) for number in range(num)]:
                done.result(timeout=120)
    finally:
        sys.setswitchinterval(interval)


def test_threads_whose_batches_outgrow_the_session_wait_for_each_other() -> None:
    model, inputs = tiny_model("llama"), prompts(6)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(**inputs, **options)

    def work(number: int) -> None:
        for call in range(3):
            num_rows = (1, 9, 17)[(number + call) % 3]
            rows = {name: tensor.expand(num_rows, -1) for name, tensor in inputs.items()}
            assert torch.equal(ours(model, rows, **options), plain.expand(num_rows, -1))

    for _ in range(10):
        in_threads(4, work)
        release(model)


def test_threads_with_more_configurations_than_are_kept() -> None:
    model, inputs = tiny_model("llama"), prompts(6)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(**inputs, **options)

    def work(number: int) -> None:
        for call in range(9):
            spec = {**NGRAM, "num_speculative_tokens": 1 + (number + call) % 6}
            assert torch.equal(ours(model, inputs, spec, **options), plain)
            assert len(sessions(model)) <= 4

    in_threads(4, work)


@pytest.mark.parametrize("place", ["streamer", "criterion", "processor"])
@pytest.mark.parametrize("what", ["the same session", "another session", "release"])
def test_a_call_from_inside_a_call_is_refused(llama: Any, place: str, what: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    other = {**NGRAM, "num_speculative_tokens": 2} if what == "another session" else NGRAM

    def nested(*args: Any) -> Any:
        with pytest.raises(RequestError, match="busy with the call that this one is made from"):
            release(llama) if what == "release" else ours(llama, prompts(9), other, **options)
        told.append(place)
        return args[1] if place == "processor" else torch.tensor([False])

    keys: dict[str, Any] = {
        "streamer": {"spec_streamer": nested},
        "criterion": {"stopping_criteria": StoppingCriteriaList([nested])},
        "processor": {"logits_processor": LogitsProcessorList([nested])},  # type: ignore[list-item]
    }
    told: list[str] = []
    plain = llama.generate(**prompts(9), **options)
    assert torch.equal(ours(llama, prompts(9), **options, **keys[place]), plain)
    assert told


def test_a_call_on_another_model_from_inside_a_call(llama: Any) -> None:
    other = tiny_model("llama")
    texts: list[torch.Tensor] = []
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    plain = llama.generate(**prompts(9), **options)
    ours(llama, prompts(9), spec_streamer=lambda row, ids: texts.append(ours(other, prompts(9), **options)), **options)
    assert texts and all(torch.equal(text, plain) for text in texts)


def test_a_session_survives_a_call_that_cannot_be(llama: Any) -> None:
    options = {"max_new_tokens": 8, "do_sample": False}
    plain = ours(llama, prompts(9), **options)
    with pytest.raises(RequestError):
        ours(llama, prompts(9), num_beams=2, **options)
    assert torch.equal(ours(llama, prompts(9), **options), plain)


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 3}, "num_beams"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"max_new_tokens": 1000}, "max_new_tokens"),
        ({"encoder_repetition_penalty": 1.3}, "encoder_repetition_penalty"),
        ({"spec_engine": {"max_num_seqs": 3}}, "max_num_seqs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_B85_what_cannot_act_is_named(llama: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        ours(llama, prompts(9), **{"max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD} | options)


def test_several_faults_are_named_together(llama: Any) -> None:
    with pytest.raises(RequestError, match=r"cache_implementation.*guidance_scale"):
        ours(llama, prompts(9), max_new_tokens=4, guidance_scale=2.0, cache_implementation="static")


def test_padding_on_the_right_is_refused(llama: Any) -> None:
    inputs = prompts(9, 5)
    inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}
    with pytest.raises(RequestError, match="padding_side"):
        ours(llama, inputs, max_new_tokens=4, pad_token_id=PAD)


def test_input_without_a_token_is_refused(llama: Any) -> None:
    with pytest.raises(RequestError, match=r"input_ids \[1, 0\] holds no token"):
        ours(llama, {"input_ids": torch.zeros((1, 0), dtype=torch.long)}, max_new_tokens=4)


def test_a_filled_cache_and_embeddings_are_refused(llama: Any) -> None:
    inputs = prompts(9)
    filled = llama(**inputs, use_cache=True)
    name = "cache" if "cache" in filled else "past_key_values"
    longer = {"input_ids": torch.cat([inputs["input_ids"], torch.tensor([[4]])], dim=1)}
    with pytest.raises(RequestError, match="cache holds tokens"):
        ours(llama, longer, max_new_tokens=4, **{name: filled[name]})
    embeddings = llama.get_input_embeddings()(inputs["input_ids"])
    with pytest.raises(RequestError, match="inputs_embeds"):
        llama.generate(inputs_embeds=embeddings, custom_generate=generate, spec=NGRAM, max_new_tokens=4)


def test_spec_is_needed_and_checked(llama: Any) -> None:
    with pytest.raises(RequestError, match=r"spec=\{"):
        llama.generate(**prompts(9), custom_generate=generate, max_new_tokens=4)
    with pytest.raises(ConfigError, match="prompt_lookup_maxi"):
        ours(llama, prompts(9), {**NGRAM, "prompt_lookup_maxi": 3}, max_new_tokens=4)
    with pytest.raises(ModelError, match="alibi"):
        ours(tiny_model("bloom"), prompts(9), max_new_tokens=4)


@pytest.mark.parametrize("is_heterogeneous", [True, False])
def test_a_tokenizer_that_a_method_needs_is_asked_for_by_this_calls_name(
    llama: Any, tmp_path: Path, is_heterogeneous: bool
) -> None:
    texts = [f"<{number}>" for number in range(VOCAB_SIZE - 1)]
    tiny_model("llama", vocab_size=VOCAB_SIZE - 1).save_pretrained(tmp_path)
    toy_tokenizer(texts).save_pretrained(tmp_path)
    spec = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    spec["use_heterogeneous_vocab"] = is_heterogeneous
    with pytest.raises(
        ConfigError, match="this call has no tokenizer of the target; pass spec_tokenizer=tokenizer"
    ) as e:
        ours(llama, prompts(6), spec, max_new_tokens=3)
    assert "skip_tokenizer_init" not in str(e.value)
    ours(llama, prompts(6), spec, max_new_tokens=3, spec_tokenizer=toy_tokenizer([*texts, "more"]))


def test_a_streamer_takes_one_row(llama: Any) -> None:
    with pytest.raises(RequestError, match="takes one row"):
        ours(llama, prompts(9, 5), max_new_tokens=4, pad_token_id=PAD, spec_streamer=Collector())


def test_a_processor_that_raises_ends_the_call(llama: Any) -> None:
    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose")

    processors: Callable[..., Any] = LogitsProcessorList([broken])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="on purpose"):
        ours(llama, prompts(9), max_new_tokens=4, do_sample=False, logits_processor=processors)
    assert door.sessions(llama)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_real_model_writes_what_plain_generate_writes(method: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from specplug.demo.models import SMOLLM2, smollm2_path

    if not SMOLLM2.is_installed():
        pytest.skip(f"{SMOLLM2.name} is not installed: {SMOLLM2.install}")
    if method == "suffix":
        pytest.importorskip("specplug_suffix")
    folder = smollm2_path()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    code = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n"
    texts = [f"{code}\nThe same file again:\n\n{code[:14]}\n", "The history of the lighthouse begins with"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    found = ours(model, inputs, {"method": method, "num_speculative_tokens": 8}, **options)
    assert drafted(model) > 0
    assert torch.equal(found, model.generate(**inputs, **options))
