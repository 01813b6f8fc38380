"""The hook contract. Phases in call order: registration, session, request, step.

Arguments are passed by keyword; an implementation may leave out those it does not use, and must not give
defaults. Hooks run per process, per session, per request and once per batch step, never per request inside a
step and never per token. Arguments are read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specplug.hooks.markers import hookspec

if TYPE_CHECKING:
    import torch

    from specplug.draft_space import DraftSpace
    from specplug.methods import MethodSpec
    from specplug.types import Batch, Draft, Request, Session, SessionSummary, StepOutcome, Verification

# --- registration -----------------------------------------------------------------------------------------


@hookspec
def specplug_register() -> Sequence[MethodSpec]:  # type: ignore[empty-body]
    """Describe the methods that this plugin offers.

    When: once per process, right after the entry point was imported; must not import torch.
    How often: once.
    Return: one ``MethodSpec`` per method; the entry point's name must be among them.
    None: not allowed; return an empty sequence for no methods.
    """


# --- session ----------------------------------------------------------------------------------------------


@hookspec
def specplug_start_session(session: Session) -> None:
    """A session begins.

    When: after the target has loaded and every instance of the session was built, before the first request.
    How often: once per session.
    Arguments: ``session``, sizes, lengths, device and dtype of the target, and K.
    Return: ignored. A ``ConfigError`` or ``ModelError`` passes and keeps the session from starting.
    """


@hookspec
def specplug_finish_session(summary: SessionSummary) -> None:
    """The session ends; release what was taken.

    When: when the host closes, also after an error.
    How often: once per session.
    Arguments: ``summary``, steps, requests and faults of the session.
    Return: ignored.
    """


@hookspec(firstresult=True)
def specplug_draft_space(target: Any, draft: Any) -> DraftSpace | None:
    """Map between a draft model's vocabulary and the target's.

    When: while an instance that holds a draft model is built.
    How often: once per draft model.
    Arguments: ``target`` and ``draft``, each with ``model``, ``tokenizer`` and ``vocab_size``.
    Return: the ``DraftSpace`` to draft through. The first answer that is not None stops the chain. A
    ``ConfigError`` or ``ModelError`` passes and keeps the session from starting.
    None: not mine; when nobody answers, the identity is used.
    """


# --- request ----------------------------------------------------------------------------------------------


@hookspec
def specplug_start_request(request: Request) -> None:
    """A request was admitted; it joins the batch in the next step.

    When: before the request's first step.
    How often: once per request run; the same id may come again after its finish.
    Arguments: ``request`` with id, prompt ids, sampling parameters, seed, cache_salt, per-request switches.
    Return: ignored.
    """


@hookspec
def specplug_finish_request(request: Request, reason: str) -> None:
    """A request left for good; drop everything kept for it.

    When: after the step that ended it (after ``specplug_accept_metrics``), or on abort.
    How often: once per request run, also on abort and on errors.
    Arguments: ``request``; ``reason``, one of "stop", "length", "abort", "error".
    Return: ignored.
    """


# --- step -------------------------------------------------------------------------------------------------


@hookspec
def specplug_plan(batch: Batch) -> Sequence[int] | None:
    """Cap this step's drafts.

    When: first in every step in which some row decodes.
    How often: once per step, whole batch.
    Arguments: ``batch``; rows still inside their prompt have ``is_decoding`` False and get no draft anyway.
    Return: one draft limit per row, 0 or more. The host takes the elementwise minimum over all answers, K,
    ``remaining - 1`` and the length limits.
    None: no opinion.
    """


@hookspec(firstresult=True)
def specplug_propose(batch: Batch, limits: Sequence[int]) -> Draft | None:
    """Propose draft tokens for the whole batch.

    When: after ``specplug_plan``; not called in a step whose limits are all 0.
    How often: at most once per step.
    Arguments: ``batch``; ``limits``, ``[batch]`` ints, the most tokens each row may get. Rows with limit 0 are
    in the batch, so that indices align, and get none.
    Return: a ``Draft`` with one count per row. An empty draft is an answer. The first answer that is not None
    stops the chain.
    None: not me, ask the next.
    """


@hookspec(firstresult=True)
def specplug_verify(batch: Batch, draft: Draft, target_logits: torch.Tensor) -> Verification | None:
    """Decide which draft tokens stand, and draw the token that ends each row.

    When: after the target's forward.
    How often: once per step in which some row has logits.
    Arguments: ``batch`` and ``draft`` of the rows that have logits (rows inside their prompt are left out);
    ``target_logits`` ``[num_draft_tokens + batch, vocab]``: each row's n + 1 logit rows are consecutive, in
    the batch's order, after everything that depends on the context and before temperature, top-k, top-p and
    min-p, which the rule applies.
    Return: a ``Verification``. The first answer that is not None stops the chain; the built-in is last.
    None: not mine.
    """


@hookspec
def specplug_advance(batch: Batch) -> None:
    """Follow the text: state kept by proposers moves by what was computed and kept, never by what was proposed.

    When: after commit; also when nothing was drafted and for prompt chunks.
    How often: once per step.
    Arguments: ``batch`` of all rows that took part in the step, after commit; ``new_token_ids`` and
    ``new_hidden_states`` cover exactly the positions computed and kept in this step; the newest token is in
    ``token_ids`` only. A request that ended in this step appears a last time.
    Return: ignored.
    """


@hookspec
def specplug_accept_metrics(outcome: StepOutcome) -> None:
    """Observe what the step achieved.

    When: last in every step.
    How often: once per step.
    Arguments: ``outcome``, plain Python values, committed and verified counts per request, times, faults.
    Return: ignored.
    """
