"""The draft's context: the re-encoded text, kept up to date at its end; rows B97 and B100."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from specplug.testing import toy_tokenizer
from specplug.tli import Vocabulary, open_space
from specplug.tli import context as context_module
from specplug.tli.context import DraftEncoder, RequestText, TargetText
from specplug.types import TokenIds

NAMES = ["bytes", "small bytes", "marked", "prefixed"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the other dog sleeps on. " * 3,
    "def add(first, second):\n    return first + second\n\n\nprint(add(1, 2))\n" * 3,
    "東京は日本の首都です。" * 12,
    "Größe naïve ¡Hola! 🎉🎊 “quotes” ©" * 4,
    "aaaaaaaaaaaaaaaaaaaa" * 8,
    "1234567890" * 12,
    " " * 90 + "\n" * 40 + "x",
    "the<s><bos></s><|end|>the" * 6,
]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    return ids


def token_ids(ids: Sequence[int]) -> TokenIds:
    return TokenIds(np.array(ids, dtype=np.int32))


@pytest.fixture
def follow(vocabulary: Callable[[str], Vocabulary]) -> Callable[[str, str], RequestText]:
    return lambda target, draft: RequestText(TargetText(vocabulary(target)), DraftEncoder(vocabulary(draft)))


def pieces(ids: Sequence[int], seed: int, most: int = 5) -> Iterator[list[int]]:
    """The ids as they grow by steps of a decoding loop."""
    rng, length = random.Random(seed), 0
    while length < len(ids):
        length = min(len(ids), length + rng.randint(1, most))
        yield list(ids[:length])


def step(text: RequestText, ids: Sequence[int], last: list[int]) -> list[int]:
    """One update; what it says about the last answer must be true, and no less than the truth."""
    context = text.update(ids)
    now = list(context.token_ids)
    assert last[: context.num_unchanged] == now[: context.num_unchanged]
    if context.num_unchanged < min(len(last), len(now)):
        assert last[context.num_unchanged] != now[context.num_unchanged]
    return now


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("target", "draft"), [(t, d) for t in NAMES for d in NAMES if t != d])
def test_growing_by_steps_gives_what_encoding_the_whole_gives(
    follow: Callable[[str, str], RequestText], tokenizers: Any, target: str, draft: str, text: str
) -> None:
    for seed in range(3):
        request, now = follow(target, draft), []
        for ids in pieces(ids_of(tokenizers[target], text), seed):
            now = step(request, ids, now)
        prefix = [tokenizers[draft].bos_token_id] if draft in ("marked", "prefixed") else []
        assert now == prefix + ids_of(tokenizers[draft], text)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.text(max_size=60), st.integers(0, 9), st.sampled_from([(t, d) for t in NAMES for d in NAMES if t != d]))
def test_any_text_in_any_pieces(
    follow: Callable[[str, str], RequestText], tokenizers: Any, text: str, seed: int, names: tuple[str, str]
) -> None:
    """At every step but those inside a character the context is the encoding of the text so far."""
    target, draft = names
    request, now = follow(target, draft), []
    spelled = TargetText(Vocabulary(tokenizers[target], len(tokenizers[target])))
    prefix = [tokenizers[draft].bos_token_id] if draft in ("marked", "prefixed") else []
    for ids in pieces(ids_of(tokenizers[target], text), seed):
        now = step(request, ids, now)
        data = spelled.read(ids).removeprefix(b" " if spelled.drops_first_space else b"")
        try:
            so_far = data.decode()
        except UnicodeDecodeError:
            continue
        assert now == prefix + ids_of(tokenizers[draft], so_far)


def test_what_a_step_costs_does_not_grow_with_the_text(
    follow: Callable[[str, str], RequestText], tokenizers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = DraftEncoder.encode

    def counting(self: DraftEncoder, text: str) -> Any:
        encoded.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(DraftEncoder, "encode", counting)
    text = (TEXTS[0] + TEXTS[1] + TEXTS[3]) * 12
    ids = ids_of(tokenizers["bytes"], text)
    request, now = follow("bytes", "marked"), []
    costs = []
    for piece in pieces(ids, 0):
        encoded.clear()
        now = step(request, piece, now)
        costs.append(sum(encoded))
    assert now[1:] == ids_of(tokenizers["marked"], text)
    assert len(costs) > 900
    assert max(costs[500:]) < 400
    assert sum(costs[-100:]) < 2 * sum(costs[100:200])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("target", "draft"), [("bytes", "marked"), ("marked", "bytes"), ("bytes", "prefixed")])
def test_a_text_of_which_little_is_kept(
    follow: Callable[[str, str], RequestText],
    tokenizers: Any,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    draft: str,
    text: str,
) -> None:
    """Where windows do not agree and none can be wider, the last one stands: the text is still the text."""
    monkeypatch.setattr(context_module, "_KEPT_CHARS", 6)
    request, now = follow(target, draft), []
    for ids in pieces(ids_of(tokenizers[target], text), 0, most=3):
        now = step(request, ids, now)
    spelled = Vocabulary(tokenizers[draft], len(tokenizers[draft]))
    assert b"".join(map(spelled.bytes_of, now)).replace(b" ", b"") == text.encode().replace(b" ", b"")


def test_long_stretches_that_the_draft_cannot_write(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_module, "_KEPT_CHARS", 6)
    target, draft = toy_tokenizer(["a", "b"], eos_token_id=None), toy_tokenizer(["a", "c"], eos_token_id=None)
    space = open_space(side(target), side(draft))
    ids = [0] * 9 + [1] * 60 + [0] * 3
    for length in range(1, len(ids) + 1):
        context = space.context("r", token_ids(ids[:length]))
    assert context.token_ids == [0] * 12


def test_a_character_that_is_not_complete_is_given_as_bytes(
    follow: Callable[[str, str], RequestText], tokenizers: Any
) -> None:
    draft = tokenizers["marked"]
    request = follow("bytes", "marked")
    ids = [tokenizers["bytes"].convert_tokens_to_ids(token) for token in ("the", "ð", "Ł", "İ", "ī")]
    byte_ids = draft.convert_tokens_to_ids(["<0xF0>", "<0x9F>", "<0x8E>", "<0x89>"])
    start = [draft.bos_token_id, *ids_of(draft, "the")]
    assert request.update(ids[:1]).token_ids == start
    for count in (1, 2, 3):
        context = request.update(ids[: 1 + count])
        assert context.token_ids == start + byte_ids[:count]
        assert context.num_unchanged == len(start) + count - 1
    assert request.update(ids).token_ids == [draft.bos_token_id, *ids_of(draft, "the🎉")]


def test_bytes_that_are_no_text_do_not_stop_the_context(
    follow: Callable[[str, str], RequestText], tokenizers: Any
) -> None:
    ids = [tokenizers["bytes"].convert_tokens_to_ids(token) for token in ("ð", "the", "ÿ", "the", "ð")]
    request, now = follow("bytes", "marked"), []
    for length in range(1, len(ids) + 1):
        now = step(request, ids[:length], now)
    draft = tokenizers["marked"]
    assert now == [draft.bos_token_id, *ids_of(draft, "\ufffdthe\ufffdthe"), draft.convert_tokens_to_ids("<0xF0>")]


def test_special_tokens_of_the_target_are_no_text(follow: Callable[[str, str], RequestText], tokenizers: Any) -> None:
    target, draft = tokenizers["bytes"], tokenizers["marked"]
    ids = [target.bos_token_id, *ids_of(target, "the dog"), target.eos_token_id, target.bos_token_id]
    ids += [*ids_of(target, " sleeps"), len(target) + 2]
    context = follow("bytes", "marked").update(ids)
    assert context.token_ids == [draft.bos_token_id, *ids_of(draft, "the dog sleeps")]


def test_B97_at_most_one_beginning_over_many_rounds(follow: Callable[[str, str], RequestText], tokenizers: Any) -> None:
    target, draft = tokenizers["prefixed"], tokenizers["marked"]
    request, ids = follow("prefixed", "marked"), target("The quick").input_ids
    assert ids[0] == target.bos_token_id
    for _ in range(5):
        context = request.update(ids)
        assert context.token_ids.count(draft.bos_token_id) == 1
        assert context.token_ids[0] == draft.bos_token_id
        ids = ids + ids_of(tokenizers["prefixed"], "brown fox")
    assert follow("bytes", "small bytes").update(ids_of(tokenizers["bytes"], "the")).token_ids.count(0) == 0


def test_B97_a_text_of_other_lengths(follow: Callable[[str, str], RequestText], tokenizers: Any) -> None:
    """The draft needs more ids than the target for this text, and the other way round."""
    text = "The quick brown fox 東京"
    for target, draft in (("bytes", "marked"), ("marked", "bytes")):
        ids = ids_of(tokenizers[target], text)
        found = follow(target, draft).update(ids).token_ids
        assert len(found) != len(ids)
        assert tokenizers[draft].decode(found, skip_special_tokens=True) == text


def test_B100_a_target_token_that_the_draft_lacks_is_spelled_out(side: Any) -> None:
    """No unknown token, no end: the text of the token, in the draft's own tokens."""
    target = toy_tokenizer(["a", "zq", "end"], eos_token_id=2)
    draft = toy_tokenizer(["end", "z", "q", "a"], eos_token_id=0)
    space = open_space(side(target), side(draft))
    context = space.context("r", token_ids([0, 1, 1, 0]))
    assert context.token_ids == [3, 1, 2, 1, 2, 3]
    assert space.context("r", token_ids([0, 1, 1, 0, 2])).token_ids == [3, 1, 2, 1, 2, 3]


def test_characters_that_the_draft_cannot_write_are_left_out(side: Any) -> None:
    """Tokenizers raise for them, or write an unknown token."""
    target = toy_tokenizer(["a", "b", "c"], eos_token_id=None)
    draft = toy_tokenizer(["x", "c", "a", "?"], eos_token_id=None)
    assert open_space(side(target), side(draft)).context("r", token_ids([0, 1, 2, 0])).token_ids == [2, 1, 2]
    words = Tokenizer(WordLevel({"x": 0, "c": 1, "a": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = Split("", "isolated")
    words.decoder = Fuse()
    unknown = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    assert unknown("abca").input_ids == [2, 3, 1, 2]
    space = open_space(side(target), side(unknown))
    assert space.context("r", token_ids([0, 1])).token_ids == [2]
    assert space.context("r", token_ids([0, 1, 2, 0])).token_ids == [2, 1, 2]


def test_a_request_that_begins_again(side: Any, tokenizers: Any) -> None:
    """A text may come back shorter; what stands is still told. A forgotten request starts anew."""
    space = open_space(side(tokenizers["bytes"]), side(tokenizers["marked"]))
    ids = ids_of(tokenizers["bytes"], "The quick brown fox jumps")
    whole = list(space.context("r", token_ids(ids)).token_ids)
    again = space.context("r", token_ids(ids[:4]))
    assert again.num_unchanged > 0
    assert again.token_ids[: again.num_unchanged] == whole[: again.num_unchanged]
    assert space.context("r", token_ids(ids)).token_ids == whole
    assert space.context("r", token_ids(ids)).num_unchanged == len(whole)
    space.forget("r")
    space.forget("never there")
    assert space.context("r", token_ids(ids)).num_unchanged == 0


def test_an_empty_text_has_an_empty_context(side: Any, tokenizers: Any) -> None:
    space = open_space(side(tokenizers["marked"]), side(tokenizers["bytes"]))
    assert space.context("r", token_ids([tokenizers["marked"].bos_token_id])).token_ids == []
