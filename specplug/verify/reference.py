"""The rules of verification, written to be read: this file is the specification that the fast paths follow.

A rule takes one request's target laws, draft tokens and draft laws, and a source of chance; it returns the tokens
the request emits in this step: accepted draft tokens and exactly one more. Chances are float64 numpy arrays over
the target vocabulary, ``[vocab]``. Everything random goes through ``Chance``, so the same lines can be run on
counter-based noise (``verify_reference``) or enumerated exactly (``specplug.testing.exactness``).

Sources: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (2023), and Chen et
al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023), for ``standard``; Sun et al.,
"Block Verification Accelerates Speculative Decoding" (2024), for ``block``; Daliri et al., "Coupling without
Communication and Drafter-Invariant Speculative Decoding" (2024), for ``coupled``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from specplug.trees import ROOT, Tree
from specplug.types import Dense, Indirect, Law, Verification
from specplug.verify import noise
from specplug.verify.inputs import RowInputs, Rule, VerifyInputs, slot_laws
from specplug.verify.noise import TILE, Purpose

__all__ = [
    "Chance",
    "PhiloxChance",
    "RowProblem",
    "UnusableRowError",
    "block",
    "coupled",
    "draft_law",
    "draw",
    "greedy",
    "match",
    "residual",
    "standard",
    "synthetic",
    "target_law",
    "verify_reference",
]

Chances: TypeAlias = NDArray[np.float64]


class UnusableRowError(ValueError):
    """A row of target logits that is needed holds NaN, or no finite entry."""


class Chance(Protocol):
    """Where a rule's randomness comes from. Each (method, slot) is asked at most once per step."""

    def accepts(self, slot: int, chance: float) -> bool:
        """True with probability ``chance``, independent for every slot."""

    def draw(self, slot: int, weights: Chances) -> int:
        """A token with probability in proportion to ``weights``, independent of every ``accepts``."""


@dataclass(frozen=True, slots=True)
class RowProblem:
    """One request. ``target_laws(i)`` is the law of the token at slot i given the first i draft tokens.

    ``draft_laws(i)`` is the law that draft token i was drawn from: all mass on the token itself where it is
    certain or its law is unknown. It is asked only for slots that hold a token.
    With a ``tree`` the draft tokens are its nodes, and ``target_laws(i + 1)`` is the law of the token after node i
    given the tokens on its path.
    """

    row: RowInputs
    vocab_size: int
    drafts: tuple[int, ...]
    target_laws: Callable[[int], Chances]
    draft_laws: Callable[[int], Chances]
    rates: tuple[float, ...] = ()
    tree: Tree | None = None

    def next_node(self, node: int, token_id: int) -> int | None:
        """The first draft token behind ``node`` (or ``ROOT``) that is ``token_id``."""
        if self.tree is not None:
            children: Sequence[int] = self.tree.children(node)
        else:
            children = range(node + 1, min(node + 2, len(self.drafts)))
        return next((child for child in children if self.drafts[child] == token_id), None)

    def is_token(self, slot: int) -> bool:
        """A placeholder (-1) or an id past the vocabulary is no token: it ends the chain."""
        return 0 <= self.drafts[slot] < self.vocab_size


# --- laws ---------------------------------------------------------------------------------------------------


def target_law(logits: Chances, row: RowInputs) -> Chances:
    """Processed target law: temperature, then min-p, top-k and top-p, ties with the last entry kept included.

    Greedy rows: all mass on the first maximum. Raises ``UnusableRowError``.
    """
    top = logits.max()
    if not -math.inf < top < math.inf:
        raise UnusableRowError(f"the largest target logit is {top}")
    if row.is_greedy or row.rule == "greedy":
        return _certain(int(logits.argmax()), len(logits))
    weights: Chances = np.exp((logits - top) / row.temperature)
    if row.min_p > 0.0:
        weights[logits < top + row.temperature * math.log(row.min_p)] = 0.0
    if 0 < row.top_k < len(logits):
        weights[logits < np.sort(logits)[-row.top_k]] = 0.0
    if row.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        mass_before = np.cumsum(weights[order]) - weights[order]
        num_kept = max(1, int((mass_before < row.top_p * weights.sum()).sum()))
        weights[weights < weights[order[num_kept - 1]]] = 0.0
    return np.asarray(weights / weights.sum())


def draft_law(law: Law, index: int, token_id: int, vocab_size: int) -> Chances:
    """The law of a draft token over target ids; ``index`` is its row in the law's tensors.

    A token whose law is unknown counts as certain: ``standard`` and ``block`` are exact for every fixed token, so
    they are exact given whatever token came, as sample-and-match is.
    """
    if isinstance(law, Dense):
        return _softmax(law.draft_logits[index].detach().double().cpu().numpy())
    if isinstance(law, Indirect):
        logits = law.draft_logits[index].detach().double().cpu().numpy()
        probs = np.exp(logits - float(law.logsumexp[index].detach()))
        ids = law.target_to_draft_ids.cpu().numpy()
        return np.where(ids >= 0, probs[ids], 0.0)
    return _certain(token_id, vocab_size)


def _softmax(logits: Chances) -> Chances:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def _certain(token_id: int, vocab_size: int) -> Chances:
    probs = np.zeros(vocab_size)
    probs[token_id] = 1.0
    return probs


def residual(target: Chances, draft: Chances, weight: float = 1.0) -> Chances:
    """``(weight * target - draft)+``; where that is numerically empty the two agree, so the target itself."""
    left = np.maximum(weight * target - draft, 0.0)
    return left if left.sum() > 0.0 else target


# --- rules --------------------------------------------------------------------------------------------------


def match(problem: RowProblem, chance: Chance) -> list[int]:
    """Sample-and-match: emit the target's own draw, go on from a draft token here that says the same.

    Never biased by the drafts, whatever they are, because only target draws are emitted. In a tree the draw is that
    of the node reached, and descends to the child with that token: of all rules for a tree of certain tokens the one
    that accepts most (SpecInfer, Miao et al., 2024, with certain candidates).
    """
    emitted: list[int] = []
    node: int | None = ROOT
    while node is not None:
        emitted.append(chance.draw(len(emitted), problem.target_laws(node + 1)))
        node = problem.next_node(node, emitted[-1])
    return emitted


def greedy(problem: RowProblem, chance: Chance) -> list[int]:
    """``match`` with a certain target: accept while the draft is the first maximum of its row."""
    return match(problem, chance)


def coupled(problem: RowProblem, chance: Chance) -> list[int]:
    """``match`` with noise that the proposer shared: Daliri et al., Gumbel form.

    The draw is ``argmax(log target + g)`` with ``g`` keyed by (seed, position) and entry; a proposer that took
    ``argmax(log draft + g)`` agrees with it at least as often as ``(1 - TV) / (1 + TV)``.
    """
    return match(problem, chance)


def standard(problem: RowProblem, chance: Chance) -> list[int]:
    """Leviathan et al., algorithm 1: accept x with ``min(1, target(x) / draft(x))``, else draw the residual."""
    accepted: list[int] = []
    for slot, draft_id in enumerate(problem.drafts):
        target = problem.target_laws(slot)
        if not problem.is_token(slot):
            return [*accepted, chance.draw(slot, target)]
        draft = problem.draft_laws(slot)
        if not draft[draft_id] > 0.0:  # the law denies its own token: reject it, and trust none of the law
            return [*accepted, chance.draw(slot, target)]
        if not chance.accepts(slot, min(1.0, target[draft_id] / draft[draft_id])):
            return [*accepted, chance.draw(slot, residual(target, draft))]
        accepted.append(draft_id)
    return [*accepted, chance.draw(len(problem.drafts), problem.target_laws(len(problem.drafts)))]


def block(problem: RowProblem, chance: Chance) -> list[int]:
    """Sun et al., algorithm 2: test every prefix from the longest, keep the first that passes.

    With ``P_0 = 1`` and ``P_i = min(1, P_(i-1) target(x_i) / draft(x_i))``, a prefix of i tokens passes with
    ``h_i = Z_i / (Z_i + 1 - P_i)``, ``Z_i`` the mass of ``(P_i target - draft)+`` after it, and ``h = P`` for the
    whole block. A failure at i says nothing about shorter prefixes: their tests are independent.
    """
    size = next((slot for slot in range(len(problem.drafts)) if not problem.is_token(slot)), len(problem.drafts))
    weights = [1.0]
    for slot in range(size):
        if weights[-1] == 0.0:  # so are all that follow, and no longer prefix passes
            size = slot
            break
        draft_id, target, draft = problem.drafts[slot], problem.target_laws(slot), problem.draft_laws(slot)
        ratio = target[draft_id] / draft[draft_id] if draft[draft_id] > 0.0 else 0.0
        weights.append(min(1.0, weights[-1] * ratio))
    if size and chance.accepts(size - 1, weights[size]):
        return [*problem.drafts[:size], chance.draw(size, problem.target_laws(size))]
    for count in range(size - 1, -1, -1):
        left = _block_residual(problem, count, weights[count])
        if count == 0 or chance.accepts(count - 1, _prefix_chance(float(left.sum()), weights[count])):
            target = problem.target_laws(count)
            return [*problem.drafts[:count], chance.draw(count, left if left.sum() > 0.0 else target)]
    return [chance.draw(0, problem.target_laws(0))]


def _block_residual(problem: RowProblem, count: int, weight: float) -> Chances:
    target, draft = problem.target_laws(count), problem.draft_laws(count)
    if not draft[problem.drafts[count]] > 0.0:  # as in ``standard``: trust none of the law
        return weight * target
    return np.maximum(weight * target - draft, 0.0)


def _prefix_chance(mass: float, weight: float) -> float:
    left = mass + 1.0 - weight
    return mass / left if left > 0.0 else 1.0


def synthetic(problem: RowProblem, chance: Chance) -> list[int]:
    """Test mode, not lossless: accept slot i with a given rate; the token that ends the row is the target's."""
    accepted: list[int] = []
    for slot, draft_id in enumerate(problem.drafts):
        rate = problem.rates[slot] if slot < len(problem.rates) else 0.0
        if not problem.is_token(slot) or not chance.accepts(slot, rate):
            break
        accepted.append(draft_id)
    return [*accepted, chance.draw(len(accepted), problem.target_laws(len(accepted)))]


_RULES: dict[Rule, Callable[[RowProblem, Chance], list[int]]] = {
    "greedy": greedy,
    "match": match,
    "coupled": coupled,
    "standard": standard,
    "block": block,
    "synthetic": synthetic,
}


# --- chance from counter-based noise --------------------------------------------------------------------------


def draw(weights: Chances, uniform: float, tickets: Sequence[float]) -> int:
    """Draw in proportion to ``weights``: a race between tiles, then the inverse distribution inside the winner.

    Tile t wins with chance in proportion to its mass because ``mass_t / ticket_t`` is largest with that chance for
    unit exponential tickets. Racing makes the choice stable: a small change of the logits rarely changes it.
    """
    scores = [weights[start : start + TILE].sum() / tickets[start // TILE] for start in range(0, len(weights), TILE)]
    start = TILE * max(range(len(scores)), key=scores.__getitem__)
    inside = weights[start : start + TILE]
    sums = np.cumsum(inside)
    for offset in range(len(inside)):
        if sums[offset] > uniform * sums[-1]:
            return start + offset
    return start + int(np.flatnonzero(inside)[-1])


class PhiloxChance:
    """The numbers that every implementation uses for one request's step."""

    def __init__(self, row: RowInputs, vocab_size: int) -> None:
        self.row, self.vocab_size = row, vocab_size

    def accepts(self, slot: int, chance: float) -> bool:
        words = noise.philox(self.row.seed, Purpose.ACCEPT, self.row.step, self.row.position + slot, 0)
        return bool(noise.uniforms(words) < chance)

    def draw(self, slot: int, weights: Chances) -> int:
        position = self.row.position + slot
        if self.row.rule == "greedy" or self.row.is_greedy:
            return int(weights.argmax())
        if self.row.rule == "coupled":
            gumbel = noise.gumbel(self.row.seed, position, self.vocab_size).numpy()
            with np.errstate(divide="ignore"):
                return int((np.log(weights) + gumbel).argmax())
        is_match = self.row.rule == "match"
        purpose, step = (Purpose.TARGET, 0) if is_match else (Purpose.RECOVER, self.row.step)
        words = noise.philox(self.row.seed, purpose, step, position, noise.draw_blocks(self.vocab_size))
        tickets = noise.exponentials(words[1:].reshape(-1)).tolist()
        return draw(weights, float(noise.uniforms(words[0])), tickets)


def verify_reference(inputs: VerifyInputs) -> Verification:
    """Every row of ``inputs`` by its rule, slowly. Rows that need unusable logits emit id 0 alone and are flagged."""
    outputs, invalid, paths = [], [], []
    for number in range(len(inputs.rows)):
        problem = row_problem(inputs, number)
        try:
            outputs.append(_RULES[problem.row.rule](problem, PhiloxChance(problem.row, problem.vocab_size)))
            invalid.append(False)
        except UnusableRowError:
            outputs.append([0])
            invalid.append(True)
        paths.append(_path(problem, outputs[-1][:-1]))
    width = inputs.max_depth + 1
    padded = [tokens + [-1] * (width - len(tokens)) for tokens in outputs]
    indices = [path + [-1] * (width - 1 - len(path)) for path in paths]
    return Verification(
        output_token_ids=torch.tensor(padded, dtype=torch.int32).reshape(len(outputs), width),
        num_accepted_tokens=torch.tensor([len(tokens) - 1 for tokens in outputs], dtype=torch.int32),
        is_invalid=torch.tensor(invalid, dtype=torch.bool),
        accepted_draft_indices=None
        if inputs.parents is None
        else torch.tensor(indices, dtype=torch.int32).reshape(len(outputs), width - 1),
    )


def _path(problem: RowProblem, accepted: Sequence[int]) -> list[int]:
    """The nodes of accepted tokens; of a chain its first ones."""
    if problem.tree is None:
        return list(range(len(accepted)))
    path: list[int] = []
    for token_id in accepted:
        node = problem.next_node(path[-1] if path else ROOT, token_id)
        path += [] if node is None else [node]
    return path


def row_problem(inputs: VerifyInputs, number: int) -> RowProblem:
    """The problem of one row of a batch."""
    start, stop = inputs.slot_starts[number : number + 2]
    row, laws = inputs.rows[number], slot_laws(inputs.laws)[start:stop]
    drafts = tuple(inputs.draft_token_ids[start:stop].tolist())

    def target(slot: int) -> Chances:
        return target_law(inputs.target_logits[start + number + slot].detach().double().cpu().numpy(), row)

    def draft(slot: int) -> Chances:
        law, index = laws[slot]
        return draft_law(law, index, drafts[slot], inputs.vocab_size)

    tree = inputs.trees[number]
    return RowProblem(row, inputs.vocab_size, drafts, target, draft, inputs.synthetic_rates, tree)
