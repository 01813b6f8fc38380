"""No malformed draft reaches the target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specplug.errors import PluginFaultError
from specplug.hooks import SessionHooks, hookimpl
from specplug.types import Batch, Dense, Draft, Indirect, LawSpan, OneHot, SourceSpan, Unknown

MakeBatch = Callable[[int], Batch]
MakeHooks = Callable[..., SessionHooks]
VOCAB_SIZE = 64


class Fixed:
    def __init__(self, draft: Any) -> None:
        self._draft = draft

    @hookimpl
    def specplug_propose(self) -> Any:
        return self._draft


def draft(ids: Any, counts: Any, *laws: Any, **more: Any) -> Draft:
    tensor = ids if isinstance(ids, torch.Tensor) else torch.tensor(ids, dtype=torch.int64)
    spans = laws or (LawSpan(0, len(tensor), OneHot()),)
    return Draft(tensor, counts, spans, **more)


def law_logits(num_slots: int, width: int = VOCAB_SIZE, **values: float) -> torch.Tensor:
    logits = torch.zeros(num_slots, width)
    logits[:, 0] = float("-inf")  # masked entries are fine
    for name, value in values.items():
        logits[int(name.removeprefix("slot"))] = value
    return logits


def indirect(num_slots: int, **change: Any) -> Indirect:
    logits = law_logits(num_slots, width=8)
    parts = {
        "draft_logits": logits,
        "logsumexp": logits.logsumexp(-1),
        "target_to_draft_ids": torch.zeros(VOCAB_SIZE, dtype=torch.int64),
    }
    return Indirect(**{**parts, **change})


GOOD = [
    draft([1, 2, 63], (2, 1)),
    draft([1, 2, 63], [2, 1]),
    draft(torch.tensor([1, 2, 0], dtype=torch.int32), (2, 1)),
    draft([1, 2, 3], (2, 1), LawSpan(0, 1, Unknown()), LawSpan(1, 3, Dense(law_logits(2)))),
    draft([1, 2, 3], (2, 1), LawSpan(0, 3, indirect(3))),
    draft([1, 2, 3], (2, 1), confidence=torch.ones(3)),
    draft([1, 2, 3], (2, 1), sources=(SourceSpan(0, 1, "x"), SourceSpan(1, 3, "y"))),
    *(draft(torch.tensor([1, 2, 0], dtype=dtype), (2, 1)) for dtype in (torch.uint8, torch.int16, torch.uint16)),
    Draft(torch.tensor([]), (0, 0), ()),
    Draft(torch.zeros(0, 3, device="meta"), (0, 0), ()),
    draft([1, 2, 3], (2, 1), LawSpan(0, 3, indirect(3, target_to_draft_ids=torch.tensor([-1, 7] * 32)))),
    Draft.empty(2),
]


@pytest.mark.parametrize("good", GOOD)
def test_good_drafts_pass(make_hooks: MakeHooks, make_batch: MakeBatch, good: Draft) -> None:
    found = make_hooks(Fixed(good), strict=True).propose(make_batch(2), [2, 2])
    assert found is not None
    assert found.draft_token_ids.dtype == torch.int64
    assert not good.num_slots or found.draft_token_ids.tolist() == good.draft_token_ids.tolist()
    assert found.num_draft_tokens == tuple(good.num_draft_tokens)
    assert found.laws == good.laws
    if good.num_slots:
        assert found.sources == (good.sources or (SourceSpan(0, good.num_slots, "a"),))


NAN, INF = float("nan"), float("inf")
BAD = {
    "a list": ([[1], [2]], "type"),
    "a tensor": (torch.tensor([1, 2]), "type"),
    "a number": (3.5, "type"),
    "float ids": (draft(torch.tensor([1.0, 2.0, 3.0]), (2, 1)), "type"),
    "bool ids": (draft(torch.tensor([True, False, True]), (2, 1)), "type"),
    "ids in a list": (Draft([1, 2, 3], (2, 1), (LawSpan(0, 3, OneHot()),)), "type"),  # type: ignore[arg-type]
    "too few rows": (draft([1, 2], (2,)), "rows"),
    "too many rows": (draft([1, 2, 3], (1, 1, 1)), "rows"),
    "no counts": (draft([1], None), "rows"),
    "a negative count": (draft([1], (2, -1)), "rows"),
    "tensor counts": (draft([1, 2], tuple(torch.tensor([1, 1]))), "rows"),
    "float counts": (draft([1, 2], (1.0, 1.0)), "rows"),
    "counts above ids": (draft([1, 2], (2, 1)), "count"),
    "counts below ids": (draft([1, 2, 3], (1, 1)), "count"),
    "two dimensions": (draft(torch.zeros(2, 1, dtype=torch.int64), (1, 1)), "count"),
    "id of the vocabulary's size": (draft([1, 2, 64], (2, 1)), "out_of_range"),
    "a negative id": (draft([-1, 2, 3], (2, 1)), "out_of_range"),
    "no laws": (Draft(torch.tensor([1, 2]), (1, 1), ()), "laws"),
    "laws that end early": (draft([1, 2, 3], (2, 1), LawSpan(0, 2, OneHot())), "laws"),
    "laws with a gap": (draft([1, 2, 3], (2, 1), LawSpan(0, 1, OneHot()), LawSpan(2, 3, OneHot())), "laws"),
    "laws that overlap": (draft([1, 2, 3], (2, 1), LawSpan(0, 2, OneHot()), LawSpan(1, 3, OneHot())), "laws"),
    "a law that is a class": (draft([1, 2, 3], (2, 1), LawSpan(0, 3, OneHot)), "laws"),  # type: ignore[arg-type]
    "dense rows missing": (draft([1, 2, 3], (2, 1), LawSpan(0, 3, Dense(law_logits(2)))), "laws"),
    "dense over another vocabulary": (draft([1, 2], (1, 1), LawSpan(0, 2, Dense(law_logits(2, width=8)))), "laws"),
    "indirect without lse": (draft([1, 2], (1, 1), LawSpan(0, 2, indirect(2, logsumexp=torch.zeros(1)))), "laws"),
    "indirect map too short": (
        draft([1, 2], (1, 1), LawSpan(0, 2, indirect(2, target_to_draft_ids=torch.zeros(8)))),
        "laws",
    ),
    "a float map": (
        draft([1, 2], (1, 1), LawSpan(0, 2, indirect(2, target_to_draft_ids=torch.zeros(VOCAB_SIZE)))),
        "laws",
    ),
    "a map past the draft vocabulary": (
        draft([1, 2], (1, 1), LawSpan(0, 2, indirect(2, target_to_draft_ids=torch.tensor([0, 8] * 32)))),
        "laws",
    ),
    "a map below -1": (
        draft([1, 2], (1, 1), LawSpan(0, 2, indirect(2, target_to_draft_ids=torch.tensor([0, -2] * 32)))),
        "laws",
    ),
    "whole numbers as a law": (
        draft([1, 2], (1, 1), LawSpan(0, 2, Dense(torch.zeros(2, VOCAB_SIZE, dtype=torch.int64)))),
        "laws",
    ),
    "a span of floats": (draft([1, 2], (1, 1), LawSpan(0.0, 2.0, OneHot())), "malformed"),  # type: ignore[arg-type]
    "a source without a name": (
        draft([1, 2], (1, 1), sources=(SourceSpan(0, 2, None),)),  # type: ignore[arg-type]
        "sources",
    ),
    "a NaN law": (draft([1, 2], (1, 1), LawSpan(0, 2, Dense(law_logits(2, slot1=NAN)))), "law_nan"),
    "an infinite law": (draft([1, 2], (1, 1), LawSpan(0, 2, Dense(law_logits(2, slot1=INF)))), "law_nan"),
    "a law without mass": (draft([1, 2], (1, 1), LawSpan(0, 2, Dense(law_logits(2, slot0=-INF)))), "law_nan"),
    "a NaN lse": (draft([1, 2], (1, 1), LawSpan(0, 2, indirect(2, logsumexp=torch.tensor([0.0, NAN])))), "law_nan"),
    "parents out of order": (draft([1, 2], (2, 0), parents=(1, -1)), "parents"),
    "parents in a cycle": (draft([1, 2, 3], (1, 2), parents=(-1, 1, 0)), "parents"),
    "a node that is its own parent": (draft([1, 2], (2, 0), parents=(-1, 1)), "parents"),
    "a parent in another row": (draft([1, 2], (1, 1), parents=(-1, 0)), "parents"),
    "a parent below the root": (draft([1, 2], (2, 0), parents=(-1, -2)), "parents"),
    "too few parents": (draft([1, 2], (2, 0), parents=(-1,)), "parents"),
    "float parents": (draft([1, 2], (2, 0), parents=(-1.0, 0.0)), "parents"),
    "parents in a tensor": (draft([1, 2], (2, 0), parents=torch.tensor([-1, 0])), "parents"),
    "confidence missing": (draft([1, 2], (1, 1), confidence=torch.ones(1)), "confidence"),
    "sources that end early": (draft([1, 2], (1, 1), sources=(SourceSpan(0, 1, "x"),)), "sources"),
    "laws that are no spans": (Draft(torch.tensor([1, 2]), (1, 1), (OneHot(),)), "malformed"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("bad", "what"), BAD.values(), ids=list(BAD))
def test_bad_drafts_are_dropped_and_the_next_is_asked(
    make_hooks: MakeHooks, make_batch: MakeBatch, caplog: pytest.LogCaptureFixture, bad: Any, what: str
) -> None:
    hooks, batch = make_hooks(Fixed(bad), Fixed(draft([7, 8], (1, 1)))), make_batch(2)
    for _ in range(2):
        found = hooks.propose(batch, [2, 2])
        assert found is not None
        assert found.draft_token_ids.tolist() == [7, 8]
    assert hooks.take_faults() == {f"propose_{what}:a": 2}
    assert len(caplog.records) == 1
    assert hooks.names == ("a", "b")
    alone = make_hooks(Fixed(bad))
    assert alone.propose(batch, [2, 2]) is None
    with pytest.raises(PluginFaultError, match='plugin "a"'):
        make_hooks(Fixed(bad), strict=True).propose(batch, [2, 2])


def test_B104_an_id_of_the_vocabularys_size_names_plugin_request_and_id(
    make_hooks: MakeHooks, make_batch: MakeBatch, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = make_hooks(Fixed(draft([1, 2, 3, 64], (2, 2))))
    assert hooks.propose(make_batch(2), [2, 2]) is None
    message = caplog.records[0].getMessage()
    for part in ('plugin "a"', 'proposed id 64 for request "r1"', "from 0 to 63"):
        assert part in message


def test_B152_six_ids_with_three_allowed_are_cut_with_one_warning(
    make_hooks: MakeHooks, make_batch: MakeBatch, caplog: pytest.LogCaptureFixture
) -> None:
    long = Draft.from_lists([[1, 2, 3, 4, 5, 6], [7]])
    hooks, batch = make_hooks(Fixed(long)), make_batch(2)
    for _ in range(3):
        found = hooks.propose(batch, [3, 3])
        assert found is not None
        assert (found.draft_token_ids.tolist(), found.num_draft_tokens) == ([1, 2, 3, 7], (3, 1))
        assert found.sources == (SourceSpan(0, 4, "a"),)
    assert hooks.take_faults() == {"propose_too_long:a": 3}
    assert len(caplog.records) == 1
    assert 'proposed 6 tokens for request "r0", whose limit is 3' in caplog.records[0].getMessage()
    assert long.num_draft_tokens == (6, 1)


def test_B152_two_lists_for_three_rows(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    hooks = make_hooks(Fixed(Draft.from_lists([[1], [2]])))
    assert hooks.propose(make_batch(3), [2, 2, 2]) is None
    assert hooks.take_faults() == {"propose_rows:a": 1}


def test_a_good_tree_passes_and_a_chain_given_as_a_tree_is_a_chain(
    make_hooks: MakeHooks, make_batch: MakeBatch
) -> None:
    tree = Draft.from_trees([[1, 2, 3], [4]], [[-1, -1, 0], [-1]])
    found = make_hooks(Fixed(tree), strict=True).propose(make_batch(2), [3, 1])
    assert found is not None
    assert found.parents == (-1, -1, 0, -1)
    chain = Draft.from_trees([[1, 2, 3], [4]], [[-1, 0, 1], [-1]])
    found = make_hooks(Fixed(chain), strict=True).propose(make_batch(2), [3, 1])
    assert found is not None
    assert found.parents is None
    nothing = make_hooks(Fixed(Draft.from_trees([[], []], [[], []])), strict=True).propose(make_batch(2), [3, 1])
    assert nothing is not None
    assert (nothing.num_slots, nothing.parents) == (0, None)


def test_parents_out_of_order_name_plugin_request_and_node(
    make_hooks: MakeHooks, make_batch: MakeBatch, caplog: pytest.LogCaptureFixture
) -> None:
    cyclic = Draft.from_trees([[1], [2, 3, 4]], [[-1], [-1, 2, 1]])
    assert make_hooks(Fixed(cyclic)).propose(make_batch(2), [3, 3]) is None
    message = caplog.records[0].getMessage()
    for part in ('plugin "a"', 'node 1 of request "r1" has the parent 2', "an earlier node of its row, or -1"):
        assert part in message


def test_a_tree_with_too_many_nodes_or_too_deep_is_cut_and_counted(
    make_hooks: MakeHooks, make_batch: MakeBatch, caplog: pytest.LogCaptureFixture
) -> None:
    tree = Draft.from_trees([[1, 2, 3, 4, 5], [6]], [[-1, -1, 0, 2, 3], [-1]])
    hooks = make_hooks(Fixed(tree))
    found = hooks.propose(make_batch(2), [4, 1])
    assert found is not None
    assert (found.draft_token_ids.tolist(), found.parents) == ([1, 2, 3, 4, 6], (-1, -1, 0, 2, -1))
    assert hooks.take_faults() == {"propose_too_long:a": 1}
    found = hooks.propose(make_batch(2), [3, 1])
    assert found is not None
    assert (found.draft_token_ids.tolist(), found.parents) == ([1, 2, 3, 6], (-1, -1, 0, -1))
    assert hooks.take_faults() == {"propose_too_deep:a": 1}
    assert 'a tree of depth 4 for request "r0", whose limit is 3' in caplog.records[-1].getMessage()
    found = hooks.propose(make_batch(2), [1, 1])
    assert found is not None
    assert (found.draft_token_ids.tolist(), found.parents) == ([1, 6], None)


def test_a_row_with_limit_0_gets_none(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    found = make_hooks(Fixed(Draft.from_lists([[1, 2], [3]]))).propose(make_batch(2), [0, 1])
    assert found is not None
    assert (found.draft_token_ids.tolist(), found.num_draft_tokens) == ([3], (0, 1))


def test_a_draft_that_a_wrapper_makes_is_cut_too(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    class Extends:
        @hookimpl(wrapper=True)
        def specplug_propose(self, batch: Batch) -> Any:
            yield
            return Draft.from_lists([[9] * 5] * len(batch))

    found = make_hooks(Extends(), Fixed(Draft.from_lists([[1]]))).propose(make_batch(1), [2])
    assert found is not None
    assert (found.draft_token_ids.tolist(), found.sources) == ([9, 9], (SourceSpan(0, 2, "a"),))


def test_a_law_over_a_long_draft_follows_the_cut(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    logits = torch.arange(4.0)[:, None].expand(4, VOCAB_SIZE)
    found = make_hooks(Fixed(draft([1, 2, 3, 4], (3, 1), LawSpan(0, 4, Dense(logits))))).propose(make_batch(2), [1, 1])
    assert found is not None
    law = found.laws[0].law
    assert isinstance(law, Dense)
    assert law.draft_logits[:, 0].tolist() == [0.0, 3.0]


def test_off_the_cpu_nothing_is_read_and_nothing_bad_is_kept(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    """The meta device has no values: any read would raise."""
    ids = torch.zeros(2, dtype=torch.int64, device="meta")
    laws = (LawSpan(0, 2, Dense(torch.zeros(2, VOCAB_SIZE, device="meta"))),)
    found = make_hooks(Fixed(Draft(ids, (1, 1), laws)), strict=True).propose(make_batch(2), [1, 1])
    assert found is not None
    assert found.draft_token_ids.device.type == "meta"
    assert found.draft_token_ids is not ids


@pytest.mark.parametrize("part", ["ids", "law", "map"])
def test_a_device_that_is_not_the_targets_is_refused(make_hooks: MakeHooks, make_batch: MakeBatch, part: str) -> None:
    ids, law = torch.zeros(2, dtype=torch.int64), indirect(2)
    if part == "ids":
        ids = ids.to("meta")
    elif part == "law":
        law = indirect(2, draft_logits=law.draft_logits.to("meta"))
    else:
        law = indirect(2, target_to_draft_ids=law.target_to_draft_ids.to("meta"))
    hooks = make_hooks(Fixed(Draft(ids, (1, 1), (LawSpan(0, 2, law),))), device="cpu")
    assert hooks.propose(make_batch(2), [1, 1]) is None
    assert hooks.take_faults() == {"propose_device:a": 1}


def test_a_map_is_read_once(make_hooks: MakeHooks, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    aminmax = torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda tensor: reads.append(len(tensor)) or aminmax(tensor))
    hooks = make_hooks(Fixed(draft([1, 2], (1, 1), LawSpan(0, 2, indirect(2)))), strict=True)
    for _ in range(3):
        hooks.propose(make_batch(2), [1, 1])
    assert reads.count(VOCAB_SIZE) == 1


def test_the_limits_cannot_be_raised_by_a_proposer(make_hooks: MakeHooks, make_batch: MakeBatch) -> None:
    class Greedy:
        @hookimpl
        def specplug_propose(self, limits: Any) -> Draft:
            with pytest.raises(TypeError):
                limits[0] = 9
            return Draft.from_lists([[1] * 9])

    limits = [2]
    found = make_hooks(Greedy()).propose(make_batch(1), limits)
    assert found is not None
    assert (found.num_draft_tokens, limits) == ((2,), [2])
