"""Conformance checks that run a proposer in the real host loop, one function each.

Every check takes ``make_proposer`` and the rig to run it on, and raises ``CheckFailed`` with what it saw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from specplug.errors import PluginFaultError
from specplug.hooks import ProcessManager, hookimpl
from specplug.methods import Capabilities, MethodSpec, PluginConfig, PluginContext
from specplug.models.target import Target
from specplug.sampling_params import SamplingParams
from specplug.testing.driver import HookDriver, follow
from specplug.testing.proposers import MethodPlugin, as_method
from specplug.testing.rig import CheckFailed, MakeProposer, Rig
from specplug.types import StepOutcome

if TYPE_CHECKING:
    from specplug.host.outputs import RequestOutput

__all__ = ["check_eos_inside_draft", "check_greedy_equality", "check_hook_calls", "check_length_limits", "generate"]

UNDER_TEST = "under_test"
NUM_ENDS = 4
"""How many tokens of each text are tried as its end."""
DEFAULT_RIG = Rig()


def check_greedy_equality(make_proposer: MakeProposer, rig: Rig = DEFAULT_RIG) -> None:
    """Greedy output is that of plain decoding, token for token, with 1 draft token and with many.

    When it fails: the host verifies every draft, so a proposer can only do this by changing what is not its own: token
    ids, sampling parameters, tensors it was handed, torch's global state. If it holds for every proposer, it is the
    host or the target: please report it.
    """
    params = SamplingParams(temperature=0.0, max_tokens=rig.num_tokens)
    plain = generate(None, rig, params)
    for num_speculative_tokens in sorted({1, rig.num_speculative_tokens}):
        seen = generate(make_proposer, rig, params, num_speculative_tokens=num_speculative_tokens)
        _compare_texts(rig.prompts, plain, seen, f"{num_speculative_tokens} draft tokens")


def check_eos_inside_draft(make_proposer: MakeProposer, rig: Rig = DEFAULT_RIG) -> None:
    """A draft may contain the end of sequence: accepted, it ends the request there; rejected, nothing has ended.

    When it fails: draft tokens are guesses. Do not mark a request as finished because you proposed its end; only
    ``specplug_finish_request`` ends it.
    """
    params = SamplingParams(temperature=0.0, max_tokens=rig.num_tokens, ignore_eos=True)
    texts = [_ids(output) for output in generate(None, rig, params)]
    for number in range(NUM_ENDS):
        ends = [_distinct(text)[number % len(_distinct(text))] for text in texts]
        stops = [replace(params, stop_token_ids=[end]) for end in ends]
        _check_cuts(texts, ends, generate(make_proposer, rig, stops, strict=True), "stop token")
        shared = [ends[number % len(ends)]] * len(texts)
        ended = generate(make_proposer, _with_eos(rig, shared[0]), replace(params, ignore_eos=False), strict=True)
        _check_cuts(texts, shared, ended, "end of sequence")
    _check_goes_on_after_rejected_eos(make_proposer, rig)


def check_length_limits(make_proposer: MakeProposer, rig: Rig = DEFAULT_RIG) -> None:
    """Outputs have exactly the length asked for, and prompt and output never pass ``max_model_len``.

    When it fails: honour ``limits`` (they shrink near the end, to 0 for the last token), and do not index past the
    end of what you keep.
    """
    for max_tokens in (1, 2, 5):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for prompt, output in zip(rig.prompts, generate(make_proposer, rig, params, strict=True), strict=True):
            if len(_ids(output)) != max_tokens:
                raise CheckFailed(f"{len(_ids(output))} tokens for max_tokens={max_tokens} after the prompt {prompt}")
    longest = max(len(prompt) for prompt in rig.prompts)

    def make_short_target() -> Target:
        target = rig.make_target()
        target.max_model_len = longest + 3
        return target

    short = replace(rig, make_target=make_short_target)
    params = SamplingParams(temperature=0.0, max_tokens=None)
    _compare_texts(
        rig.prompts, generate(None, short, params), generate(make_proposer, short, params, strict=True), "max_model_len"
    )


def check_hook_calls(make_proposer: MakeProposer, rig: Rig = DEFAULT_RIG) -> None:
    """Hooks run once per step at most, whatever the batch size and the number of draft tokens.

    When it fails: a hook must handle the whole batch in one call; do not call hooks of your own object, or of others,
    once per row or token.
    """
    params = SamplingParams(temperature=0.0, max_tokens=rig.num_tokens, ignore_eos=True)
    for num_rows in (1, len(rig.prompts)):
        some = replace(rig, prompts=rig.prompts[:num_rows])
        for num_speculative_tokens in sorted({1, rig.num_speculative_tokens}):
            calls: Counter[str] = Counter()
            generate(_counting(make_proposer, calls), some, params, num_speculative_tokens, count=calls)
            _check_counts(calls, num_rows, num_speculative_tokens)


def generate(
    make_proposer: MakeProposer | None,
    rig: Rig,
    params: SamplingParams | Sequence[SamplingParams],
    num_speculative_tokens: int | None = None,
    *,
    strict: bool = False,
    count: Counter[str] | None = None,
) -> list[RequestOutput]:
    """Run ``specplug.LLM`` over the rig's prompts in one batch; plain decoding when there is no proposer.

    ``count``: counts the steps, under "steps". With ``strict``, a plugin fault raises ``CheckFailed``.
    """
    from specplug.host.llm import LLM

    manager = ProcessManager()
    speculative_config = None
    if make_proposer is not None:
        manager.register(as_method(UNDER_TEST, make_proposer, capabilities=rig.capabilities), name=UNDER_TEST)
        wanted = num_speculative_tokens or rig.num_speculative_tokens
        speculative_config = {"method": UNDER_TEST, "num_speculative_tokens": wanted}
    plugins = []
    if count is not None:
        manager.register(_step_counter(count), name="step_counter")
        plugins = ["step_counter"]
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in rig.prompts]
    try:
        target = rig.make_target()
        with LLM(
            target, speculative_config=speculative_config, plugins=plugins, strict=strict, manager=manager, seed=0
        ) as llm:
            return llm.generate(prompts, params)
    except PluginFaultError as error:
        raise CheckFailed(str(error)) from error


# --- comparing ----------------------------------------------------------------------------------------------


def _ids(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def _compare_texts(
    prompts: Sequence[Sequence[int]], plain: Sequence[RequestOutput], seen: Sequence[RequestOutput], circumstance: str
) -> None:
    for prompt, one, other in zip(prompts, plain, seen, strict=True):
        ends = (one.outputs[0].finish_reason, other.outputs[0].finish_reason)
        if _ids(one) != _ids(other) or ends[0] != ends[1]:
            raise CheckFailed(
                f"with {circumstance}, after the prompt {list(prompt)}: plain decoding writes {_ids(one)} "
                f"({ends[0]}), speculation {_ids(other)} ({ends[1]})"
            )


# --- ends ---------------------------------------------------------------------------------------------------


def _distinct(token_ids: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(token_ids))


def _with_eos(rig: Rig, token_id: int) -> Rig:
    def make_target() -> Target:
        target = rig.make_target()
        target.eos_token_ids = frozenset({token_id})
        return target

    return replace(rig, make_target=make_target)


def _check_cuts(
    texts: Sequence[Sequence[int]], ends: Sequence[int], outputs: Sequence[RequestOutput], what: str
) -> None:
    """Each output must be the plain text up to the first occurrence of its end, or all of it."""
    for text, end, output in zip(texts, ends, outputs, strict=True):
        cut = list(text[: text.index(end) + 1]) if end in text else list(text)
        expected = (cut, "stop" if end in text else "length")
        seen = (_ids(output), output.outputs[0].finish_reason)
        if seen != expected:
            raise CheckFailed(f"with {end} as {what}, the output must be {expected}; it was {seen}")


def _check_goes_on_after_rejected_eos(make_proposer: MakeProposer, rig: Rig) -> None:
    """After a prompt that repeats itself around the end of sequence: does a rejected one silence the proposer?"""
    driver = HookDriver(make_proposer, rig)
    eos = min(driver.target.eos_token_ids, default=0)
    first, second, other = [token_id for token_id in range(1, driver.target.vocab_size) if token_id != eos][:3]
    driver.start("r", [first, eos, second] * 3)
    driver.prefill(follow([first]))
    text = [first, other, *[first, second] * 12]
    drafts: list[tuple[int, ...]] = []
    while len(written := driver.text("r")) < len(text):
        drafts.append(driver.step(follow(text[len(written) :])).drafts["r"])
    driver.close()
    at = next((number for number, draft in enumerate(drafts) if eos in draft), None)
    if at is not None and at + 1 < len(drafts) and not any(drafts[at + 1 :]):
        raise CheckFailed(
            f"a draft with the end of sequence was rejected, and none came in the {len(drafts) - at - 1} steps after it"
        )


# --- counting -----------------------------------------------------------------------------------------------


def _counting(make_proposer: MakeProposer, calls: Counter[str]) -> MakeProposer:
    """The same proposer, each hook of which counts its calls, also those that the proposer makes itself."""

    def make(context: PluginContext) -> object:
        proposer = make_proposer(context)
        for name in dir(proposer):
            if name.startswith("specplug_"):
                object.__setattr__(proposer, name, _counted(name, getattr(proposer, name), calls))
        return proposer

    return make


def _counted(name: str, function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return counted


class _StepCounter:
    def __init__(self, calls: Counter[str]) -> None:
        self._calls = calls

    @hookimpl
    def specplug_accept_metrics(self, outcome: StepOutcome) -> None:
        self._calls["steps"] += 1


def _step_counter(calls: Counter[str]) -> MethodPlugin:
    def factory(config: PluginConfig, context: PluginContext) -> object:
        return _StepCounter(calls)

    return MethodPlugin(MethodSpec("step_counter", "observer", factory, capabilities=Capabilities()))


PER_STEP = ("specplug_plan", "specplug_propose", "specplug_advance", "specplug_accept_metrics")


def _check_counts(calls: Counter[str], num_rows: int, num_speculative_tokens: int) -> None:
    circumstance = f"a batch of {num_rows} and {num_speculative_tokens} draft tokens"
    for hook in PER_STEP:
        if calls[hook] > calls["steps"]:
            raise CheckFailed(f"{hook} was called {calls[hook]} times in {calls['steps']} steps, with {circumstance}")
    for hook in ("specplug_start_request", "specplug_finish_request"):
        if calls[hook] > num_rows:
            raise CheckFailed(f"{hook} was called {calls[hook]} times for {num_rows} requests")
