"""The door for servers that show token ids only: who is who, what was accepted, and that nothing gets out."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
import pytest

from specplug.adapters.token_door import DoorTarget, TokenDoor
from specplug.adapters.tracking import MAX_STEPS_ABSENT, DoorRow
from specplug.errors import ConfigError
from specplug.hooks import ProcessManager
from specplug.hooks.markers import hookimpl
from specplug.methods import Capabilities, PluginContext
from specplug.proposers import RowProposer
from specplug.testing.proposers import FixedProposer, RandomProposer, as_method
from specplug.types import Draft, Request, RequestStep, StepOutcome, TokenIds

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
    "ngram_backoff": False,  # which looks at the whole batch
}
TARGET = DoorTarget(vocab_size=64, max_model_len=512, max_num_seqs=16)


@dataclass
class ServedRequest:
    """``script``: what plain decoding writes after ``prompt``."""

    name: str
    prompt: list[int]
    script: list[int]
    num_prefill_steps: int = 0
    """Steps in which it is shown before its first token."""
    num_done: int = 0
    drafts: list[tuple[int, int]] = field(default_factory=list)
    """(drafted, accepted) of every draft that was verified."""

    @property
    def text(self) -> list[int]:
        return self.prompt + self.script[: self.num_done]


class MiniServer:
    """Decodes scripted requests greedily, so that what it writes cannot depend on the drafts.

    ``tells``: whether it says how many tokens of a row are new. ``shuffle``: rows change places in every step.
    """

    def __init__(self, door: TokenDoor, *, tells: bool = True, shuffle: int | None = None) -> None:
        self.door = door
        self.running: list[ServedRequest] = []
        self.seen: list[list[int]] = []
        self._tells = tells
        self._random = None if shuffle is None else random.Random(shuffle)
        self._drafts: dict[str, list[int]] = {}

    def step(self) -> None:
        """One step of every running request; the finished ones leave after the door has seen their last tokens."""
        if self._random is not None:
            self._random.shuffle(self.running)
        rows = []
        for request in self.running:
            num_new = self._decode(request)
            text = np.asarray(request.text, dtype=np.int32)
            rows.append(DoorRow(text, num_new if self._tells else None))
        drafts = self.door.step(rows)
        self._drafts = {request.name: draft for request, draft in zip(self.running, drafts, strict=True)}
        self.seen.extend(drafts)
        self.running = [request for request in self.running if request.num_done < len(request.script)]

    def _decode(self, request: ServedRequest) -> int:
        if request.num_prefill_steps:
            request.num_prefill_steps -= 1
            return 0
        draft = self._drafts.get(request.name, [])
        following = request.script[request.num_done :]
        matching = takewhile(lambda pair: pair[0] == pair[1], zip(draft, following, strict=False))
        num_accepted = sum(1 for _ in matching)
        num_new = min(num_accepted + 1, len(following))
        if draft:
            request.drafts.append((len(draft), num_new - 1))
        request.num_done += num_new
        return num_new

    def run(self) -> None:
        while self.running:
            self.step()


def repetitive(name: str, *, seed: int, num_tokens: int = 60) -> ServedRequest:
    """A request whose output repeats a phrase of its own, so that copying drafts are accepted and now and then not."""
    source = random.Random(seed)
    phrase = [source.randrange(64) for _ in range(9)]
    script: list[int] = []
    while len(script) < num_tokens:
        script += [*phrase, source.randrange(64)]
    prompt = [source.randrange(64) for _ in range(5 + seed % 7)]
    return ServedRequest(name, [*prompt, *phrase], script[:num_tokens])


def open_door(spec: dict[str, Any] = NGRAM, **options: Any) -> TokenDoor:
    return TokenDoor("test", spec, options.pop("target", TARGET), **options)


def door_of(make: Callable[[PluginContext], object], *, num_speculative_tokens: int = 4, **options: Any) -> TokenDoor:
    """A door whose proposer ``make`` builds."""
    manager = ProcessManager()
    manager.register(as_method("mine", make, capabilities=options.pop("capabilities", None)))
    spec = {"method": "mine", "num_speculative_tokens": num_speculative_tokens}
    return open_door(spec, manager=manager, **options)


def row(token_ids: Sequence[int], num_new: int | None = None, **rest: Any) -> DoorRow:
    return DoorRow(np.asarray(token_ids, dtype=np.int32), num_new, **rest)


class Watcher:
    """Takes down what the hooks tell."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.finished: list[str] = []
        self.read: dict[str, list[int]] = {}
        self.steps: list[RequestStep] = []

    @hookimpl
    def specplug_start_request(self, request: Request) -> None:
        self.started.append(request.request_id)
        self.read[request.request_id] = []

    @hookimpl
    def specplug_finish_request(self, request: Request) -> None:
        self.finished.append(request.request_id)

    @hookimpl
    def specplug_advance(self, batch: Any) -> None:
        for request_id, text, new in zip(batch.request_ids, batch.token_ids, batch.new_token_ids, strict=True):
            self.read[request_id] += new
            assert self.read[request_id] == text[:-1], "what was read is the text without its newest token"

    @hookimpl
    def specplug_propose(self, batch: Any) -> None:
        return None

    @hookimpl
    def specplug_accept_metrics(self, outcome: StepOutcome) -> None:
        self.steps += outcome.rows


# --- who is who -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("shuffle", [None, 1, 2])
def test_requests_are_followed_across_row_changes(tells: bool, shuffle: int | None) -> None:
    door = open_door(strict=True)
    server = MiniServer(door, tells=tells, shuffle=shuffle)
    alone = []
    for seed in range(8):
        one = open_door(strict=True)
        request = repetitive(f"r{seed}", seed=seed, num_tokens=40 + seed)
        solo = MiniServer(one, tells=tells)
        solo.running = [repetitive(f"r{seed}", seed=seed, num_tokens=40 + seed)]
        kept = solo.running[0]
        solo.run()
        alone.append(kept.drafts)
        server.running.append(request)
    together = list(server.running)
    server.run()
    assert [request.drafts for request in together] == alone, "a request is drafted for as if it were alone"
    assert sum(accepted for drafts in alone for _, accepted in drafts) > 100, "the test must have something to lose"


def test_every_request_is_started_once_and_read_completely() -> None:
    watcher = Watcher()
    door = door_of(lambda context: watcher, strict=True)
    server = MiniServer(door, shuffle=3)
    server.running = [repetitive(f"r{seed}", seed=seed, num_tokens=20 + 3 * seed) for seed in range(6)]
    for request in server.running[::2]:
        request.num_prefill_steps = 3
    texts = {tuple(request.prompt + request.script)[:-1] for request in server.running}
    server.run()
    assert len(watcher.started) == 6
    assert {tuple(read) for read in watcher.read.values()} == texts
    door.close()
    assert sorted(watcher.finished) == sorted(watcher.started)
    assert door.num_requests == 0


def test_the_prompt_is_what_came_before_the_first_token() -> None:
    prompts: list[list[int]] = []

    class Prompts(Watcher):
        @hookimpl
        def specplug_start_request(self, request: Request) -> None:
            prompts.append(request.prompt_token_ids.tolist())
            super().specplug_start_request(request)

    door = door_of(lambda context: Prompts(), strict=True)
    door.step([row([1, 2, 3], 0), row([4, 5, 6, 7], 1), row([8, 9])])
    assert prompts == [[1, 2, 3], [4, 5, 6], [8]]


def test_equal_texts_are_two_requests() -> None:
    watcher = Watcher()
    door = door_of(lambda context: watcher, strict=True)
    door.step([row([1, 2, 3, 4], 1), row([1, 2, 3, 4], 1)])
    door.step([row([1, 2, 3, 4, 5], 1), row([1, 2, 3, 4, 6], 1)])
    assert len(watcher.started) == 2
    door.step([row([1, 2, 3, 4, 6, 8], 1), row([1, 2, 3, 4, 5, 7], 1)])
    assert len(watcher.started) == 2
    assert sorted(watcher.read.values()) == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]


@pytest.mark.parametrize("second", [[1, 2, 3, 4], [1, 9, 3, 4, 5], [7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
def test_a_text_that_does_not_go_on_is_a_new_request(second: list[int]) -> None:
    """Also one that goes on by more than a draft and a token: a chat's next turn."""
    watcher = Watcher()
    door = door_of(lambda context: watcher, strict=True)
    door.step([row([1, 2, 3, 4])])
    door.step([row(second)])
    assert len(watcher.started) == 2


def test_a_row_that_goes_on_with_other_tokens_than_its_draft_is_a_new_request() -> None:
    """Where the server tells nothing, every draft was verified: what follows is a prefix of it and one token."""
    started: list[str] = []

    class Fixed(FixedProposer):
        @hookimpl
        def specplug_start_request(self, request: Request) -> None:
            started.append(request.request_id)

    door = door_of(lambda context: Fixed([[5, 6], [5, 6]]), strict=True)
    assert door.step([row([1, 2])]) == [[5, 6]]
    assert door.step([row([1, 2, 5, 9])]) == [[5, 6]]
    assert len(started) == 1
    door.step([row([1, 2, 5, 9, 8, 9])])
    assert len(started) == 2


def test_a_request_that_was_not_shown_for_a_while_goes_on() -> None:
    watcher = Watcher()
    door = door_of(lambda context: watcher, strict=True)
    door.step([row([1, 2, 3], 1), row([4, 5, 6], 1)])
    door.step([row([4, 5, 6, 7], 1)])
    door.step([row([4, 5, 6, 7, 8], 1), row([1, 2, 3, 4, 5, 6], 2)], after_a_gap=True)
    assert len(watcher.started) == 2
    assert watcher.read["0"] == [1, 2, 3, 4, 5]


def test_the_next_turn_of_a_chat_is_a_new_request() -> None:
    """Its text begins with that of the turn before, of which it is no part: prompts are not outputs."""
    watcher = Watcher()
    door = door_of(lambda context: watcher, strict=True)
    door.step([row([1, 2, 3], 1)])
    door.step([row([1, 2, 3, 4, 5, 6], 1)])
    assert watcher.started == ["0", "1"]


def test_drafting_once_before_the_first_request_leaves_no_trace() -> None:
    door = open_door(strict=True)
    door.warm_up()
    assert door.num_requests == 0
    assert door.acceptance is not None
    counts = door.acceptance.aggregate()
    assert (counts.num_requests, counts.num_steps, counts.num_drafts, counts.num_batch_steps) == (0, 0, 0, 0)
    assert door.step([row([1, 2, 3, 1, 2], 1)]) == [[3, 1, 2]]


def test_absent_requests_leave_in_time() -> None:
    watcher = Watcher()
    door = door_of(lambda context: watcher, strict=True, target=DoorTarget(64, 4096, max_num_seqs=2))
    for number in range(5):
        door.step([row([number, number + 1, 60], 1)])
    assert door.num_requests == 2, "plugins have room for max_num_seqs"
    assert watcher.finished == ["0", "1", "2"], "the longest absent"
    text = [4, 5, 60]
    for _ in range(MAX_STEPS_ABSENT + 1):
        text.append(1)
        door.step([row(text, 1)])
    assert door.num_requests == 1
    assert watcher.finished == ["0", "1", "2", "3"]


def test_keys_tell_requests_apart() -> None:
    watcher = Watcher()
    door = door_of(lambda context: watcher, strict=True)
    door.step([row([1, 2, 3], 1, key="a"), row([1, 2, 3], 1, key="b")])
    door.step([row([1, 2, 3, 4], 1, key="b")])
    assert watcher.started == ["0", "1"]
    assert watcher.read == {"0": [1, 2], "1": [1, 2, 3]}
    door.finish("a")
    door.finish("unknown")
    assert watcher.finished == ["0"]


# --- what was accepted ----------------------------------------------------------------------------------------


def test_acceptance_is_read_from_the_next_text() -> None:
    door = open_door(strict=True)
    server = MiniServer(door)
    server.running = [repetitive(f"r{seed}", seed=seed) for seed in range(4)]
    requests = list(server.running)
    server.run()
    assert door.acceptance is not None
    counts = door.acceptance.aggregate()
    verified = [draft for request in requests for draft in request.drafts]
    assert counts.num_drafts == len(verified)
    assert counts.num_draft_tokens == sum(drafted for drafted, _ in verified)
    assert counts.num_accepted_tokens == sum(accepted for _, accepted in verified)
    assert counts.num_emitted_tokens == sum(len(request.script) for request in requests)
    assert counts.sources["ngram"].num_accepted_tokens == counts.num_accepted_tokens


def test_a_draft_that_the_server_dropped_is_no_draft() -> None:
    watcher = Watcher()
    manager = ProcessManager()
    manager.register(as_method("mine", lambda context: FixedProposer([[5, 6]] * 9)))
    door = open_door({"method": "mine", "num_speculative_tokens": 4}, manager=manager, plugins=[], strict=True)
    accepted: list[tuple[int, int, str | None]] = []
    step = door.hooks.accept_metrics

    def record(outcome: StepOutcome) -> None:
        accepted.extend((each.num_draft_tokens, each.num_accepted_tokens, each.skip_reason) for each in outcome.rows)
        step(outcome)

    door.hooks.accept_metrics = record  # type: ignore[method-assign]
    door.step([row([1, 2], 1)])
    door.step([row([1, 2, 5], 1)])  # the first draft token came alone: nobody looked at the draft
    door.step([row([1, 2, 5, 5, 6, 9], 3)])
    door.step([row([1, 2, 5, 5, 6, 9, 5, 8], 2)])
    door.step([row([1, 2, 5, 5, 6, 9, 5, 8, 8], 1)])
    door.step([row([1, 2, 5, 5, 6, 9, 5, 8, 8, 1, 1, 1], 3)])  # steps that were not shown
    assert accepted == [
        (0, 0, "prefill"),
        (0, 0, "not_verified"),
        (2, 2, None),
        (2, 1, None),
        (2, 0, None),
        (0, 0, "not_verified"),
    ]
    assert not watcher.steps


def test_limits_are_kept() -> None:
    door = door_of(lambda context: FixedProposer([[1, 2, 3, 4, 5, 6]] * 9), target=DoorTarget(64, 10, max_num_seqs=8))
    drafts = door.step(
        [
            row([7, 8], 1),
            row([7, 9], 1, limit=2),
            row([8, 9], 1, limit=0),
            row([9, 9], 0),
            row([1, 1, 1, 1, 1, 1, 1], 1),
            row([1] * 9, 1),
        ]
    )
    assert [len(draft) for draft in drafts] == [4, 2, 0, 0, 2, 0]


# --- nothing gets out -----------------------------------------------------------------------------------------


class Raising(RowProposer):
    def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
        raise RuntimeError("on purpose")


def test_a_proposer_that_raises_costs_its_drafts_only(caplog: pytest.LogCaptureFixture) -> None:
    door = door_of(lambda context: Raising())
    text = [1, 2, 3]
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert door.step([row(text, 1)]) == [[]]
            text.append(4)
    assert door.hooks.faults == {"propose_raised:mine": 1}
    assert len([record for record in caplog.records if "on purpose" in record.getMessage()]) == 1
    assert not door.is_off


@pytest.mark.parametrize("draft", [[[64]], [[-1]], [[1, 2], [3]]], ids=["above", "below", "rows"])
def test_a_draft_that_cannot_be_is_dropped(draft: list[list[int]]) -> None:
    class Wrong:
        @hookimpl
        def specplug_propose(self, batch: Any, limits: Sequence[int]) -> Any:
            return Draft.from_lists(draft)

    door = door_of(lambda context: Wrong())
    assert door.step([row([1, 2, 3], 1)]) == [[]]
    assert sum(door.hooks.faults.values()) == 1


def test_a_fault_of_the_door_itself_turns_it_off(caplog: pytest.LogCaptureFixture) -> None:
    door = open_door()
    assert door.step([DoorRow(None, 1), DoorRow(None, 1)]) == [[], []]  # type: ignore[arg-type]
    assert door.is_off
    assert door.step([row([1, 2], 1)]) == [[]]
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    with pytest.raises(TypeError):
        open_door(strict=True).step([DoorRow(None, 1)])  # type: ignore[arg-type]


def test_a_closed_door_gives_nothing() -> None:
    door = open_door()
    door.close()
    door.close()
    assert door.step([row([1, 2, 1, 2], 1)]) == [[]]


def test_random_drafts_stay_in_bounds() -> None:
    door = door_of(lambda context: RandomProposer(context.session.vocab_size), strict=True)
    server = MiniServer(door, shuffle=5)
    server.running = [repetitive(f"r{seed}", seed=seed) for seed in range(8)]
    server.run()
    assert max(map(len, server.seen)) == 4
    assert all(0 <= each < 64 for draft in server.seen for each in draft)


# --- what is refused ------------------------------------------------------------------------------------------


def test_methods_that_read_hidden_states_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'"mine" reads hidden states, which test does not show'):
        door_of(lambda context: FixedProposer([]), capabilities=Capabilities(hidden_state_layers=(1,)))


def test_verification_rules_are_refused() -> None:
    with pytest.raises(ConfigError, match="test verifies drafts itself"):
        open_door({**NGRAM, "rejection_sample_method": "match"})


def test_faults_of_the_configuration_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        open_door({"method": "ngram", "num_speculative_tokens": 0, "prompt_lookup_maxi": 3})
    assert len(caught.value.faults) == 2


def test_trees_are_cut_to_their_first_path_and_reasons_are_passed_on() -> None:
    class Trees(Watcher):
        @hookimpl
        def specplug_propose(self, batch: Any) -> Any:
            draft = Draft.from_trees([[1, 2, 3, 4], []], [[-1, -1, 0, 2], []])
            return replace(draft, skip_reasons=(None, "too dear"))

    watcher = Trees()
    door = door_of(lambda context: watcher, strict=True, capabilities=Capabilities(tree=True))
    assert door.step([row([7, 8], 1), row([7, 9], 1)]) == [[1, 3, 4], []]
    door.step([row([7, 8, 1, 3, 5], 3), row([7, 9, 9], 1)])
    steps = [(step.num_draft_tokens, step.num_accepted_tokens, step.skip_reason) for step in watcher.steps]
    assert steps == [(0, 0, "prefill"), (0, 0, "prefill"), (3, 2, None), (0, 0, "too dear")]
