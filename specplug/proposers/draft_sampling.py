"""How model-based proposers choose draft tokens: arg-max for greedy requests, a draw from the processed law for others.

Batched over rows on any device, without a loop over the vocabulary and without waiting for the device. A draw depends
only on its request's seed, verify step and position (``Purpose.DRAFT`` of ``specplug.verify.noise``), so a request's
drafts do not depend on its neighbours, and they are independent of the noise that verifies them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import pad

from specplug.draft_space import DraftSpace
from specplug.models.kernels import Kernels
from specplug.sampling_params import SamplingParams
from specplug.types import Batch, Law, LawSpan, OneHot, cumulative
from specplug.verify import filters, noise
from specplug.verify.inputs import RowInputs
from specplug.verify.noise import TILE, Purpose

__all__ = ["DraftRow", "DraftSampler", "cut_by_sorting", "is_drafted_greedily", "process_logits", "race"]


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What the sampler must know of one request: its slots are those of the draft that follow the row before."""

    params: SamplingParams
    seed: int
    step: int
    """Verify steps the request has been through."""
    position: int
    """Index, in the request's text, of its first draft token."""
    num_slots: int

    @classmethod
    def of(cls, batch: Batch, row: int, num_slots: int) -> DraftRow:
        """For one row of a batch that is drafted for."""
        request = batch.requests[row]
        return cls(
            params=request.sampling_params,
            seed=request.seed,
            step=batch.num_verify_steps[row],
            position=len(batch.token_ids[row]),
            num_slots=num_slots,
        )

    @property
    def is_greedy(self) -> bool:
        return is_drafted_greedily(self.params)


def is_drafted_greedily(params: SamplingParams) -> bool:
    """Whether a request's processed law has one token only."""
    return params.is_greedy or params.top_k == 1


class DraftSampler:
    """The draft tokens of one step: ``choose`` any slots in any order, each once, then read the results.

    These are ``token_ids``, ``confidence`` and ``laws(space)``.
    """

    def __init__(
        self,
        rows: Sequence[DraftRow],
        *,
        is_probabilistic: bool,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> None:
        """Without ``is_probabilistic`` every row is drafted by arg-max. ``kernels``: to find it with."""
        self._kernels = kernels
        self._starts = cumulative(row.num_slots for row in rows)
        self._device = device
        self._is_random = [is_probabilistic and not row.is_greedy for row in rows for _ in range(row.num_slots)]
        self._num_random = sum(self._is_random)
        self._rows = rows
        self._slots: list[int] = []  # in the order they were chosen, as the parts below
        self._chosen: list[torch.Tensor] = []
        self._confidence: list[torch.Tensor] = []
        if self._num_random:
            self._params = [row.params for row in rows for _ in range(row.num_slots)]
            self._law_rows = cumulative(map(int, self._is_random))
            self._law_logits: torch.Tensor | None = None
            self._noise: tuple[torch.Tensor, torch.Tensor] | None = None

    def choose(self, logits: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """One token for each of ``slots``, ``[len(slots)]`` int64; ``logits`` ``[len(slots), vocab]``: raw, masked."""
        random = [place for place, slot in enumerate(slots) if self._is_random[slot]] if self._num_random else []
        if len(random) == len(slots):
            chosen, confidence = self._draw(logits.float(), slots)
        else:
            chosen, confidence = self._likeliest(logits)
            if random:
                places = torch.tensor(random, device=self._device)
                drawn = self._draw(logits[places].float(), [slots[place] for place in random])
                chosen[places], confidence[places] = drawn
        self._slots += slots
        self._chosen.append(chosen)
        self._confidence.append(confidence)
        return chosen

    def _likeliest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = None if self._kernels is None else self._kernels.likeliest(logits)
        return found or _likeliest(logits)

    @property
    def token_ids(self) -> torch.Tensor:
        """``[num_slots]`` int64, once every slot was chosen."""
        return self._by_slot(self._chosen)

    @property
    def confidence(self) -> torch.Tensor:
        """``[num_slots]`` float32: the largest probability of each slot's law, whatever was drawn from it."""
        return self._by_slot(self._confidence)

    def _by_slot(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        joined = torch.cat(tuple(parts))
        if self._slots == sorted(self._slots):
            return joined
        return torch.empty_like(joined).index_copy_(0, torch.tensor(self._slots, device=self._device), joined)

    def _draw(self, logits: torch.Tensor, slots: Sequence[int]) -> tuple[torch.Tensor, ...]:
        vocab_size = logits.shape[1]
        processed = process_logits(logits, [self._params[slot] for slot in slots])
        if self._law_logits is None:
            self._law_logits = logits.new_empty(self._num_random, vocab_size)
        law_rows = torch.tensor([self._law_rows[slot] for slot in slots], device=self._device)
        self._law_logits[law_rows] = processed
        if self._noise is None:
            self._noise = self._draw_noise(vocab_size)
        uniforms, tickets = self._noise
        probs = torch.softmax(processed, -1)
        return race(probs, uniforms[law_rows], tickets[law_rows]), probs.amax(-1)

    def _draw_noise(self, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Uniforms ``[num_random]`` and race tickets ``[num_random, tiles]``, float64, of all random slots at once."""
        keys = [
            (row.seed, row.step, row.position + depth)
            for row in self._rows
            if not row.is_greedy
            for depth in range(row.num_slots)
        ]
        seeds, steps, positions = (np.array(column, dtype=np.uint64)[:, None] for column in zip(*keys, strict=True))
        words = noise.philox(seeds, int(Purpose.DRAFT), steps, positions, noise.draw_blocks(vocab_size))
        num_tiles = noise.num_tiles(vocab_size)
        tickets = noise.exponentials(words[:, 1:].reshape(len(keys), -1)[:, :num_tiles])
        both = torch.from_numpy(np.column_stack((noise.uniforms(words[:, 0]), tickets))).to(self._device)
        return both[:, 0], both[:, 1:]

    def laws(self, space: DraftSpace, device: torch.device | None = None) -> tuple[LawSpan, ...]:
        """Spans over all slots: ``one_hot`` where rows are greedy, ``space.law`` of the drawn-from logits elsewhere.

        ``device``: the target's, where laws belong; by default that of the sampler.
        """
        device = device or self._device
        spans: list[LawSpan] = []
        start = 0
        bounds = [row for row in pairwise(self._starts) if row[0] < row[1]]
        for number, (first, stop) in enumerate(bounds):
            is_last = number + 1 == len(bounds)
            if is_last or self._is_random[stop] != self._is_random[first]:
                spans.append(LawSpan(start, stop, self._law(space, start, stop, device)))
                start = stop
        return tuple(spans)

    def _law(self, space: DraftSpace, start: int, stop: int, device: torch.device) -> Law:
        if not self._is_random[start] or self._law_logits is None:
            return OneHot()
        first = self._law_rows[start]
        return space.law(self._law_logits[first : first + stop - start].to(device))


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The arg-max of each row and its probability. On a CPU ``max`` finds it faster than ``argmax``."""
    chosen = logits.max(-1, keepdim=True).indices
    return chosen[:, 0], torch.softmax(logits, -1, dtype=torch.float32).gather(1, chosen)[:, 0]


def process_logits(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Temperature, min-p, top-k and top-p of each row's request, as ``specplug.verify.filters`` has them.

    ``logits``: ``[n, vocab]`` float32; returns a fresh tensor, -inf where a token is cut. Ties with the last token kept
    stay.
    """
    temperatures = torch.tensor([[each.temperature] for each in params], dtype=torch.float32, device=logits.device)
    scaled = logits / temperatures
    rows = [row for row, each in enumerate(params) if each.top_k > 0 or each.top_p < 1.0 or each.min_p > 0.0]
    if not rows:
        return scaled
    if logits.device.type == "cpu":
        for row in rows:
            _cut_row(scaled[row], params[row])
        return scaled
    return cut_by_sorting(scaled, params)


def _cut_row(scaled: torch.Tensor, params: SamplingParams) -> None:
    """In place, ``[vocab]``: finds the threshold among few candidates, which sorting would not on a CPU."""
    row = RowInputs("standard", top_k=max(params.top_k, 0), top_p=params.top_p, min_p=params.min_p)
    lowest = filters.threshold(scaled.numpy(), torch.softmax(scaled, -1).numpy(), row)
    scaled.masked_fill_(scaled < lowest, -torch.inf)


def cut_by_sorting(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The same for all rows at once, ``[n, vocab]`` in place, without waiting for the device."""
    vocab_size = scaled.shape[1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=scaled.device)[:, None]

    ordered = scaled.sort(-1, descending=True).values
    margins = column([math.log(each.min_p) if each.min_p > 0.0 else -math.inf for each in params])
    counts = [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params]
    last = torch.tensor(counts, device=scaled.device)[:, None] - 1
    lowest = torch.maximum(ordered[:, :1] + margins, ordered.gather(1, last))
    probs = torch.softmax(ordered.masked_fill_(ordered < lowest, -torch.inf), -1)
    top_p = column([each.top_p for each in params])
    num_kept = (probs.cumsum(-1) - probs < top_p).sum(-1, keepdim=True).clamp_(min=1)
    nucleus = ordered.gather(1, num_kept - 1).masked_fill_(top_p >= 1.0, -torch.inf)
    return scaled.masked_fill_(scaled < torch.maximum(lowest, nucleus), -torch.inf)


def race(probs: torch.Tensor, uniforms: torch.Tensor, tickets: torch.Tensor) -> torch.Tensor:
    """``[n]``: a token of each row of ``probs`` ``[n, vocab]``, by the tile race of ``specplug.verify``.

    Tiles of ``TILE`` tokens race by their mass over an exponential (``tickets`` ``[n, tiles]``); inside the winner a
    uniform decides.
    """
    num_rows, vocab_size = probs.shape
    beyond = -vocab_size % TILE
    tiles = (pad(probs, (0, beyond)) if beyond else probs).view(num_rows, -1, TILE)
    winner = (tiles.sum(-1) / tickets).argmax(-1, keepdim=True)
    inside = tiles.gather(1, winner[:, :, None].expand(-1, -1, TILE))[:, 0]
    sums = inside.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:].contiguous()
    place = torch.searchsorted(sums, uniforms[:, None] * total, right=True)
    return (winner * TILE + torch.minimum(place, torch.searchsorted(sums, total)))[:, 0]
