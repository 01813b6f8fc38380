"""Exact enumeration: does a verification rule preserve the target's law? No sampling, no statistics.

Worlds are tiny (2 to 4 tokens, up to 3 drafts) with random laws that depend on the whole context. All drafts and all
random decisions of ``specplug.verify.reference`` are enumerated with their probabilities, what a step emits is
completed with the target's own law to a fixed length, and the result is compared with plain sampling by total
variation. ``python -m specplug.testing.exactness`` prints the table and the negative controls, which must fail.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from specplug.types import Dense, Indirect, Law, LawSpan, OneHot, Unknown
from specplug.verify import reference
from specplug.verify.inputs import RowInputs, Rule, VerifyInputs

__all__ = ["TOLERANCE", "Finding", "World", "exact_findings", "main", "negative_controls"]

TOLERANCE = 1e-12
"""Most total variation that counts as equal."""
CONTROL_FLOOR = 1e-3
"""Least total variation by which a negative control must fail."""

VOCAB = 3
DEPTH = 3

Tokens: TypeAlias = tuple[int, ...]
Laws: TypeAlias = Mapping[Tokens, NDArray[np.float64]]
StepRule: TypeAlias = Callable[[reference.RowProblem, reference.Chance], list[int]]
Outcome: TypeAlias = tuple[Tokens, ...]
"""What each request emitted."""
Spread: TypeAlias = dict[Outcome, float]


@dataclass(frozen=True)
class World:
    """A target and a draft law for every context of up to ``depth`` tokens."""

    target: Laws
    draft: Laws
    vocab: int = VOCAB
    depth: int = DEPTH

    @classmethod
    def random(cls, seed: int, vocab: int = VOCAB, depth: int = DEPTH, shared: float = 0.5) -> World:
        """Dirichlet laws; drafts share that part of their mass with the target; some target tokens are impossible."""
        rng = np.random.default_rng(seed)
        contexts = [c for n in range(depth + 1) for c in itertools.product(range(vocab), repeat=n)]
        target = {c: rng.dirichlet([0.7] * vocab) for c in contexts}
        for context in contexts[:: seed % 3 + 2]:
            target[context] = _normalised(np.where(np.arange(vocab) == seed % vocab, 0.0, target[context]))
        draft = {c: shared * target[c] + (1.0 - shared) * rng.dirichlet([0.7] * vocab) for c in contexts}
        return cls(target, draft, vocab, depth)


Planner: TypeAlias = Callable[[tuple[World, World], list[Tokens]], list[int]]


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    name: str
    total_variation: float
    mean_accepted: float | None = None


# --- enumeration of a step ------------------------------------------------------------------------------------


class _Scripted:
    """A ``Chance`` that follows a script of option numbers, then takes the first, and notes what it passed by."""

    def __init__(self, script: Tokens) -> None:
        self.script = script
        self.taken: list[int] = []
        self.untried: list[Tokens] = []
        self.probability = 1.0
        self.offset = 0
        """Position of slot 0; moves between steps."""

    def _choose(self, options: list[tuple[int, float]]) -> int:
        possible = [(value, p) for value, p in options if p > 0.0]
        depth = len(self.taken)
        number = self.script[depth] if depth < len(self.script) else 0
        if depth >= len(self.script):
            self.untried += [(*self.taken, other) for other in range(1, len(possible))]
        self.taken.append(number)
        self.probability *= possible[number][1]
        return possible[number][0]

    def accepts(self, slot: int, chance: float) -> bool:
        return bool(self._choose([(1, chance), (0, 1.0 - chance)]))

    def draw(self, slot: int, weights: NDArray[np.float64]) -> int:
        return self._choose(list(enumerate((weights / weights.sum()).tolist())))


# --- drafts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """How drafts come about and what law they claim.

    ``kinds``: law per slot, cycled. ``length(world, x)``: how many of the full draft's tokens are verified.
    ``claims_softmax``: a certain draft reported with a dense law. ``is_renormalised``: False reports a restricted
    law without renormalising it.
    """

    kinds: tuple[str, ...]
    length: Callable[[World, Tokens], int] = lambda world, x: len(x)
    claims_softmax: bool = False
    is_renormalised: bool = True
    placeholder_slot: int | None = None

    def kind(self, slot: int) -> str:
        return self.kinds[slot % len(self.kinds)]


def _normalised(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(weights / weights.sum())


def _restricted(probs: NDArray[np.float64]) -> NDArray[np.float64]:
    """The draft vocabulary of ``indirect`` lacks target token 1."""
    return np.where(np.arange(len(probs)) == 1, 0.0, probs)


def _sampled_law(world: World, kind: str, context: Tokens) -> NDArray[np.float64]:
    """What the draft token at ``context`` is really drawn from."""
    probs = world.draft[context]
    if kind == "one_hot":
        return np.asarray(np.eye(world.vocab)[int(probs.argmax())])
    return _normalised(_restricted(probs)) if kind == "indirect" else probs


def draw_drafts(world: World, scheme: Scheme, chance: reference.Chance, num_slots: int, context: Tokens = ()) -> Tokens:
    """Draft tokens after ``context``, drawn as the scheme's proposer really draws them."""
    drafts: Tokens = ()
    for slot in range(num_slots):
        drafts += (chance.draw(slot, _sampled_law(world, scheme.kind(slot), context + drafts)),)
    return drafts


def _claimed_law(world: World, scheme: Scheme, slot: int, context: Tokens) -> Law:
    kind, probs = scheme.kind(slot), world.draft[context]
    if kind == "unknown":
        return Unknown()
    if kind == "one_hot" and not scheme.claims_softmax:
        return OneHot()
    if kind != "indirect":
        return Dense(_logits(probs)[None])
    # draft ids run backwards and have one id more that no target id maps to
    draft_logits = (
        torch.cat((_logits(_restricted(probs)).flip(0), torch.tensor([-torch.inf], dtype=torch.float64))) + 3.0
    )
    reach = draft_logits if scheme.is_renormalised else _logits(probs) + 3.0
    ids = torch.arange(world.vocab).flip(0)
    ids[1] = -1
    return Indirect(draft_logits[None], reach.logsumexp(0)[None], ids)


def _logits(probs: NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy(probs).log()


def problem_of(
    world: World, scheme: Scheme, row: RowInputs, drafts: Tokens, context: Tokens = ()
) -> reference.RowProblem:
    """The verification problem that a host would pose for these drafts."""
    num_slots = len(drafts)
    laws = tuple(
        LawSpan(slot, slot + 1, _claimed_law(world, scheme, slot, context + drafts[:slot])) for slot in range(num_slots)
    )
    ids = [-1 if slot == scheme.placeholder_slot else drafts[slot] for slot in range(num_slots)]
    logits = [_logits(world.target[context + drafts[:slot]]) for slot in range(num_slots + 1)]
    inputs = VerifyInputs(torch.stack(logits), torch.tensor(ids, dtype=torch.int64), (num_slots,), laws, (row,))
    problem = reference.row_problem(inputs, 0)
    return replace(problem, target_laws=cache(problem.target_laws), draft_laws=cache(problem.draft_laws))


# --- comparing with plain decoding --------------------------------------------------------------------------------


def distribution(run: Callable[[_Scripted], Outcome], make: Callable[[Tokens], _Scripted] = _Scripted) -> Spread:
    """Every outcome of ``run`` with its total probability."""
    spread: Spread = {}
    scripts: list[Tokens] = [()]
    while scripts:
        chance = make(scripts.pop())
        outcome = run(chance)
        scripts += chance.untried
        spread[outcome] = spread.get(outcome, 0.0) + chance.probability
    return spread


def _complete(emitted: Spread, worlds: tuple[Laws, ...], length: int) -> Spread:
    """Extend what each request emitted with its target's own law to ``length`` tokens."""
    full: Spread = {}

    def extend(outcome: Outcome, weight: float) -> None:
        short = next((r for r, tokens in enumerate(outcome) if len(tokens) < length), None)
        if short is None:
            full[outcome] = full.get(outcome, 0.0) + weight
            return
        for token, probability in enumerate(worlds[short][outcome[short]].tolist()):
            if probability > 0.0:
                longer = (*outcome[:short], (*outcome[short], token), *outcome[short + 1 :])
                extend(longer, weight * probability)

    for outcome, weight in emitted.items():
        extend(tuple(tokens[:length] for tokens in outcome), weight)
    return full


def total_variation(emitted: Spread, targets: tuple[Laws, ...], length: int) -> float:
    """Between the emitted streams, completed to ``length`` tokens, and independent plain decoding."""
    got = _complete(emitted, targets, length)
    plain = _complete({((),) * len(targets): 1.0}, targets, length)
    return 0.5 * sum(abs(got.get(key, 0.0) - plain.get(key, 0.0)) for key in {*got, *plain})


def processed(world: World, row: RowInputs) -> Laws:
    """What plain decoding samples from, by formulas of its own: greedy, or temperature and top-k."""
    if row.rule == "greedy":
        return {c: np.eye(world.vocab)[int(p.argmax())] for c, p in world.target.items()}
    powered = {c: p ** (1.0 / row.temperature) for c, p in world.target.items()}
    kept = {c: np.where(p >= np.sort(p)[-row.top_k], p, 0.0) if row.top_k else p for c, p in powered.items()}
    return {c: _normalised(p) for c, p in kept.items()}


def check_step(world: World, scheme: Scheme, row: RowInputs, rule: StepRule) -> tuple[float, float]:
    """One step of one request: total variation, and mean number of accepted tokens."""

    @cache
    def problem(drafts: Tokens) -> reference.RowProblem:
        return problem_of(world, scheme, row, drafts)

    def run(chance: _Scripted) -> Outcome:
        x = draw_drafts(world, scheme, chance, world.depth)
        x = x[: scheme.length(world, x)]
        return (tuple(rule(problem(x), _sharing(chance, world, x) if row.rule == "coupled" else chance)),)

    emitted = distribution(run)
    mean_accepted = sum((len(tokens) - 1) * weight for (tokens,), weight in emitted.items())
    return total_variation(emitted, (processed(world, row),), world.depth + 1), mean_accepted


class _Sharing:
    """For ``coupled``: the target's draw depends on the draft token, as noise that both share makes it do.

    The dependence is the strongest there is (a maximal coupling); each draw alone still follows the target.
    """

    def __init__(self, chance: _Scripted, world: World, drafts: Tokens) -> None:
        self.chance, self.world, self.drafts = chance, world, drafts

    def accepts(self, slot: int, chance: float) -> bool:
        return self.chance.accepts(slot, chance)

    def draw(self, slot: int, weights: NDArray[np.float64]) -> int:
        if slot >= len(self.drafts):
            return self.chance.draw(slot, weights)
        target, draft = _normalised(weights), self.world.draft[self.drafts[:slot]]
        agreed = min(1.0, float(target[self.drafts[slot]] / draft[self.drafts[slot]]))
        given_draft = agreed * np.eye(len(target))[self.drafts[slot]]
        if agreed < 1.0:
            given_draft += (1.0 - agreed) * _normalised(np.maximum(target - draft, 0.0))
        return self.chance.draw(slot, given_draft)


def _sharing(chance: _Scripted, world: World, drafts: Tokens) -> reference.Chance:
    return _Sharing(chance, world, drafts)


class _KeyedByPosition(_Scripted):
    """Accept uniforms keyed by position alone: a later step meets a number whose range is known already."""

    def __init__(self, script: Tokens) -> None:
        super().__init__(script)
        self.known: dict[int, tuple[float, float]] = {}

    def accepts(self, slot: int, chance: float) -> bool:
        low, high = self.known.get(self.offset + slot, (0.0, 1.0))
        bound = min(max(chance, low), high)
        is_accepted = super().accepts(slot, (bound - low) / (high - low))
        self.known[self.offset + slot] = (low, bound) if is_accepted else (bound, high)
        return is_accepted


def check_two_steps(world: World, rule: StepRule, make: Callable[[Tokens], _Scripted] = _Scripted) -> float:
    """Two steps of two drafts in a row, completed to four tokens; ``world`` has depth 5."""
    scheme, row = Scheme(("dense",)), RowInputs("standard")

    @cache
    def problem(drafts: Tokens, context: Tokens) -> reference.RowProblem:
        return problem_of(world, scheme, row, drafts, context)

    def run(chance: _Scripted) -> Outcome:
        tokens: Tokens = ()
        for _ in range(2):
            chance.offset = len(tokens)
            drafts = draw_drafts(world, scheme, chance, 2, tokens)
            tokens += tuple(rule(problem(drafts, tokens), chance))
        return (tokens[:4],)

    return total_variation(distribution(run, make), (world.target,), 4)


def check_two_requests(worlds: tuple[World, World], rule: StepRule, plan: Planner) -> float:
    """One step of two requests whose draft lengths were decided together: the joint law of both streams."""
    scheme, row = Scheme(("dense",)), RowInputs("standard")

    @cache
    def problem(number: int, drafts: Tokens) -> reference.RowProblem:
        return problem_of(worlds[number], scheme, row, drafts)

    def run(chance: _Scripted) -> Outcome:
        drafts = [draw_drafts(world, scheme, chance, world.depth) for world in worlds]
        lengths = plan(worlds, drafts)
        return tuple(
            tuple(rule(problem(number, x[:length]), chance))
            for number, (x, length) in enumerate(zip(drafts, lengths, strict=True))
        )

    return total_variation(distribution(run), tuple(w.target for w in worlds), worlds[0].depth + 1)


# --- what may decide how much is verified -------------------------------------------------------------------------


def _confidence(world: World, context: Tokens) -> float:
    return float(world.draft[context].max())


def _stop_before_unsure(world: World, x: Tokens) -> int:
    """Looks at earlier tokens only."""
    return next((i for i in range(len(x)) if _confidence(world, x[:i]) < 0.6), len(x))


def _first_unlikely(world: World, x: Tokens) -> int:
    return next((i for i in range(len(x)) if world.draft[x[:i]][x[i]] < 0.3), len(x))


def _keep_then_stop(world: World, x: Tokens) -> int:
    """Looks at the token itself, but only to stop after it."""
    return min(len(x), _first_unlikely(world, x) + 1)


def _admit(worlds: tuple[World, World], drafts: list[Tokens], goes_on: Callable[[int, float], bool]) -> list[int]:
    """Admit slots by survival, one at a time; the confidence of a slot reads admitted tokens only."""
    lengths, survival = [0, 0], [_confidence(world, ()) for world in worlds]
    while True:
        best = max((r for r in range(2) if lengths[r] < len(drafts[r])), key=survival.__getitem__, default=None)
        if best is None or not goes_on(sum(lengths), survival[best]):
            return lengths
        lengths[best] += 1
        if lengths[best] < len(drafts[best]):
            survival[best] *= _confidence(worlds[best], drafts[best][: lengths[best]])


def _fixed_budget(worlds: tuple[World, World], drafts: list[Tokens]) -> list[int]:
    return _admit(worlds, drafts, lambda num_admitted, survival: num_admitted < 2)


def _early_stop(worlds: tuple[World, World], drafts: list[Tokens]) -> list[int]:
    return _admit(worlds, drafts, lambda num_admitted, survival: survival > 0.5)


# --- the table ----------------------------------------------------------------------------------------------------

_SCHEMES: dict[str, Scheme] = {
    "one_hot": Scheme(("one_hot",)),
    "dense": Scheme(("dense",)),
    "indirect": Scheme(("indirect",)),
    "unknown": Scheme(("unknown",)),
    "mixed": Scheme(("dense", "one_hot", "indirect")),
    "mixed 2": Scheme(("unknown", "indirect", "dense")),
    "dense, -1 in slot 1": Scheme(("dense",), placeholder_slot=1),
    "dense, stop before unsure": Scheme(("dense",), _stop_before_unsure),
    "dense, keep then stop": Scheme(("dense",), _keep_then_stop),
}

_ROWS: dict[str, RowInputs] = {
    "greedy": RowInputs("greedy", is_greedy=True),
    "match": RowInputs("match"),
    "standard": RowInputs("standard"),
    "block": RowInputs("block"),
    "coupled": RowInputs("coupled"),
    "standard, T 0.7, top-k 2": RowInputs("standard", temperature=0.7, top_k=2),
    "block, T 0.7, top-k 2": RowInputs("block", temperature=0.7, top_k=2),
}

_RULES: dict[Rule, StepRule] = {
    "greedy": reference.greedy,
    "match": reference.match,
    "standard": reference.standard,
    "block": reference.block,
    "coupled": reference.coupled,
}


def exact_findings(num_worlds: int = 6) -> Iterator[Finding]:
    """Every rule with every law; the worst of ``num_worlds`` worlds. All must be within ``TOLERANCE``."""
    worlds = [World.random(seed) for seed in range(num_worlds)]
    for row_name, row in _ROWS.items():
        for scheme_name, scheme in _SCHEMES.items():
            if row.rule == "coupled" and scheme.kinds != ("dense",):
                continue  # the noise is shared with sampled drafts; for others the rule is match
            found = [check_step(world, scheme, row, _RULES[row.rule]) for world in worlds]
            yield Finding(
                f"{row_name} / {scheme_name}", max(f[0] for f in found), sum(f[1] for f in found) / len(found)
            )
    long = [World.random(seed, depth=5, shared=0.2) for seed in range(num_worlds)]
    pairs = [(World.random(seed, 2, 2), World.random(seed + 100, 2, 2)) for seed in range(num_worlds)]
    for rule in (reference.standard, reference.block):
        name = rule.__name__
        yield Finding(f"{name} / two steps", max(check_two_steps(world, rule) for world in long))
        for plan_name, plan in (("fixed budget", _fixed_budget), ("early stop", _early_stop)):
            worst = max(check_two_requests(pair, rule, plan) for pair in pairs)
            yield Finding(f"{name} / two requests jointly, {plan_name}", worst)
    yield Finding("synthetic / acceptance against its rates", max(check_synthetic(world) for world in worlds))


def check_synthetic(world: World) -> float:
    """Not lossless: largest difference between the rates asked for and the chances of acceptance."""
    rates, row = (0.8, 0.75, 0.5), RowInputs("synthetic")
    problem = replace(problem_of(world, _SCHEMES["dense"], row, (0, 1, 0)), rates=rates)
    emitted = distribution(lambda chance: (tuple(reference.synthetic(problem, chance)),))
    reached = [sum(w for (tokens,), w in emitted.items() if len(tokens) > slot + 1) for slot in range(3)]
    wanted: list[float] = np.cumprod(rates).tolist()
    return max(abs(got - want) for got, want in zip(reached, wanted, strict=True))


# --- negative controls --------------------------------------------------------------------------------------------


def _block_with_token_residual(problem: reference.RowProblem, chance: reference.Chance) -> list[int]:
    """Block acceptance, but the ending token comes from ``(target - draft)+`` as in the token rule."""

    class TokenResidual:
        def accepts(self, slot: int, probability: float) -> bool:
            return chance.accepts(slot, probability)

        def draw(self, slot: int, weights: NDArray[np.float64]) -> int:
            if slot == len(problem.drafts):
                return chance.draw(slot, weights)
            return chance.draw(slot, reference.residual(problem.target_laws(slot), problem.draft_laws(slot)))

    return reference.block(problem, TokenResidual())


def negative_controls(num_worlds: int = 6) -> Iterator[Finding]:
    """Mistakes seen in released code. Each must fail by at least ``CONTROL_FLOOR``, or the check sees nothing."""
    worlds = [World.random(seed, shared=0.2) for seed in range(num_worlds)]
    long = [World.random(seed, depth=5, shared=0.2) for seed in range(num_worlds)]
    row = _ROWS["standard"]
    wrong_schemes = {
        "arg-max draft reported with a softmax law": Scheme(("one_hot",), claims_softmax=True),
        "token dropped by its own probability, bonus from the target": Scheme(("dense",), _first_unlikely),
        "restricted law not renormalised": Scheme(("indirect",), is_renormalised=False),
    }
    wide = [World.random(seed, vocab=4, shared=0.2) for seed in range(num_worlds)]
    worst = max(check_step(world, _SCHEMES["dense"], row, _block_with_token_residual)[0] for world in wide)
    yield Finding("block with the token rule's residual", worst)
    for name, scheme in wrong_schemes.items():
        yield Finding(name, max(check_step(world, scheme, row, reference.standard)[0] for world in worlds))
    worst = max(check_two_steps(world, reference.block, _KeyedByPosition) for world in long)
    yield Finding("block with uniforms keyed by position alone", worst)


def main() -> int:
    """Print both tables; the exit status is 0 iff every rule is exact and every control fails."""
    from specplug.testing.tree_exactness import tree_controls, tree_findings

    write = sys.stdout.write
    is_good = True
    write(f"{'rule / law of the drafts':<58} max TV   mean accepted\n")
    for finding in itertools.chain(exact_findings(), tree_findings()):
        is_good &= finding.total_variation <= TOLERANCE
        accepted = "" if finding.mean_accepted is None else f"{finding.mean_accepted:8.3f}"
        write(f"{finding.name:<58} {finding.total_variation:.1e} {accepted}\n")
    write(f"\n{'negative control (must fail)':<58} max TV\n")
    for finding in itertools.chain(negative_controls(), tree_controls()):
        is_good &= finding.total_variation >= CONTROL_FLOOR
        write(f"{finding.name:<58} {finding.total_variation:.1e}\n")
    write("\nall exact, all controls fail\n" if is_good else "\nNOT EXACT, or a control did not fail\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
