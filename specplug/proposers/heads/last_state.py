"""Drafting from one state a request: the target's at its newest kept position, without a cache of the head's own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specplug.draft_space import DraftSpace, IdentityDraftSpace
from specplug.errors import ModelError
from specplug.hooks.markers import hookimpl
from specplug.models.kernels import Kernels
from specplug.proposers.base import Proposer, rows_to_draft
from specplug.proposers.draft_sampling import DraftRow, DraftSampler
from specplug.proposers.heads.features import LastStates
from specplug.proposers.heads.vocabulary import ReducedVocabulary
from specplug.types import Batch, Draft, Request, cumulative

__all__ = ["DraftSlots", "LastStateProposer", "listed_ids"]


@dataclass(frozen=True, slots=True)
class DraftSlots:
    """Where the drafts of several requests lie: request i has ``counts[i]`` slots (1 or more) from ``starts[i]`` on."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def max_count(self) -> int:
        """The longest draft."""
        return max(self.counts)

    def longer_than(self, depth: int) -> list[int]:
        """The requests that have a slot at ``depth`` (0: the first)."""
        return [number for number, count in enumerate(self.counts) if count > depth]

    def at(self, depth: int) -> list[int]:
        """Those requests' slots at ``depth``."""
        return [self.starts[number] + depth for number in self.longer_than(depth)]


class LastStateProposer(Proposer):
    """A proposer whose head reads the target's last state, normalised, and the newest token. Write :meth:`draw`.

    Greedy requests, and all without ``is_probabilistic``, get the arg-max of the head's logits (law ``one_hot``);
    others a draw from the processed logits, which are their law. ``confidence`` is the largest probability of each
    slot's law.
    """

    def __init__(
        self,
        space: DraftSpace,
        norm: Callable[[torch.Tensor], torch.Tensor],
        *,
        layer: int,
        device: torch.device,
        max_num_tokens: int,
        name: str,
        kernels: Kernels | None = None,
        is_probabilistic: bool = False,
    ) -> None:
        """``space``: between the head's output and the target. ``norm``: the target's final norm; ``layer``: the number
        of its last; ``kernels``: what it runs on. ``max_num_tokens``: most tokens the head can draft."""
        self.name = name
        self.space = space
        self.max_num_tokens = max_num_tokens
        self.is_probabilistic = is_probabilistic
        self.hidden_state_layers = (layer,)
        self.laws: frozenset[str] = frozenset({"one_hot"})
        if is_probabilistic:
            self.laws |= {"dense" if isinstance(space, IdentityDraftSpace) else "indirect"}
        self._norm = norm
        self._kernels = kernels
        self._device = device
        self._states = LastStates(self.hidden_state_layers)

    @hookimpl
    def specplug_finish_request(self, request: Request) -> None:
        self._states.forget(request.request_id)

    @hookimpl
    def specplug_advance(self, batch: Batch) -> None:
        self._states.advance(batch)

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        """Draft a chain for every row that has a limit and whose last state is known."""
        counts = self.counts(batch, limits)
        rows = [row for row, count in enumerate(counts) if count]
        if not rows:
            return Draft.empty(len(batch))
        starts = cumulative(counts)
        slots = DraftSlots(tuple(starts[row] for row in rows), tuple(counts[row] for row in rows))
        sampler = DraftSampler(
            [DraftRow.of(batch, row, counts[row]) for row in rows],
            is_probabilistic=self.is_probabilistic,
            device=self._device,
            kernels=self._kernels,
        )
        with torch.inference_mode():
            self.draw(*self.inputs(batch, rows), slots, sampler)
            return Draft(
                draft_token_ids=self.space.to_target_ids(sampler.token_ids),
                num_draft_tokens=tuple(counts),
                laws=sampler.laws(self.space),
                confidence=sampler.confidence,
            )

    def counts(self, batch: Batch, limits: Sequence[int]) -> list[int]:
        """How many tokens to draft for each row."""
        counts = [0] * len(batch)
        for row in rows_to_draft(batch, limits):
            if batch.requests[row].request_id in self._states:
                counts[row] = min(limits[row], self.max_num_tokens)
        return counts

    def inputs(self, batch: Batch, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the rows named: the normalised states ``[rows, hidden]`` and the newest tokens ``[rows]``."""
        states = self._norm(self._states.stack([batch.requests[row].request_id for row in rows]))
        newest = torch.tensor([batch.token_ids[row][-1] for row in rows], dtype=torch.int64, device=self._device)
        return states, newest

    @abstractmethod
    def draw(self, states: torch.Tensor, token_ids: torch.Tensor, slots: DraftSlots, sampler: DraftSampler) -> None:
        """Choose a token for every slot. ``states`` ``[n, hidden]`` and newest ``token_ids`` ``[n]`` of n requests."""

    def choose(self, logits: torch.Tensor, slots: Sequence[int], sampler: DraftSampler) -> torch.Tensor:
        """Draft ids ``[len(slots)]`` from raw ``logits`` ``[len(slots), draft_vocab]``."""
        return sampler.choose(self.space.restrict(logits), slots)


def listed_ids(token_map: torch.Tensor | None, num_rows: int, vocab_size: int, device: torch.device) -> DraftSpace:
    """Between the ``num_rows`` rows of a head's output and the target's ids.

    ``token_map``: ``[num_rows]``, the target id of each row; None where row i is id i. Raises ModelError for a map that
    does not fit.
    """
    if token_map is None:
        if num_rows >= vocab_size:
            return IdentityDraftSpace(vocab_size)
        return ReducedVocabulary(torch.arange(num_rows, device=device), vocab_size)
    target_ids = token_map.to(device=device, dtype=torch.int64)
    if token_map.is_floating_point() or tuple(token_map.shape) != (num_rows,):
        raise ModelError(
            f"token_map is {token_map.dtype} of shape {list(token_map.shape)}; it must be {num_rows} whole numbers, "
            "the target id of each row of the heads"
        )
    if not 0 <= int(target_ids.min()) <= int(target_ids.max()) < vocab_size:
        raise ModelError(f"token_map names ids outside the target's {vocab_size}; it belongs to another target")
    return ReducedVocabulary(target_ids, vocab_size)
