"""Verification without Triton: per request a walk over its logit rows that stops where the request's step ends.

Rows behind the first rejected token are never read. Each row that is needed costs one arg-max (greedy) or one
fused softmax into a buffer that stays in the cache; logits on another device are copied row by row.
The results are those of ``specplug.verify.reference`` in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from specplug.trees import ROOT, Tree
from specplug.types import Dense, Indirect, Law, Verification
from specplug.verify import filters, noise
from specplug.verify.inputs import RowInputs, Rule, VerifyInputs, slot_laws
from specplug.verify.noise import TILE, Purpose

__all__ = ["TorchRules"]

Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]


class _Weights:
    """A padded vocabulary buffer seen as torch, as numpy, and as tiles; the padding stays 0."""

    def __init__(self, vocab_size: int) -> None:
        with torch.inference_mode(False):  # a buffer made inside it could not be written to outside
            buffer = torch.zeros(noise.num_tiles(vocab_size) * TILE, dtype=torch.float32)
        self.tiles = buffer.view(-1, TILE)
        self.entries = buffer[:vocab_size]
        self.array: Floats = self.entries.numpy()
        self._padded: Floats = buffer.numpy()

    def draw(self, uniform: float, tickets: Doubles) -> int | None:
        """A token with chance in proportion to its weight; None when there is no positive, finite mass."""
        masses = self.tiles.sum(1).numpy()
        if not 0.0 < float(masses.sum()) < np.inf:
            return None
        start = int((masses / tickets).argmax()) * TILE
        sums = self._padded[start : start + TILE].cumsum(dtype=np.float64)
        inside = sums.searchsorted(uniform * sums[-1], side="right")
        return start + int(min(inside, sums.searchsorted(sums[-1])))


class _Noise:
    """The numbers of one request's step, drawn at once: per logit row a uniform, race tickets, an accept uniform."""

    def __init__(self, accepts: Doubles, uniforms: Doubles, tickets: Doubles) -> None:
        self.accepts, self.uniforms, self.tickets = accepts, uniforms, tickets


_NO_NOISE = _Noise(np.empty(0), np.empty(0), np.empty((0, 0)))


def _draw_noise(inputs: VerifyInputs) -> list[_Noise]:
    """One Philox call for all rows that draw over tiles; the others get none."""
    numbers = [number for number, row in enumerate(inputs.rows) if row.rule not in ("greedy", "coupled")]
    result = [_NO_NOISE] * len(inputs.rows)
    if not numbers:
        return result
    depths = [
        count if tree is None else tree.max_depth
        for count, tree in zip(inputs.num_draft_tokens, inputs.trees, strict=True)
    ]
    seeds: list[int] = []
    purposes: list[int] = []
    steps: list[int] = []
    positions: list[int] = []
    ends = [0]
    for number in numbers:
        row, count = inputs.rows[number], depths[number] + 1
        is_match = row.rule == "match"
        seeds += [row.seed] * count
        purposes += [int(Purpose.TARGET if is_match else Purpose.RECOVER)] * count
        steps += [0 if is_match else row.step] * count
        positions += range(row.position, row.position + count)
        ends.append(ends[-1] + count)
    blocks = noise.draw_blocks(inputs.vocab_size)
    # one accept uniform and the blocks of one draw for each logit row
    words = noise.philox(
        _column(seeds),
        np.concatenate((np.full((len(seeds), 1), int(Purpose.ACCEPT)), _column(purposes).repeat(len(blocks), 1)), 1),
        _column(steps),
        _column(positions),
        np.concatenate((blocks[:1], blocks)),
    )
    uniforms = noise.uniforms(words[:, :2])
    tickets = noise.exponentials(words[:, 2:].reshape(len(words), -1)[:, : noise.num_tiles(inputs.vocab_size)])
    for number, start, end in zip(numbers, ends, ends[1:], strict=False):
        result[number] = _Noise(uniforms[start:end, 0], uniforms[start:end, 1], tickets[start:end])
    return result


def _column(values: list[int]) -> NDArray[np.uint64]:
    return np.array(values, dtype=np.uint64)[:, None]


class _Walk:
    """One request: its drafts, laws and noise, and its logit rows read on demand."""

    def __init__(self, step: _Step, number: int) -> None:
        self.step = step
        self.row: RowInputs = step.inputs.rows[number]
        self.slot_start = step.slot_starts[number]
        self.first_logit_row = self.slot_start + number
        self.drafts = step.draft_ids[self.slot_start : step.slot_starts[number + 1]]
        self.noise = step.noise[number]
        self.tree = step.trees[number]
        self.path: list[int] = []
        """In a tree, the nodes accepted so far."""

    def logits(self, slot: int) -> Floats:
        """``[vocab]`` float32 of the logit row behind ``slot`` draft tokens, in a tree those of the path so far."""
        row = slot if self.tree is None else (self.path[slot - 1] + 1 if slot else 0)
        return self.step.logits(self.first_logit_row + row)

    def descend(self, tree: Tree, token_id: int | None) -> bool:
        """Go on to the first child of the node reached that holds ``token_id``; whether there is one."""
        for node in tree.children(self.path[-1] if self.path else ROOT):
            if self.drafts[node] == token_id:
                self.path.append(node)
                return True
        return False

    def is_token(self, slot: int) -> bool:
        """False for a placeholder or an id past the vocabulary, where the chain stops."""
        return 0 <= self.drafts[slot] < self.step.inputs.vocab_size

    def law(self, slot: int) -> tuple[Law, int]:
        return self.step.laws[self.slot_start + slot]

    def argmax(self, slot: int) -> int | None:
        """The first maximum, None when the row is unusable."""
        logits = self.logits(slot)
        best = int(logits.argmax())
        return best if -np.inf < logits[best] < np.inf else None

    def softmax(self, logits: Floats) -> Floats:
        """``[vocab]`` at the row's temperature, in the step's target buffer; NaN when the row is unusable."""
        entries, source = self.step.target.entries, torch.from_numpy(logits)
        if self.row.temperature != 1.0:
            torch.sub(source, float(logits.max()), out=entries).mul_(1.0 / self.row.temperature)
            source = entries
        torch.softmax(source, 0, out=entries)
        return self.step.target.array

    def target_probs(self, slot: int) -> Floats:
        """``[vocab]`` after temperature and filters, in the step's target buffer; NaN when the row is unusable."""
        logits = self.logits(slot)
        probs = self.softmax(logits)
        if self.row.has_filters:
            probs *= logits >= filters.threshold(logits, probs, self.row)
            self.step.target.entries.div_(self.step.target.entries.sum())
        return probs

    def draft_prob(self, slot: int) -> float:
        """The law's chance of the slot's draft token; 0 when it has none, which rejects the token."""
        law, index = self.law(slot)
        token_id = self.drafts[slot]
        if isinstance(law, Dense):
            return float(self.draft_probs(slot)[token_id])
        if isinstance(law, Indirect):
            draft_id = int(law.target_to_draft_ids[token_id])
            if draft_id < 0:
                return 0.0
            logit = law.draft_logits[index, draft_id].detach().float()
            return float((logit - law.logsumexp[index].detach().float()).exp())
        return 1.0

    def draft_probs(self, slot: int) -> Floats:
        """``[vocab]`` of a dense or indirect law, in the step's draft buffer, where it may lie already."""
        law, index = self.law(slot)
        entries = self.step.draft.entries
        if self.step.draft_slot == self.slot_start + slot:
            return self.step.draft.array
        self.step.draft_slot = self.slot_start + slot
        if isinstance(law, Dense):
            torch.softmax(law.draft_logits[index].detach().to("cpu", torch.float32), 0, out=entries)
        elif isinstance(law, Indirect):
            probs = (law.draft_logits[index].detach().float() - law.logsumexp[index].detach().float()).exp()
            ids = law.target_to_draft_ids
            entries.copy_(torch.where(ids >= 0, probs[ids.clamp(min=0)], 0.0))
        return self.step.draft.array

    def subtract_draft(self, slot: int, weight: float = 1.0) -> None:
        """Turn the target's chances of ``slot``, which the buffer holds, into ``(weight * target - draft)+``.

        Up to a factor for a draft token that is certain: there the target's chances without it.
        """
        entries = self.step.target.entries
        if isinstance(self.law(slot)[0], Dense | Indirect):
            self.draft_probs(slot)
            if weight != 1.0:
                entries.mul_(weight)
            entries.sub_(self.step.draft.entries).clamp_(min=0.0)
        else:
            entries[self.drafts[slot]] = 0.0

    def draw(self, slot: int) -> int | None:
        """A token from the target buffer with the noise of ``slot``; None without mass."""
        return self.step.target.draw(self.noise.uniforms[slot], self.noise.tickets[slot])

    def draw_target(self, slot: int) -> int | None:
        self.target_probs(slot)
        return self.draw(slot)

    def draw_residual(self, slot: int, weight: float = 1.0) -> int | None:
        """From what the draft left of the target's chances of ``slot``, which the buffer holds.

        Where nothing is left, target and draft agree up to rounding: from the target itself.
        """
        self.subtract_draft(slot, weight)
        token_id = self.draw(slot)
        return self.draw_target(slot) if token_id is None else token_id

    def draw_coupled(self, slot: int) -> int | None:
        """The arg-max of the processed logits plus the noise shared with the proposer."""
        logits = self.logits(slot)
        if not -np.inf < logits.max() < np.inf:
            return None
        scores = logits.astype(np.float64) * (1.0 / self.row.temperature)
        scores += noise.gumbel(self.row.seed, self.row.position + slot, len(logits)).numpy()
        if self.row.has_filters:
            scores[logits < filters.threshold(logits, self.softmax(logits), self.row)] = -np.inf
        return int(scores.argmax())


class _Step:
    """What the walks of one call share."""

    def __init__(self, inputs: VerifyInputs, target: _Weights, draft: _Weights) -> None:
        self.inputs, self.target, self.draft = inputs, target, draft
        self.draft_slot = -1
        """The slot whose law the draft buffer holds."""
        self.draft_ids: list[int] = inputs.draft_token_ids.tolist()
        self.slot_starts = inputs.slot_starts
        self.trees = inputs.trees
        self.laws = slot_laws(inputs.laws)
        self.noise = _draw_noise(inputs)
        logits = inputs.target_logits.detach()
        self._tensor = logits
        self._array: Floats | None = None
        if logits.device.type == "cpu" and logits.dtype == torch.float32:
            self._array = logits.numpy()

    def logits(self, number: int) -> Floats:
        if self._array is None:
            return np.asarray(self._tensor[number].to("cpu", torch.float32).numpy())
        row: Floats = self._array[number]
        return row


def _walk_choices(walk: _Walk, choose: Callable[[int], int | None]) -> list[int | None]:
    """Emit what the target chooses; go on while the draft said the same."""
    output: list[int | None] = []
    if walk.tree is not None:
        output.append(choose(0))
        while walk.descend(walk.tree, output[-1]):
            output.append(choose(len(output)))
        return output
    for slot, draft_id in enumerate(walk.drafts):
        output.append(choose(slot))
        if output[-1] != draft_id:
            return output
    output.append(choose(len(walk.drafts)))
    return output


def _walk_greedy(walk: _Walk) -> list[int | None]:
    return _walk_choices(walk, walk.argmax)


def _walk_match(walk: _Walk) -> list[int | None]:
    return _walk_choices(walk, walk.draw_target)


def _walk_coupled(walk: _Walk) -> list[int | None]:
    return _walk_choices(walk, walk.draw_coupled)


def _walk_standard(walk: _Walk) -> list[int | None]:
    output: list[int | None] = []
    for slot, draft_id in enumerate(walk.drafts):
        if not walk.is_token(slot):
            return [*output, walk.draw_target(slot)]
        target_prob = float(walk.target_probs(slot)[draft_id])
        draft_prob = walk.draft_prob(slot)
        if not draft_prob > 0.0:
            return [*output, walk.draw(slot)]
        if not walk.noise.accepts[slot] * draft_prob < target_prob:
            return [*output, walk.draw_residual(slot) if target_prob == target_prob else None]
        output.append(draft_id)
    return [*output, walk.draw_target(len(walk.drafts))]


def _walk_synthetic(walk: _Walk) -> list[int | None]:
    choose = walk.argmax if walk.row.is_greedy else walk.draw_target
    output: list[int | None] = []
    for slot, draft_id in enumerate(walk.drafts):
        rates = walk.step.inputs.synthetic_rates
        rate = rates[slot] if slot < len(rates) else 0.0
        if not (walk.is_token(slot) and walk.noise.accepts[slot] < rate):
            return [*output, choose(slot)]
        output.append(draft_id)
    return [*output, choose(len(walk.drafts))]


def _path_weights(walk: _Walk) -> tuple[list[float], list[float], bool] | None:
    """Block verification's running weights (first 1.0), the target's chance of each token, and whether the block
    can be accepted whole: a weight of 0 rules that out. A slot without a token ends the block before it.
    None: a row that is needed is unusable."""
    weights, target_probs = [1.0], []
    for slot, draft_id in enumerate(walk.drafts):
        if not walk.is_token(slot):
            break
        target_prob = float(walk.target_probs(slot)[draft_id])
        if target_prob != target_prob:
            return None
        draft_prob = walk.draft_prob(slot)
        target_probs.append(target_prob)
        weight = min(1.0, weights[-1] * target_prob / draft_prob) if draft_prob > 0.0 else 0.0
        if weight == 0.0:
            return weights, target_probs, False
        weights.append(weight)
    return weights, target_probs, True


def _block_chance(walk: _Walk, slot: int, weight: float, target_prob: float) -> float:
    """Chance that exactly the tokens before ``slot`` are accepted, given that no more are."""
    if not walk.draft_prob(slot) > 0.0:
        return weight
    if isinstance(walk.law(slot)[0], Dense | Indirect):
        walk.target_probs(slot)
        walk.subtract_draft(slot, weight)
        mass = float(walk.step.target.entries.sum())
    else:
        mass = weight * (1.0 - target_prob)
    left = mass + 1.0 - weight
    return mass / left if left > 0.0 else 1.0


def _walk_block(walk: _Walk) -> list[int | None]:
    path = _path_weights(walk)
    if path is None:
        return [None]
    weights, target_probs, can_be_whole = path
    last = len(weights) - 1
    count = last
    while count > 0:
        uniform, weight = walk.noise.accepts[count - 1], weights[count]
        is_whole = can_be_whole and count == last
        # the chance never exceeds the weight, so a vocabulary pass is due only below it
        if uniform < weight and (is_whole or uniform < _block_chance(walk, count, weight, target_probs[count])):
            break
        count -= 1
    accepted: list[int | None] = list(walk.drafts[:count])
    if (can_be_whole and count == last) or not walk.draft_prob(count) > 0.0:
        return [*accepted, walk.draw_target(count)]
    walk.target_probs(count)
    return [*accepted, walk.draw_residual(count, weights[count])]


_WALKS: dict[Rule, Callable[[_Walk], list[int | None]]] = {
    "greedy": _walk_greedy,
    "match": _walk_match,
    "standard": _walk_standard,
    "block": _walk_block,
    "synthetic": _walk_synthetic,
    "coupled": _walk_coupled,
}


class TorchRules:
    """The vectorised path; holds the two vocabulary buffers, so one object serves one thread."""

    def __init__(self) -> None:
        self._buffers: tuple[_Weights, _Weights] | None = None
        self._vocab_size = -1

    def verify(self, inputs: VerifyInputs) -> Verification:
        """Decide every row of checked ``inputs``; tensors come back on the device of the logits."""
        if self._buffers is None or self._vocab_size != inputs.vocab_size:
            self._vocab_size = inputs.vocab_size
            self._buffers = _Weights(inputs.vocab_size), _Weights(inputs.vocab_size)
        step = _Step(inputs, *self._buffers)
        walks = [_Walk(step, number) for number in range(len(inputs.rows))]
        outputs = [_WALKS[walk.row.rule](walk) for walk in walks]
        return _collect(outputs, [walk.path if walk.tree else None for walk in walks], inputs)


def _collect(outputs: list[list[int | None]], paths: list[list[int] | None], inputs: VerifyInputs) -> Verification:
    """Pad with -1. A row that needed unusable logits emits id 0 alone, which is in range, and is flagged."""
    outputs = [row if row[-1] is not None else [None] for row in outputs]
    width = (max(inputs.num_draft_tokens, default=0) if inputs.parents is None else inputs.max_depth) + 1
    padded = [[0 if token is None else token for token in row] + [-1] * (width - len(row)) for row in outputs]
    device = inputs.target_logits.device
    invalid = [row[-1] is None for row in outputs]
    return Verification(
        output_token_ids=torch.tensor(padded, dtype=torch.int32, device=device).reshape(len(outputs), width),
        num_accepted_tokens=torch.tensor([len(row) - 1 for row in outputs], dtype=torch.int32, device=device),
        is_invalid=torch.tensor(invalid, dtype=torch.bool, device=device),
        accepted_draft_indices=None if inputs.parents is None else _indices(outputs, paths, width - 1).to(device),
    )


def _indices(outputs: list[list[int | None]], paths: list[list[int] | None], width: int) -> torch.Tensor:
    """``[batch, width]`` int32: each row's accepted draft tokens, of a chain the first ones."""
    accepted = [
        list(range(len(row) - 1)) if path is None else path[: len(row) - 1]
        for row, path in zip(outputs, paths, strict=True)
    ]
    padded = [nodes + [-1] * (width - len(nodes)) for nodes in accepted]
    return torch.tensor(padded, dtype=torch.int32).reshape(len(outputs), width)
