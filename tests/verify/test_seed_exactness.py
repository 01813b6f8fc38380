"""``match`` and ``coupled``: the tokens of plain sampling, whatever is drafted and whoever is in the batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from specplug.sampling_params import SamplingParams
from specplug.types import Batch, Draft, Request, TokenIds
from specplug.verify import BuiltinVerifier, noise

VOCAB, LENGTH = 300, 24
FILTERS = [{}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}]


class Stream:
    """One request decoded by steps; its target is a function of the newest token."""

    def __init__(self, seed: int, sampling: dict[str, float]) -> None:
        table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(99)) * 2.5
        self.table, self.tokens, self.steps = table, [seed % 7], 0
        params = SamplingParams(temperature=0.9, **sampling)  # type: ignore[arg-type]
        self.request = Request(str(seed), TokenIds(np.array(self.tokens, dtype=np.int32)), params, seed=seed)

    def logits(self, drafts: list[int]) -> torch.Tensor:
        return self.table[torch.tensor([self.tokens[-1], *drafts])]


def decode(streams: list[Stream], rule: str, drafter: Callable[[Stream], list[int]]) -> int:
    """Until every stream is long enough; returns how many draft tokens were accepted."""
    verifier = BuiltinVerifier(vocab_size=VOCAB, rule=rule)
    num_accepted = 0
    while running := [stream for stream in streams if len(stream.tokens) <= LENGTH]:
        ids = tuple(TokenIds(np.array(stream.tokens, dtype=np.int32)) for stream in running)
        lengths = tuple(len(stream.tokens) for stream in running)
        batch = Batch(tuple(s.request for s in running), ids, lengths, lengths, tuple(s.steps for s in running))
        drafts = [drafter(stream) for stream in running]
        logits = torch.cat([stream.logits(draft) for stream, draft in zip(running, drafts, strict=True)])
        found = verifier.specplug_verify(batch=batch, draft=Draft.from_lists(drafts), target_logits=logits)
        for stream, row in zip(running, found.output_token_ids.tolist(), strict=True):
            emitted = [token for token in row if token >= 0]
            num_accepted += len(emitted) - 1
            stream.tokens += emitted
            stream.steps += 1
    return num_accepted


def likely(stream: Stream) -> list[int]:
    """The target's own greedy continuation."""
    drafts: list[int] = []
    while len(drafts) < 4:
        drafts.append(int(stream.logits(drafts)[-1].argmax()))
    return drafts


def shared_noise(stream: Stream) -> list[int]:
    """Drafts with the noise that ``coupled`` shares."""
    drafts: list[int] = []
    while len(drafts) < 3:
        logits = stream.logits(drafts)[-1].double() / 0.9
        position = len(stream.tokens) + len(drafts)
        drafts.append(int((logits + noise.gumbel(stream.request.seed, position, VOCAB)).argmax()))
    return drafts


@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("sampling", FILTERS, ids=["plain", "filters"])
def test_tokens_are_those_of_plain_sampling(rule: str, sampling: dict[str, float]) -> None:
    seeds = [1, 2**63 + 5, 17]
    plain = [Stream(seed, sampling) for seed in seeds]
    assert decode(plain, rule, lambda stream: []) == 0
    for drafter in (likely, shared_noise, lambda stream: [5, -1, 6]):
        together = [Stream(seed, sampling) for seed in [*seeds, 99]]
        num_accepted = decode(together, rule, drafter)
        assert num_accepted > 0 or drafter not in (likely, shared_noise)
        for one, other in zip(plain, together, strict=False):
            assert one.tokens[:LENGTH] == other.tokens[:LENGTH]
        alone = Stream(seeds[1], sampling)
        decode([alone], rule, drafter)
        assert alone.tokens[:LENGTH] == plain[1].tokens[:LENGTH]


def test_shared_noise_makes_a_proposer_right_every_time() -> None:
    stream = Stream(3, {})
    num_accepted = decode([stream], "coupled", shared_noise)
    assert num_accepted == 3 * stream.steps  # draft and target are the same model here


def test_other_seeds_give_other_text() -> None:
    streams = [Stream(seed, {}) for seed in (7, 14)]  # the same first token
    decode(streams, "match", lambda stream: [])
    assert streams[0].tokens != streams[1].tokens


def test_standard_is_not_seed_exact_but_repeats_itself() -> None:
    texts = []
    for drafter in (likely, likely, lambda stream: []):
        stream = Stream(5, {})
        decode([stream], "standard", drafter)
        texts.append(stream.tokens[:LENGTH])
    assert texts[0] == texts[1] != texts[2]
