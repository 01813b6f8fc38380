"""A host in miniature that calls one proposer's hooks, with acceptance in the test's hands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from specplug.draft_space import IdentityDraftSpace
from specplug.errors import PluginError
from specplug.hooks import process_manager
from specplug.hooks.contract import find_implementations, new_plugin_manager, register_checked
from specplug.methods import PluginConfig, PluginContext
from specplug.models.target import TargetOutput
from specplug.sampling_params import SamplingParams
from specplug.testing.rig import CheckFailed, MakeProposer, Rig
from specplug.trees import Tree, misplaced_node
from specplug.types import (
    Batch,
    Draft,
    Request,
    RequestStep,
    Session,
    SessionSummary,
    StepOutcome,
    TokenIds,
    cumulative,
)

if TYPE_CHECKING:
    import numpy as np

__all__ = ["HookDriver", "Rule", "Step", "follow", "greedy", "keep"]

Rule: TypeAlias = Callable[[Sequence[int], Sequence[int]], Sequence[int]]
"""(draft tokens, the target's n + 1 greedy tokens) -> the tokens emitted: a prefix of the draft and one more.

Of a tree it is asked on every path, and the path on which it emits most is taken, the last one of several."""


def greedy(draft: Sequence[int], choices: Sequence[int]) -> list[int]:
    """The rule of greedy verification: accept while the draft is the target's choice."""
    num_accepted = next((i for i, token_id in enumerate(draft) if token_id != choices[i]), len(draft))
    return [*draft[:num_accepted], choices[num_accepted]]


def keep(num_tokens: int, *, vocab_size: int) -> Rule:
    """Accept ``num_tokens`` of each draft whatever the target says, then emit a token other than the drafted one."""

    def rule(draft: Sequence[int], choices: Sequence[int]) -> list[int]:
        kept = list(draft[:num_tokens])
        choice = choices[len(kept)]
        is_drafted = len(kept) < len(draft) and draft[len(kept)] == choice
        return [*kept, (choice + 1) % vocab_size if is_drafted else choice]

    return rule


def follow(text: Sequence[int]) -> Rule:
    """Force a text: accept while the draft agrees with ``text``, which must not be empty, then emit its next token."""

    def rule(draft: Sequence[int], choices: Sequence[int]) -> list[int]:
        agree = (i for i, token_id in enumerate(text[:-1]) if i == len(draft) or draft[i] != token_id)
        return list(text[: next(agree, len(text) - 1) + 1])

    return rule


@dataclass
class _Row:
    request: Request
    token_ids: list[int]
    num_computed_tokens: int = 0
    num_verify_steps: int = 0
    kept_nodes: Sequence[int] = ()
    """The draft tokens that the last step accepted."""

    @property
    def is_decoding(self) -> bool:
        num_tokens = len(self.token_ids)
        return self.num_computed_tokens == num_tokens - 1 and num_tokens > len(self.request.prompt_token_ids)


@dataclass(frozen=True)
class Step:
    """What one step saw. ``draft`` is what the proposer returned, unchecked; ``drafts`` its token ids by request, and
    ``trees`` the shapes of those that are no chains."""

    batch: Batch
    limits: tuple[int, ...]
    draft: Draft | None = None
    drafts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    trees: Mapping[str, Tree] = field(default_factory=dict)


class HookDriver:
    """Runs the hooks of one proposer in the host's order over a rig's target; one session.

    There is no end of sequence here; a request that reached ``max_model_len`` stands still.
    A hook that raises, and a draft that cannot be used at all, raise :class:`CheckFailed`.
    """

    def __init__(self, make_proposer: MakeProposer, rig: Rig) -> None:
        self.rig = rig
        self.target = rig.make_target()
        self.session = _session(rig, self.target)
        self.rows: list[_Row] = []
        self._plugins = new_plugin_manager()
        context = PluginContext(self.session, self.target, self._create, self._draft_space)
        self.proposer = make_proposer(context)
        try:
            find_implementations(self.proposer, "the proposer")
            register_checked(self._plugins, self.proposer, "under_test")
        except PluginError as error:
            raise CheckFailed(str(error)) from error
        layers = getattr(self.proposer, "hidden_state_layers", rig.capabilities.hidden_state_layers)
        self.target.tap(sorted(layers))
        self._num_steps = 0
        self._num_requests = 0
        self.call("start_session", session=self.session)

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call one hook. Raises ``CheckFailed`` when the plugin raises."""
        try:
            return getattr(self._plugins.hook, f"specplug_{hook}")(**arguments)
        except Exception as error:
            raise CheckFailed(f"specplug_{hook} raised {type(error).__name__}: {error}") from error

    def start(self, request_id: str, prompt: Sequence[int], *, seed: int = 0) -> Request:
        """Admit a request; it takes the last row."""
        request = Request(request_id, make_token_ids(prompt), SamplingParams(temperature=0.0, max_tokens=None), seed)
        self.target.acquire(request)
        self.rows.append(_Row(request, list(prompt)))
        self._num_requests += 1
        self.call("start_request", request=request)
        return request

    def finish(self, request_id: str, reason: str = "stop") -> None:
        """Let a request leave; the last row moves into its place, as in the host."""
        number = next(i for i, row in enumerate(self.rows) if row.request.request_id == request_id)
        self.call("finish_request", request=self.rows[number].request, reason=reason)
        self.target.release(number)
        self.rows[number] = self.rows[-1]
        self.rows.pop()

    def close(self) -> None:
        """Abort what runs and end the session."""
        for row in reversed(list(self.rows)):
            self.finish(row.request.request_id, "abort")
        self.call("finish_session", summary=SessionSummary(self._num_steps, self._num_requests))

    def text(self, request_id: str) -> list[int]:
        """The request's output tokens so far."""
        row = next(row for row in self.rows if row.request.request_id == request_id)
        return row.token_ids[len(row.request.prompt_token_ids) :]

    def prefill(self, rule: Rule = greedy) -> None:
        """Step until every row decodes; ``rule`` writes the first output tokens."""
        while not all(row.is_decoding for row in self.rows):
            self.step(rule, limit=0)

    def step(self, rule: Rule = greedy, *, limit: int | Sequence[int] | None = None) -> Step:
        """One step over all rows. ``limit`` caps the drafts, one number for all rows or one each; 0 asks for none."""
        import torch

        with torch.inference_mode():
            asked = self._ask(limit)
            drafts = [asked.drafts[row.request.request_id] for row in self.rows]
            trees = [asked.trees.get(row.request.request_id) for row in self.rows]
            before = [row.num_computed_tokens for row in self.rows]
            counts = [self._num_query_tokens(row, draft) for row, draft in zip(self.rows, drafts, strict=True)]
            output, choices = self._forward(counts, drafts, trees)
            steps = [
                self._commit(number, draft, count, choices[number], rule, trees[number])
                for number, (draft, count) in enumerate(zip(drafts, counts, strict=True))
            ]
            self.call("advance", batch=self._advance_batch(before, cumulative(counts), output))
            self._num_steps += 1
            outcome = StepOutcome(step=self._num_steps, rows=tuple(step for step in steps if step is not None))
            self.call("accept_metrics", outcome=outcome)
        return asked

    # --- inside -----------------------------------------------------------------------------------------

    def _ask(self, limit: int | Sequence[int] | None) -> Step:
        """Plan and propose."""
        batch = self._batch()
        limits = self._limits(limit)
        if any(limits):
            answers = [answer for answer in self.call("plan", batch=batch) if answer is not None]
            limits = tuple(min(all_of_row) for all_of_row in zip(limits, *answers, strict=True))
        draft = self.call("propose", batch=batch, limits=limits) if any(limits) else None
        drafts = self._usable(batch, draft)
        if draft is None or draft.parents is None:
            return Step(batch, limits, draft, drafts)
        trees = zip(batch.request_ids, self._trees(draft), strict=True)
        return Step(batch, limits, draft, drafts, {name: tree for name, tree in trees if tree is not None})

    def _trees(self, draft: Draft) -> list[Tree | None]:
        parents = draft.parents or ()
        if len(parents) != draft.num_slots:
            raise CheckFailed(f"the draft has {draft.num_slots} tokens and {len(parents)} parents")
        for row, (start, stop) in enumerate(pairwise(cumulative(draft.num_draft_tokens))):
            node = misplaced_node(parents[start:stop])
            if node is not None:
                parent = parents[start + node]
                raise CheckFailed(
                    f"node {node} of row {row} has the parent {parent}; a parent is an earlier node, or -1"
                )
        return draft.trees()

    def _limits(self, limit: int | Sequence[int] | None) -> tuple[int, ...]:
        most = self.rig.num_speculative_tokens
        wanted = [most if limit is None else limit] * len(self.rows) if not isinstance(limit, Sequence) else limit
        room = [self.target.max_model_len - len(row.token_ids) - 1 for row in self.rows]
        pairs = zip(self.rows, wanted, room, strict=True)
        return tuple(max(0, min(want, most, fits)) if row.is_decoding else 0 for row, want, fits in pairs)

    def _usable(self, batch: Batch, draft: Any) -> dict[str, tuple[int, ...]]:
        """Token ids by request; what makes the rest of the step impossible fails here."""
        if draft is None:
            return dict.fromkeys(batch.request_ids, ())
        if not isinstance(draft, Draft):
            raise CheckFailed(f"specplug_propose returned a {type(draft).__name__}; return a Draft or None")
        counts, token_ids = draft.num_draft_tokens, draft.draft_token_ids.tolist()
        if len(counts) != len(batch) or sum(counts) != len(token_ids):
            raise CheckFailed(
                f"the draft counts {len(counts)} rows and {sum(counts)} tokens for a batch of {len(batch)} rows and "
                f"{len(token_ids)} token ids; give one count per row of the batch, 0 for none"
            )
        for token_id in token_ids:
            if not 0 <= token_id < self.target.vocab_size:
                raise CheckFailed(f"draft token {token_id} is outside the vocabulary of {self.target.vocab_size} ids")
        starts = cumulative(counts)
        rows = [tuple(token_ids[start:stop]) for start, stop in pairwise(starts)]
        return dict(zip(batch.request_ids, rows, strict=True))

    def _num_query_tokens(self, row: _Row, draft: Sequence[int]) -> int:
        if len(row.token_ids) == self.target.max_model_len:
            return 0
        if row.is_decoding:
            return 1 + len(draft)
        return min(len(row.token_ids) - row.num_computed_tokens, self.target.max_query_tokens)

    def _forward(
        self, counts: Sequence[int], drafts: Sequence[Sequence[int]], trees: Sequence[Tree | None]
    ) -> tuple[TargetOutput, list[list[int]]]:
        """The target's output, and its greedy choice after every query token by row."""
        import torch

        query = [
            [*row.token_ids[row.num_computed_tokens :], *draft][:count]
            for row, draft, count in zip(self.rows, drafts, counts, strict=True)
        ]
        input_ids = torch.tensor([token_id for row in query for token_id in row], device=self.target.device)
        every = torch.arange(len(input_ids), device=self.target.device)
        of_rows = {row: tree for row, tree in enumerate(trees) if tree is not None and counts[row]}
        output = self.target.forward(input_ids, counts, every, **({"trees": of_rows} if of_rows else {}))
        chosen = output.logits.argmax(dim=-1).tolist()
        starts = cumulative(counts)
        return output, [chosen[start:stop] for start, stop in pairwise(starts)]

    def _commit(
        self, number: int, draft: Sequence[int], count: int, choices: Sequence[int], rule: Rule, tree: Tree | None
    ) -> RequestStep | None:
        row = self.rows[number]
        row.kept_nodes = ()
        num_read = row.num_computed_tokens + count - len(draft)
        if not count or num_read < len(row.token_ids):  # no room left, or still inside its prompt
            row.num_computed_tokens = num_read
            return None
        room = self.target.max_model_len - len(row.token_ids)
        emitted, path = _best_path(rule, draft, choices[count - len(draft) - 1 :], tree)
        emitted = emitted[:room]
        row.num_computed_tokens = num_read + len(emitted) - 1
        row.kept_nodes = path[: len(emitted) - 1]
        if moves := [(num_read + node, num_read + to) for to, node in enumerate(row.kept_nodes) if node != to]:
            self.target.compact([number] * len(moves), [old for old, _ in moves], [new for _, new in moves])
        self.target.rollback(number, row.num_computed_tokens)
        row.token_ids.extend(emitted)
        row.num_verify_steps += 1
        num_accepted = len(emitted) - 1
        most = len(draft) if tree is None else tree.max_depth
        return RequestStep(
            row.request.request_id, most, num_accepted, num_accepted, len(emitted), num_draft_nodes=len(draft)
        )

    def _batch(
        self, new_token_ids: Iterable[TokenIds] = (), new_hidden_states: Mapping[int, Any] | None = None
    ) -> Batch:
        rows = self.rows
        return Batch(
            requests=tuple(row.request for row in rows),
            token_ids=tuple(make_token_ids(row.token_ids) for row in rows),
            num_computed_tokens=tuple(row.num_computed_tokens for row in rows),
            remaining=tuple(self.target.max_model_len - len(row.token_ids) for row in rows),
            num_verify_steps=tuple(row.num_verify_steps for row in rows),
            new_token_ids=tuple(new_token_ids),
            new_hidden_states=new_hidden_states or {},
        )

    def _advance_batch(self, before: Sequence[int], starts: Sequence[int], output: TargetOutput) -> Batch:
        spans = [(old, row.num_computed_tokens) for old, row in zip(before, self.rows, strict=True)]
        new = [make_token_ids(row.token_ids[old:now]) for row, (old, now) in zip(self.rows, spans, strict=True)]
        places = [_places(row, start, len(ids)) for row, start, ids in zip(self.rows, starts, new, strict=False)]
        states = {layer: tuple(values[each] for each in places) for layer, values in output.hidden_states.items()}
        return self._batch(new, states)

    def _create(self, method: str, options: Mapping[str, Any]) -> object:
        spec = process_manager().spec(method)
        config = PluginConfig(method, self.rig.num_speculative_tokens, spec.options(**options), dict(options))
        return spec.factory(config, PluginContext(self.session, self.target, self._create, self._draft_space))

    def _draft_space(self, draft: Any) -> Any:
        space = self.call("draft_space", target=self.target, draft=draft)
        return IdentityDraftSpace.between(self.target, draft) if space is None else space


def _best_path(
    rule: Rule, draft: Sequence[int], choices: Sequence[int], tree: Tree | None
) -> tuple[list[int], Sequence[int]]:
    """What the rule emits, and the draft tokens that it was asked on."""
    best: tuple[list[int], Sequence[int]] = ([], ())
    paths = [tuple(range(len(draft)))] if tree is None else [branch.nodes for branch in tree.branches]
    for path in paths:
        emitted = list(rule([draft[node] for node in path], [choices[0], *(choices[node + 1] for node in path)]))
        if len(emitted) >= len(best[0]):
            best = (emitted, path)
    return best


def _places(row: _Row, start: int, num_kept: int) -> list[int]:
    """Where a row's newly kept tokens stand among the step's, the row's own beginning at ``start``."""
    first_node = start + num_kept - len(row.kept_nodes)
    return [*range(start, first_node), *(first_node + node for node in row.kept_nodes)]


def make_token_ids(token_ids: Sequence[int]) -> TokenIds:
    """``TokenIds`` over a fresh array."""
    import numpy as np

    array: np.ndarray[Any, np.dtype[np.int32]] = np.asarray(token_ids, dtype=np.int32)
    return TokenIds(array)


def _session(rig: Rig, target: Any) -> Session:
    return Session(
        vocab_size=target.vocab_size,
        max_num_seqs=target.max_num_seqs,
        max_model_len=target.max_model_len,
        num_speculative_tokens=rig.num_speculative_tokens,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        eos_token_ids=target.eos_token_ids,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
    )
