"""Conformance checks that call a proposer's hooks directly, one function each.

Every check takes ``make_proposer`` and the rig to run it on, and raises ``CheckFailed`` with what it saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specplug.testing.driver import HookDriver, Step, follow, greedy, keep
from specplug.testing.rig import CheckFailed, MakeProposer, Rig
from specplug.testing.state import find_mentions, num_items
from specplug.types import Dense, Draft, Indirect, LawSpan, OneHot, SourceSpan, Unknown

__all__ = [
    "check_batch_permutation",
    "check_contract",
    "check_leaked_state",
    "check_lifecycle",
    "check_proposes",
    "check_rollback",
    "text_drafts",
]

DEFAULT_RIG = Rig()

Drafts = Mapping[tuple[str, int], tuple[Any, ...]]
"""(request id, number of its tokens) -> the draft it got there; of a tree (token, parent) pairs."""


def check_proposes(make_proposer: MakeProposer, rig: Rig = DEFAULT_RIG) -> None:
    """The proposer proposes something on the rig's prompts; otherwise the other checks say nothing.

    When it fails: give the rig prompts (and a target) on which your method has something to say; or
    ``specplug_propose`` is missing, or returns None or empty drafts always.
    """
    driver = _started(make_proposer, rig)
    if not any(any(driver.step().drafts.values()) for _ in range(rig.num_tokens)):
        raise CheckFailed(f"no draft token in {rig.num_tokens} steps over {len(rig.prompts)} prompts")


def check_contract(make_proposer: MakeProposer, rig: Rig = DEFAULT_RIG) -> None:
    """Drafts are well formed at every step and limit; nothing that was handed in is changed.

    When it fails: look at how ``specplug_propose`` builds its ``Draft``: one count per row of the batch, at most
    ``limits[row]`` of it (0 included; of a tree all nodes count), target ids, parents before their children, laws that
    cover every slot once and in order, logits of the very distribution that was sampled. Laws and trees are declared in
    the method's capabilities. Hooks carry ``@hookimpl`` and no default arguments. ``TokenIds`` and tensors of the batch
    are read-only.
    """
    driver = _started(make_proposer, rig)
    driver.step()
    most = rig.num_speculative_tokens
    for number in range(rig.num_tokens):
        limits = [(number + row) % (most + 1) for row in range(len(rig.prompts))]
        expected = [list(row.token_ids) for row in driver.rows]
        rule = greedy if number % 2 else keep(number % 3, vocab_size=driver.target.vocab_size)
        step = driver.step(rule, limit=limits)
        _check_unchanged(step, expected)
        if step.draft is not None:
            _check_draft(step.draft, step.limits, driver.target.vocab_size, rig)
    driver.close()


def check_lifecycle(make_proposer: MakeProposer, rig: Rig = DEFAULT_RIG) -> None:
    """Requests end before their first step, in the middle, and by abort; ids come again; sessions stand apart.

    When it fails: ``specplug_finish_request`` must work at any time after ``specplug_start_request``, and drop what
    was kept, so that the same id can start anew; ``specplug_finish_session`` must work after requests were aborted;
    each ``make_proposer`` call must give a fresh object, without state in its class or module.
    """
    driver = HookDriver(make_proposer, rig)
    driver.start("a", rig.prompts[0])
    driver.finish("a", "abort")
    driver.start("a", rig.prompts[0])
    driver.step()
    driver.finish("a", "abort")
    driver.start("a", rig.prompts[0])
    _steps(driver, rig.num_tokens // 2)
    driver.finish("a", "length")
    again = _drafts(driver, {"a": rig.prompts[1]}, rig.num_tokens)
    driver.close()
    fresh = HookDriver(make_proposer, rig)
    if fresh.proposer is driver.proposer:
        raise CheckFailed("make_proposer returned the same object twice; build a fresh one for every session")
    if not rig.shares_state:
        expected = _drafts(fresh, {"a": rig.prompts[1]}, rig.num_tokens)
        _compare(expected, again, "the request id had been used by an earlier request")
    fresh.close()


def check_leaked_state(make_proposer: MakeProposer, rig: Rig = DEFAULT_RIG) -> None:
    """After requests finished or were aborted, nothing of theirs is kept; shared state stays within its bound.

    When it fails: delete what you keep per request in ``specplug_finish_request`` (called for every reason, aborts
    included). The message shows where a request id was found, or how much more the plugin holds than before.
    """
    driver = HookDriver(make_proposer, rig)
    _wave(driver, rig, "warm-up")
    host = (driver.target, driver.session)
    before = num_items(driver.proposer, ignore=host)
    ids = _wave(driver, rig, "first") | _wave(driver, rig, "second")
    found = find_mentions(driver.proposer, ids, ignore=host)
    if found:
        raise CheckFailed(f"ids of finished requests are still held: {'; '.join(sorted(set(found))[:5])}")
    after = num_items(driver.proposer, ignore=host)
    allowed = max(before, rig.max_shared_items) if rig.shares_state else before
    if after > allowed:
        raise CheckFailed(
            f"the plugin holds {after} entries after {len(ids)} finished requests and {before} before them"
        )
    driver.close()


def check_batch_permutation(make_proposer: MakeProposer, rig: Rig = DEFAULT_RIG) -> None:
    """A request's drafts are the same alone, in a batch, in any row, and at a second run with the same seed.

    A shorter draft is allowed in company, since a method may draft less in a large batch.

    When it fails: state is kept by row instead of by ``request_id`` (rows move between steps), one request's draft
    looks at another's text, or draws come from a shared random generator: key them by ``request.seed`` and position.
    A method that shares state by design says so with ``shares_state`` in its rig.
    """
    if rig.shares_state:
        return
    named = {f"request {number}": prompt for number, prompt in enumerate(rig.prompts)}
    alone: dict[tuple[str, int], tuple[Any, ...]] = {}
    for request_id, prompt in named.items():
        alone.update(_drafts(HookDriver(make_proposer, rig), {request_id: prompt}, rig.num_tokens))
    for order in (list(named), list(reversed(named))):
        driver = HookDriver(make_proposer, rig)
        together = _drafts(driver, {request_id: named[request_id] for request_id in order}, rig.num_tokens)
        _compare(*_common(alone, together), f"it ran in a batch of {len(order)}")
    driver = HookDriver(make_proposer, rig)
    staggered = _staggered(driver, named, rig.num_tokens)
    _compare(*_common(alone, staggered), "other requests came and went, which moves rows")


def check_rollback(make_proposer: MakeProposer, rig: Rig = DEFAULT_RIG) -> None:
    """What was rejected leaves no trace: drafts depend on the text that stands, not on what was proposed before.

    Runs the proposer through steps of which none, some or all draft tokens are kept, and compares each draft with that
    of a fresh instance which followed the same text without ever proposing. A shorter draft is allowed, since standing
    down after misses is.

    When it fails: move state in ``specplug_advance``, by ``batch.new_token_ids``, never in ``specplug_propose``.
    """
    for prompt in rig.prompts:
        driver = HookDriver(make_proposer, rig)
        driver.start("r", prompt)
        driver.prefill()
        seen: list[tuple[int, tuple[Any, ...]]] = []
        for number in range(rig.num_tokens // 4):
            position = len(driver.text("r"))
            rule = keep((0, 1, 99, 2)[number % 4], vocab_size=driver.target.vocab_size)
            seen.append((position, _told(driver.step(rule), "r")))
        text = driver.text("r")
        if not rig.shares_state:
            _compare_with_replay(make_proposer, rig, prompt, text, seen)
        driver.close()


def text_drafts(make_proposer: MakeProposer, rig: Rig) -> list[list[tuple[Any, ...]]]:
    """Every draft of every step over the rig's prompts, greedily verified; by request, in order."""
    named = {f"request {number}": prompt for number, prompt in enumerate(rig.prompts)}
    driver = HookDriver(make_proposer, rig)
    drafts = _drafts(driver, named, rig.num_tokens)
    driver.close()
    return [[drafts[key] for key in sorted(drafts) if key[0] == request_id] for request_id in named]


# --- running ------------------------------------------------------------------------------------------------


def _started(make_proposer: MakeProposer, rig: Rig) -> HookDriver:
    driver = HookDriver(make_proposer, rig)
    for number, prompt in enumerate(rig.prompts):
        driver.start(f"request {number}", prompt)
    return driver


def _steps(driver: HookDriver, num_steps: int) -> None:
    for _ in range(num_steps):
        driver.step()


def _collect(driver: HookDriver, drafts: dict[tuple[str, int], tuple[Any, ...]]) -> None:
    step = driver.step()
    for request_id, token_ids, limit in zip(step.batch.request_ids, step.batch.token_ids, step.limits, strict=True):
        if limit:
            drafts[request_id, len(token_ids)] = _told(step, request_id)


def _told(step: Step, request_id: str) -> tuple[Any, ...]:
    """The draft as comparisons see it: its tokens, of a tree with their parents."""
    draft, tree = step.drafts[request_id], step.trees.get(request_id)
    return draft if tree is None else tuple(zip(draft, tree.parents, strict=True))


def _drafts(driver: HookDriver, named: Mapping[str, Sequence[int]], num_steps: int) -> Drafts:
    for request_id, prompt in named.items():
        driver.start(request_id, prompt, seed=_seed(prompt))
    drafts: dict[tuple[str, int], tuple[Any, ...]] = {}
    for _ in range(num_steps):
        _collect(driver, drafts)
    return drafts


def _seed(prompt: Sequence[int]) -> int:
    """The same for a prompt in whatever company."""
    return sum(prompt) * 1000 + len(prompt)


def _staggered(driver: HookDriver, named: Mapping[str, Sequence[int]], num_steps: int) -> Drafts:
    """The requests join one by one among short-lived others, whose leaving moves the rows."""
    drafts: dict[tuple[str, int], tuple[Any, ...]] = {}
    for number, (request_id, prompt) in enumerate(named.items()):
        driver.start(f"passing {number}", prompt[:1])
        driver.start(request_id, prompt, seed=_seed(prompt))
        _collect(driver, drafts)
        _collect(driver, drafts)
        driver.finish(f"passing {number}", "abort")
    for _ in range(num_steps):
        _collect(driver, drafts)
    return {key: draft for key, draft in drafts.items() if key[0] in named}


def _wave(driver: HookDriver, rig: Rig, label: str) -> set[str]:
    """Requests that start together and end at different steps, half of them by abort; their ids."""
    ids = [f"{label} request {number}" for number in range(len(rig.prompts))]
    for request_id, prompt in zip(ids, rig.prompts, strict=True):
        driver.start(request_id, prompt)
    for number, request_id in enumerate(ids):
        _steps(driver, rig.num_tokens // len(ids))
        driver.finish(request_id, "abort" if number % 2 else "stop")
    return set(ids)


# --- comparing ----------------------------------------------------------------------------------------------


def _common(one: Drafts, other: Drafts) -> tuple[Drafts, Drafts]:
    """Drafts of the same text, the longer cut to the length of the shorter."""
    lengths = {key: min(len(one[key]), len(other[key])) for key in one.keys() & other.keys()}
    return _cut(one, lengths), _cut(other, lengths)


def _cut(drafts: Drafts, lengths: Mapping[tuple[str, int], int]) -> Drafts:
    return {key: drafts[key][:length] for key, length in lengths.items()}


def _compare(expected: Drafts, seen: Drafts, circumstance: str) -> None:
    for (request_id, num_tokens), draft in sorted(expected.items()):
        other = seen.get((request_id, num_tokens))
        if other is not None and other != draft:
            raise CheckFailed(
                f"{request_id!r} at {num_tokens} tokens got the draft {list(draft)}, "
                f"and {list(other)} when {circumstance}"
            )


def _compare_with_replay(
    make_proposer: MakeProposer,
    rig: Rig,
    prompt: Sequence[int],
    text: Sequence[int],
    seen: Sequence[tuple[int, tuple[Any, ...]]],
) -> None:
    """At each position of ``text`` where a draft was ``seen``, what does an instance say that never proposed before?"""
    for position, draft in seen:
        driver = HookDriver(make_proposer, rig)
        driver.start("r", prompt)
        driver.prefill()
        while len(driver.text("r")) < position:
            driver.step(follow([text[len(driver.text("r"))]]), limit=0)
        fresh = _told(driver.step(), "r")
        driver.close()
        if draft != fresh[: len(draft)]:
            raise CheckFailed(
                f"after the text {[*prompt, *text[:position]]} the draft was {list(draft)}; an instance that followed "
                f"the same text and never proposed before says {list(fresh)}"
            )


def _check_unchanged(step: Step, expected: Sequence[Sequence[int]]) -> None:
    for request_id, token_ids, row in zip(step.batch.request_ids, step.batch.token_ids, expected, strict=True):
        if token_ids.tolist() != list(row):
            raise CheckFailed(f"the token ids of {request_id!r} were changed from {list(row)} to {token_ids.tolist()}")


def _check_draft(draft: Draft, limits: Sequence[int], vocab_size: int, rig: Rig) -> None:
    for row, (count, limit) in enumerate(zip(draft.num_draft_tokens, limits, strict=True)):
        if not 0 <= count <= limit:
            raise CheckFailed(f"row {row} got {count} draft tokens; its limit is {limit}")
    if draft.draft_token_ids.is_floating_point() or draft.draft_token_ids.dim() != 1:
        kind = f"{list(draft.draft_token_ids.shape)} {draft.draft_token_ids.dtype}"
        raise CheckFailed(f"draft_token_ids is {kind}; it must be a flat tensor of integers")
    if any(tree is not None for tree in draft.trees()) and not rig.capabilities.tree:
        raise CheckFailed("a draft holds a tree, and the method does not declare Capabilities(tree=True)")
    _check_cover(draft.laws, draft.num_slots, "laws")
    if draft.sources:
        _check_cover(draft.sources, draft.num_slots, "sources")
    for span in draft.laws:
        _check_law(span, draft, vocab_size, rig)
    if draft.confidence is not None:
        _check_confidence(draft.confidence, draft.num_slots)


def _check_cover(spans: Sequence[LawSpan] | Sequence[SourceSpan], num_slots: int, what: str) -> None:
    edges = [(span.start, span.stop) for span in spans]
    ends = [0, *(stop for _, stop in edges)]
    starts = [*(start for start, _ in edges), num_slots]
    if ends != starts or any(start >= stop for start, stop in edges):
        raise CheckFailed(f"{what} cover the slots {edges} of {num_slots}; they must cover every slot once, in order")


_LAW_NAMES: Mapping[type[Any], str] = {OneHot: "one_hot", Unknown: "unknown", Dense: "dense", Indirect: "indirect"}


def _check_law(span: LawSpan, draft: Draft, vocab_size: int, rig: Rig) -> None:
    name = _LAW_NAMES.get(type(span.law))
    if name not in rig.capabilities.laws:
        declared = ", ".join(sorted(rig.capabilities.laws))
        raise CheckFailed(f"a draft has the law {name or span.law!r}, and the method declares {declared}")
    if isinstance(span.law, Dense | Indirect):
        _check_logits(span, draft, vocab_size)


def _check_logits(span: LawSpan, draft: Draft, vocab_size: int) -> None:
    law: Any = span.law
    token_ids = draft.draft_token_ids[span.start : span.stop].long()
    width = vocab_size
    if isinstance(law, Indirect):
        if tuple(law.target_to_draft_ids.shape) != (vocab_size,):
            raise CheckFailed(
                f"target_to_draft_ids has the shape {list(law.target_to_draft_ids.shape)}, not [{vocab_size}]"
            )
        token_ids = law.target_to_draft_ids.to(token_ids.device)[token_ids].long()
        width = law.draft_logits.shape[-1]
    if tuple(law.draft_logits.shape) != (span.stop - span.start, width):
        raise CheckFailed(
            f"draft_logits has the shape {list(law.draft_logits.shape)}; the span has {span.stop - span.start} slots "
            f"and the vocabulary {width} ids"
        )
    log_probs = law.draft_logits.float().log_softmax(dim=-1)
    drawn = log_probs.gather(1, token_ids.clamp(min=0)[:, None])[:, 0]
    if log_probs.isnan().any() or bool((token_ids < 0).any()) or bool(drawn.isneginf().any()):
        raise CheckFailed("a draft token has no probability under the law it came with (or the law is not a number)")


def _check_confidence(confidence: Any, num_slots: int) -> None:
    if tuple(confidence.shape) != (num_slots,) or not bool(((confidence >= 0) & (confidence <= 1)).all()):
        raise CheckFailed(f"confidence must be {num_slots} numbers from 0 to 1; it is {confidence.tolist()}")
