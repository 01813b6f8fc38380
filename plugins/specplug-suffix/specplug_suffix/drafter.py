"""Suffix drafting free of any host: feed it texts, ask it for drafts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from specplug.proposers.backoff import Load
from specplug.proposers.index import ROOT, CountingAutomaton
from specplug_suffix.acceptance import AcceptanceTable, Counts, Origin
from specplug_suffix.lengths import DraftLengths
from specplug_suffix.local import LocalIndex, num_equal, token_array
from specplug_suffix.segment import Cursor, Segment
from specplug_suffix.shared import Namespace, SharedIndex

__all__ = ["DraftRules", "RequestText", "SuffixDrafter"]

PIECE = 16
"""Tokens of a running request that are shared at a time."""
TAIL = 64
"""Tokens of a text that are looked up when it meets texts it has not followed so far."""

Found: TypeAlias = tuple[int, int, Segment | None, int, int]
"""A match to draft from: state, length, segment (None: the request's own text), position there, draft length.

Of matches in a segment the position is not used, of the own text's not the state."""

_EMPTY: array[int] = array("i")


@dataclass(frozen=True, slots=True)
class DraftRules:
    """What is drafted. ``step_tokens``: most draft tokens of all requests in a step, None for no bound;
    ``min_probability``: cut a draft where its estimated probability falls below; ``shares_running``: share outputs
    while they are written; ``counts_carried``: a copy that goes on after a break is drafted from at greater length."""

    lengths: DraftLengths
    max_draft: int
    step_tokens: int | None = None
    min_probability: float = 0.0
    shares_running: bool = True
    counts_carried: bool = True


class RequestText:
    """One request: its text, its matches in the shared segments, and its last draft."""

    __slots__ = ("counts", "cursor", "draft", "draft_start", "is_in_prompt", "local", "longest_followed", "matches",
                 "namespace", "num_followed", "num_prompt_tokens", "num_shared", "origin", "segments")  # fmt: skip

    def __init__(self, num_prompt_tokens: int, local: LocalIndex, namespace: Namespace) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.is_in_prompt = num_prompt_tokens > 0
        self.local = local
        self.namespace = namespace
        self.segments: tuple[Segment, ...] = ()
        self.matches: list[tuple[int, int]] = []
        """(state, length) per segment of ``segments``: of the text's first ``num_followed`` tokens."""
        self.longest_followed = 0
        """The greatest of these lengths."""
        self.num_followed = 0
        self.cursor: Cursor | None = None
        self.num_shared = num_prompt_tokens
        """Leading tokens that are shared, or never will be."""
        self.draft = _EMPTY
        self.draft_start = 0
        self.origin: Origin = "local"
        """Where the last draft came from."""
        self.counts: Counts | None = None
        """Where it is booked."""

    def __len__(self) -> int:
        return len(self.local.token_ids)


class SuffixDrafter:
    """Drafts what followed the longest ending of a text where it occurred before: in the text itself, in the
    outputs of its namespace, or in the corpus.

    Equal calls in equal order give equal drafts, in any process.
    """

    def __init__(self, rules: DraftRules, shared: SharedIndex) -> None:
        self.rules = rules
        self.shared = shared
        self.acceptance = AcceptanceTable()

    def start(self, num_prompt_tokens: int, cache_salt: str | None = None) -> RequestText:
        """A request begins; its first ``num_prompt_tokens`` tokens are its prompt, which is never shared."""
        rules = self.rules
        return RequestText(
            num_prompt_tokens,
            LocalIndex(counts=rules.min_probability > 0),
            self.shared.enter(cache_salt),
        )

    def append(self, text: RequestText, token_ids: Sequence[int]) -> None:
        """The next tokens of a text, a part of the prompt or of the output.

        Raises ``ValueError``, ``OverflowError`` or ``TypeError`` for ids that cannot be; nothing changes then.
        """
        if text.is_in_prompt:
            self._append_prompt(text, token_ids)
            return
        local = text.local
        local.append_output(token_ids)
        num_tokens = len(local.token_ids)
        num_behind = num_tokens - text.num_followed
        is_piece = num_tokens - text.num_shared >= PIECE
        # A match grows by one a token at most: as long as the text's own is no shorter, the others may wait.
        if text.longest_followed + num_behind > local.match_length or is_piece:
            _follow(text)
        if is_piece and self.rules.shares_running:
            self._share(text)

    def propose(self, text: RequestText, limit: int) -> list[int]:
        """At most ``limit`` tokens that may follow the text."""
        return self._draft(text, self._find(text, limit)).tolist()

    def propose_all(
        self, texts: Sequence[RequestText], limits: Sequence[int], load: Load | None = None
    ) -> list[list[int]]:
        """One draft per text. Where all together are longer than ``step_tokens``, each is shortened in proportion.

        ``load``: of the step; drafts go only as far as they are likely to pay in it, and are judged by all of them.
        """
        found = [self._find(text, limit) for text, limit in zip(texts, limits, strict=True)]
        total = sum(each[-1] for each in found)
        most = self.rules.step_tokens
        if most is not None and total > most:
            found = [(*each[:-1], each[-1] * most // total) for each in found]
        drafts = [self._draft(text, each).tolist() for text, each in zip(texts, found, strict=True)]
        if load is None:
            return drafts
        rates = [0.5 if text.counts is None else text.counts.rate for text in texts]
        lengths = load.lengths(rates, [len(draft) for draft in drafts])
        return [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]

    def finish(self, text: RequestText) -> None:
        """The request ended; what it wrote stays in its namespace."""
        self._share(text)
        if text.cursor is not None and not text.cursor.segment.is_dropped:
            text.cursor.segment.close(text.cursor)
        self.shared.leave(text.namespace)

    def acceptance_rate(self, text: RequestText) -> float:
        """The chance that a token of the text's last draft is accepted if those before it are; 0.0 without a draft."""
        return 0.0 if text.counts is None or not text.draft else text.counts.rate

    def expected_accepted(self, text: RequestText) -> float:
        """Accepted tokens to be expected of the text's last draft."""
        return 0.0 if text.counts is None else text.counts.expected(len(text.draft))

    # --- inside -----------------------------------------------------------------------------------------------

    def _append_prompt(self, text: RequestText, token_ids: Sequence[int]) -> None:
        """Tokens of the prompt, and what follows if it ends among them."""
        num_missing = text.num_prompt_tokens - len(text)
        ids = token_array(token_ids)
        text.local.append(ids[:num_missing])
        text.num_followed = len(text)
        text.is_in_prompt = len(ids) < num_missing
        if len(ids) > num_missing:
            self.append(text, ids[num_missing:])

    def _find(self, text: RequestText, limit: int) -> Found:
        """The longest match; of equal ones the text's own, then the newest segment's."""
        if text.segments is not text.namespace.segments:
            _follow(text)
        length, start, carried = text.local.match()
        state = ROOT
        segment: Segment | None = None
        number = len(text.matches) if text.longest_followed > length else 0
        while number:
            number -= 1
            if text.matches[number][1] > length:
                other = text.segments[number]
                other_state, other_length = other.longest_going_on(*text.matches[number])
                if other_length > length:
                    state, length, segment, carried = other_state, other_length, other, 0
        rules = self.rules
        num_tokens = rules.lengths[length + carried if rules.counts_carried else length]
        return state, length, segment, start, num_tokens if num_tokens <= limit else max(0, limit)

    def _draft(self, text: RequestText, found: Found) -> array[int]:
        num_tokens = len(text.local.token_ids)
        if text.draft:
            self._settle(text, num_tokens)
        state, length, segment, start, num_wanted = found
        if not num_wanted:
            draft = _EMPTY
        elif segment is None:
            draft = text.local.copy(start, num_wanted)
        else:
            draft = segment.copy(state, num_wanted)
        least = self.rules.min_probability
        if least:
            if segment is None:
                automaton, state = text.local.automaton, text.local.match_state
            else:
                automaton = segment.automaton
            if isinstance(automaton, CountingAutomaton):
                draft = draft[: automaton.num_likely(state, draft, least)]
        text.draft, text.draft_start = draft, num_tokens
        if draft:
            text.origin = "local" if segment is None else "shared"
            text.counts = self.acceptance.counts(text.origin, length)
        return draft

    def _settle(self, text: RequestText, num_tokens: int) -> None:
        """Book how the last draft did."""
        num_came = num_tokens - text.draft_start
        if not num_came or text.counts is None:
            return
        draft, counts = text.draft, text.counts
        came = text.local.token_ids[text.draft_start : text.draft_start + len(draft)]
        num_accepted = num_equal(draft, came)
        counts.num_drafts += 1
        counts.num_accepted_tokens += num_accepted
        if num_accepted < len(came):
            counts.num_misses += 1
            counts.num_draft_tokens += len(draft)
        else:
            counts.num_draft_tokens += num_accepted

    def _share(self, text: RequestText) -> None:
        new = text.local.token_ids[text.num_shared :]
        if new:
            text.num_shared += len(new)
            text.cursor = self.shared.add(text.namespace, text.cursor, new)


def _follow(text: RequestText) -> None:
    """Bring the matches in the shared segments up to the end of the text."""
    if text.segments is not text.namespace.segments:
        _meet(text)
    matches, longest = text.matches, 0
    new = text.local.token_ids[text.num_followed :]
    for number, segment in enumerate(text.segments):
        state, length = matches[number]
        state, length = matches[number] = segment.automaton.follow(state, length, new)
        if length > longest:
            longest = length
    text.longest_followed = longest
    text.num_followed += len(new)


def _meet(text: RequestText) -> None:
    """Look the text up in segments that came since; matches in the others stay as they are."""
    segments = text.namespace.segments
    known = dict(zip(text.segments, text.matches, strict=True))
    tail = text.local.token_ids[max(0, text.num_followed - TAIL) : text.num_followed]
    text.matches = [
        known[segment] if segment in known else segment.automaton.follow(ROOT, 0, tail) for segment in segments
    ]
    text.segments = segments
