"""Pairs of ids: equal bytes, the lowest id of each side, and declared roles; rows B96 and B101."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from specplug.errors import ConfigError
from specplug.testing import toy_tokenizer
from specplug.tli import Vocabulary, VocabularyMap, match_vocabularies, open_space
from specplug.tli.space import SameVocabulary, TliDraftSpace

Names = tuple[str, str]
PAIRS: list[Names] = [
    (one, other)
    for one in ("bytes", "small bytes", "marked", "prefixed")
    for other in ("bytes", "small bytes", "marked", "prefixed")
    if one != other
]


def of(tokenizer: Any, num_ids: int | None = None, **settings: Any) -> Vocabulary:
    return Vocabulary(tokenizer, num_ids or len(tokenizer), **settings)


def pairs_of(shared: VocabularyMap) -> dict[int, int]:
    """Target id -> draft id."""
    (target_ids,) = np.nonzero(shared.target_to_draft_ids >= 0)
    return {int(each): int(shared.target_to_draft_ids[each]) for each in target_ids}


class Doubled:
    """Two ids for one string of bytes, which a mapping cannot hold; its spelling writes them apart."""

    added_tokens_decoder: dict[int, Any] = {}
    special_tokens_map: dict[str, str] = {}
    all_special_ids: list[int] = []
    tokens = ("A", "a", "b", "B")

    def __len__(self) -> int:
        return len(self.tokens)

    def get_vocab(self) -> dict[str, int]:
        return {token: token_id for token_id, token in reversed([*enumerate(self.tokens)])}

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.tokens.index(token)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).lower()


def by_brute_force(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """From the bytes of every single id."""

    def ids(side: Vocabulary) -> dict[bytes, int]:
        def is_byte(token_id: int) -> bool:
            return side.tokenizer.convert_ids_to_tokens(token_id).startswith("<0x")

        order = sorted(range(side.num_ids), key=lambda token_id: (is_byte(token_id), token_id), reverse=True)
        return {side.bytes_of(token_id): token_id for token_id in order if side.bytes_of(token_id)}

    of_draft = ids(draft)
    return {token_id: of_draft[data] for data, token_id in ids(target).items() if data in of_draft}


@pytest.mark.parametrize("names", PAIRS)
def test_equal_bytes_are_paired_whichever_side_is_larger(tokenizers: Any, names: Names) -> None:
    target, draft = (of(tokenizers[name]) for name in names)
    shared = match_vocabularies(target, draft)
    roles = dict(shared.roles.values())
    pairs = pairs_of(shared)
    assert {t: d for t, d in pairs.items() if roles.get(t) != d} == by_brute_force(target, draft)
    assert len(pairs) == shared.num_shared == len(set(pairs.values()))
    back = shared.draft_to_target_ids
    assert {int(back[d]): d for d in range(draft.num_ids) if back[d] >= 0} == pairs


def test_newlines_and_letters_beyond_ascii_are_shared(tokenizers: Any) -> None:
    """What comparing strings loses: only plain ASCII is spelled alike in both families."""
    target, draft = of(tokenizers["bytes"]), of(tokenizers["marked"])
    pairs = pairs_of(match_vocabularies(target, draft))
    shared = {target.bytes_of(token_id) for token_id in pairs}
    assert {b"\n", b" the", b"\xc3", b"\xa1"} <= shared


def test_of_equal_ids_the_one_that_is_written_is_taken(tokenizers: Any) -> None:
    """A byte token has a low id, and stands in only for what no other token covers; the rest is masked."""
    draft = of(tokenizers["marked"])
    as_text, as_byte = (tokenizers["marked"].convert_tokens_to_ids(token) for token in ("e", "<0x65>"))
    assert as_byte < as_text
    assert draft.bytes_of(as_text) == draft.bytes_of(as_byte) == b"e"
    for target in ("bytes", "small bytes"):  # one larger than the draft's vocabulary, one smaller
        shared = match_vocabularies(of(tokenizers[target]), draft)
        assert shared.draft_to_target_ids[as_text] >= 0
        assert shared.draft_to_target_ids[as_byte] == -1


def test_of_equal_ids_of_a_kind_the_lowest_is_taken() -> None:
    raw = of(Doubled())
    assert raw.ids == {b"a": 0, b"b": 2}
    assert raw.id_of(b"a") == 0


def test_special_tokens_are_paired_by_role_only(tokenizers: Any) -> None:
    """``<s>`` is the beginning to one side and may be text to the other; the end is the end, whatever it is called."""
    target, draft = tokenizers["bytes"], tokenizers["small bytes"]
    shared = match_vocabularies(of(target), of(draft))
    assert dict(shared.roles) == {
        "eos": (target.eos_token_id, draft.eos_token_id),
        "bos": (target.bos_token_id, draft.bos_token_id),
    }
    assert pairs_of(shared)[target.eos_token_id] == draft.eos_token_id


def test_the_string_of_a_special_token_is_text_elsewhere() -> None:
    """The target's token ``<s>`` is a plain one, the draft's is its end."""
    target = toy_tokenizer(["a", "<s>", "end"], eos_token_id=2)
    draft = toy_tokenizer(["<s>", "a"], eos_token_id=0)
    shared = match_vocabularies(of(target), of(draft))
    assert pairs_of(shared) == {0: 1, 2: 0}
    assert shared.num_by_bytes == 1


def test_the_models_own_end_counts_where_the_tokenizers_is_another(tokenizers: Any) -> None:
    target = of(tokenizers["bytes"], eos_token_ids={7, 9})
    assert target.roles["eos"] == 7
    assert of(tokenizers["bytes"], eos_token_ids={1, 0}).roles["eos"] == tokenizers["bytes"].eos_token_id


def test_an_unknown_token_is_no_counterpart(tokenizers: Any) -> None:
    assert "unk" not in of(tokenizers["marked"]).roles


def test_one_id_plays_one_role() -> None:
    tokenizer = toy_tokenizer(["a", "b", "end"], eos_token_id=2)
    tokenizer.pad_token = "end"
    other = toy_tokenizer(["end", "pad", "a"], eos_token_id=0)
    other.pad_token = "pad"
    assert dict(match_vocabularies(of(tokenizer), of(other)).roles) == {"eos": (2, 0)}


def test_added_tokens_that_are_text_are_compared_as_text(tokenizers: Any) -> None:
    import copy

    target = copy.deepcopy(tokenizers["marked"])
    target.add_tokens([AddedToken("the quick", special=False), AddedToken("<tool>", special=True)])
    draft = copy.deepcopy(tokenizers["bytes"])
    draft.add_tokens([AddedToken("the quick", special=False), AddedToken("<tool>", special=True)])
    shared = match_vocabularies(of(target), of(draft))
    text, tool = (target.convert_tokens_to_ids(token) for token in ("the quick", "<tool>"))
    assert shared.target_to_draft_ids[text] == draft.convert_tokens_to_ids("the quick")
    assert shared.target_to_draft_ids[tool] == -1


def test_ids_past_the_models_rows_are_left_out(tokenizers: Any) -> None:
    target, draft = tokenizers["bytes"], tokenizers["marked"]
    shared = match_vocabularies(of(target, 200), of(draft, 150))
    assert shared.target_to_draft_ids.shape == (200,)
    assert shared.draft_to_target_ids.shape == (150,)
    assert max(shared.draft_to_target_ids) < 200
    assert max(shared.target_to_draft_ids) < 150


# --- B96, B101: the space that is opened ------------------------------------------------------------------------


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(64, 62), (62, 64)])
def test_B96_equal_tokenizers_with_padding_share_all_ids(side: Any, target_rows: int, draft_rows: int) -> None:
    tokenizer = toy_tokenizer([chr(65 + number) for number in range(60)])
    space = open_space(side(tokenizer, target_rows), side(tokenizer, draft_rows))
    assert isinstance(space, SameVocabulary)
    assert space.num_ids == 60


def test_B101_vocabularies_without_a_shared_token_are_refused(side: Any) -> None:
    target, draft = toy_tokenizer(["a", "b"], eos_token_id=None), toy_tokenizer(["c", "d"], eos_token_id=None)
    with pytest.raises(ValueError, match=r"no token of the draft's vocabulary \(2 tokens, text\).*another draft model"):
        open_space(side(target), side(draft))


def test_B101_an_end_alone_is_nothing_to_draft_with(side: Any) -> None:
    target, draft = toy_tokenizer(["a", "b"], eos_token_id=1), toy_tokenizer(["c", "d"], eos_token_id=0)
    with pytest.raises(ConfigError, match="no token of the draft's vocabulary"):
        open_space(side(target), side(draft))


def test_B101_a_tiny_intersection_warns_with_its_size(side: Any, caplog: pytest.LogCaptureFixture) -> None:
    target = toy_tokenizer(["a", "b"], eos_token_id=None)
    draft = toy_tokenizer(["a", *(chr(200 + number) for number in range(39))], eos_token_id=None)
    with caplog.at_level(logging.INFO, "specplug"):
        assert isinstance(open_space(side(target), side(draft)), TliDraftSpace)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "1 tokens are shared, 2.5 % of the draft's and 50.0 % of the target's; few drafts" in record.getMessage()


def test_a_good_intersection_is_no_warning(side: Any, tokenizers: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "specplug"):
        open_space(side(tokenizers["bytes"]), side(tokenizers["marked"]))
    assert [record.levelname for record in caplog.records] == ["INFO"]


# --- tokenizers that cannot serve -------------------------------------------------------------------------------


def test_a_missing_tokenizer_is_named(side: Any, tokenizers: Any) -> None:
    good = side(tokenizers["bytes"])
    none = side(None, 300)
    with pytest.raises(ConfigError, match="the draft model has none; put its tokenizer files beside its weights"):
        open_space(good, none)
    with pytest.raises(ConfigError, match="the target has no tokenizer; give it with tokenizer="):
        open_space(none, good)


def test_an_object_that_is_no_tokenizer_is_named(side: Any, tokenizers: Any) -> None:
    class Odd:
        def __len__(self) -> int:
            return 5

    with pytest.raises(ConfigError, match=r"the draft model's tokenizer, Odd, does not tell its vocabulary"):
        open_space(side(tokenizers["bytes"]), side(Odd()))


class Slow:
    """A tokenizer as transformers' Python ones are: no offsets."""

    is_fast = False

    def __init__(self, fast: PreTrainedTokenizerBase) -> None:
        self._fast = fast

    def __len__(self) -> int:
        return len(self._fast)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)


def test_a_slow_tokenizer_serves_as_target_not_as_draft(side: Any, tokenizers: Any) -> None:
    slow, fast = Slow(tokenizers["marked"]), tokenizers["bytes"]
    space = open_space(side(slow), side(fast))
    assert isinstance(space, TliDraftSpace)
    assert pairs_of(space.shared) == pairs_of(match_vocabularies(of(tokenizers["marked"]), of(fast)))
    with pytest.raises(ConfigError, match=r"tokenizer, Slow, does not tell where its tokens lie.*tokenizer.json"):
        open_space(side(fast), side(slow))


@pytest.mark.slow
def test_gemma3_and_smollm2_share_46145_tokens_by_bytes(real_tokenizers: Callable[[], dict[str, Any]]) -> None:
    found = real_tokenizers()
    sizes = {"smollm2": 49152, "gemma3": 262144}
    for target, draft in (("gemma3", "smollm2"), ("smollm2", "gemma3")):
        shared = match_vocabularies(of(found[target], sizes[target]), of(found[draft], sizes[draft]))
        assert (shared.num_by_bytes, sorted(shared.roles)) == (46145, ["bos", "eos"])
