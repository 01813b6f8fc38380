"""``specplug generate``: one prompt through a model, with or without speculation."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specplug.cli import options
from specplug.cli.console import note, progress, silence_transformers
from specplug.cli.sampling import SamplingFlags, with_sampling_flags
from specplug.errors import ConfigError, ModelError, RequestError
from specplug.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specplug.host.llm import LLM
    from specplug.host.logprobs import TokenLogprobs
    from specplug.host.outputs import CompletionOutput

__all__ = ["generate"]

_DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 256}
_MOST_ROWS = 8
"""Samples decoded at once, unless the file of settings says otherwise: KV memory is reserved per row."""


@with_sampling_flags
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; absent or -: read from stdin.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", "-f", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    model: options.Model = None,
    speculative_config: options.SpeculativeConfigText = None,
    config: options.ConfigFile = None,
    plugin: options.Plugins = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    kernels: options.Kernels = None,
    max_model_len: options.MaxModelLen = None,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Permit verifiers that change the target's distribution.")
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print acceptance and speed on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with text, ids and counts.")] = False,
    *,
    sampling: SamplingFlags,
) -> None:
    """Generate text from a prompt."""
    if stream and as_json:
        raise ConfigError("--stream prints text as it comes, --json one object at the end; keep one")
    settings = options.gather(
        config,
        model=model,
        speculative_config=speculative_config,
        plugins=plugin,
        engine={"dtype": dtype, "device": device, "kernels": kernels, "max_model_len": max_model_len},
        sampling=sampling.values(),
    )
    options.check_model(settings.model)
    text = _read_prompt(prompt, prompt_file)
    params = SamplingParams.from_mapping({**_DEFAULTS, **settings.sampling})
    rows = {"max_num_seqs": min(params.n, _MOST_ROWS)}
    with _load(replace(settings, engine=rows | dict(settings.engine)), allow_lossy=allow_lossy) as llm:
        prompt = _chat_prompt(llm, text) if chat else text
        run = _run(llm, prompt, params, stream=stream) if params.n == 1 or stream else _run_samples(llm, prompt, params)
        if as_json:
            typer.echo(json.dumps(_as_dict(llm, run), allow_nan=False))
        elif not stream:
            _print_texts(run)
        if stats:
            _print_stats(llm, run)
    if run.last.finish_reason == "error":
        raise ModelError(f"the request ended with an error: {run.last.error}")


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt_file is not None:
        if prompt is not None:
            raise ConfigError("a prompt and --prompt-file are both given; keep one")
        try:
            return prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as fault:
            raise ConfigError(f"--prompt-file {prompt_file} cannot be read: {fault}") from fault
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise ConfigError("no prompt: write it as an argument, with --prompt-file FILE, or pipe it in")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as fault:
        raise RequestError(f"the prompt on stdin is not {fault.encoding} text: {fault}") from fault


@contextmanager
def _load(settings: options.Settings, *, allow_lossy: bool) -> Iterator[LLM]:
    model = settings.model or options.default_model()
    with progress() as bars:
        bars.add_task("loading the model", total=None)
        from specplug.host.llm import LLM

        silence_transformers()
        llm = LLM(
            model,
            speculative_config=settings.speculative_config,
            plugins=settings.plugins,
            allow_lossy=allow_lossy,
            **settings.engine,
        )
    with llm:
        yield llm


def _chat_prompt(llm: LLM, text: str) -> str:
    tokenizer = llm.get_tokenizer()
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError("--chat: the model's tokenizer has no chat template; leave --chat out")
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@dataclass(slots=True)
class _Run:
    """What came out. ``last``: the final piece, with the reason for the end; ``others``: further samples."""

    last: CompletionOutput
    elapsed_s: float = 0.0
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    others: list[_Run] = field(default_factory=list)

    @classmethod
    def of(cls, sample: CompletionOutput) -> _Run:
        """A whole sample."""
        return cls(sample, 0.0, [sample.text], list(sample.token_ids), list(sample.logprobs or ()))

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def _run(llm: LLM, prompt: str, params: SamplingParams, *, stream: bool) -> _Run:
    run: _Run | None = None
    with _token_bar(params.max_tokens, shown=not stream) as advance:
        start = time.perf_counter()
        for output in llm.stream(prompt, params):
            piece = output.outputs[0]
            run = run or _Run(piece)
            run.last = piece
            run.pieces.append(piece.text)
            run.token_ids += piece.token_ids
            run.logprobs += piece.logprobs or ()
            run.prompt_logprobs = output.prompt_logprobs
            advance(len(piece.token_ids))
            if stream:
                typer.echo(piece.text, nl=False)
                sys.stdout.flush()
    if run is None:
        raise RequestError("the request gave no output")
    run.elapsed_s = time.perf_counter() - start
    if stream:
        typer.echo()
    return run


def _run_samples(llm: LLM, prompt: str, params: SamplingParams) -> _Run:
    """All samples of a request with several; the first holds the others."""
    start = time.perf_counter()
    [output] = llm.generate(prompt, params)
    run, *run.others = [_Run.of(sample) for sample in output.outputs]
    run.prompt_logprobs = output.prompt_logprobs
    run.elapsed_s = time.perf_counter() - start
    return run


def _print_texts(run: _Run) -> None:
    for index, each in enumerate((run, *run.others)):
        typer.echo(f"[{index}] {each.text}" if run.others else each.text)


@contextmanager
def _token_bar(total: int | None, *, shown: bool) -> Iterator[Callable[[int], None]]:
    if not shown:
        yield lambda _count: None
        return
    with progress() as bars:
        task = bars.add_task("generating", total=total)
        yield lambda count: bars.advance(task, count)


def _as_dict(llm: LLM, run: _Run) -> dict[str, Any]:
    found = _sample_as_dict(run) | {"elapsed_s": run.elapsed_s}
    if run.others:
        found["samples"] = [_sample_as_dict(each) for each in (run, *run.others)]
    if run.prompt_logprobs is not None:
        found["prompt_logprobs"] = [
            None if entry is None else _logprobs_as_list(entry) for entry in run.prompt_logprobs
        ]
    if llm.acceptance is not None:
        found["metrics"] = llm.acceptance.aggregate().as_dict()
    return found


def _sample_as_dict(run: _Run) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": run.text,
        "token_ids": run.token_ids,
        "finish_reason": run.last.finish_reason,
        "stop_reason": run.last.stop_reason,
        "num_discarded_tokens": run.last.num_discarded_tokens,
    }
    if run.last.num_reasoning_tokens is not None:
        found["num_reasoning_tokens"] = run.last.num_reasoning_tokens
    if run.last.logprobs is not None:
        found["logprobs"] = [_logprobs_as_list(entry) for entry in run.logprobs]
    return found


def _logprobs_as_list(entry: TokenLogprobs) -> list[dict[str, Any]]:
    """The position's own token first. JSON has no infinity: null for a token that was ruled out."""
    return [
        {
            "token_id": token_id,
            "logprob": found.logprob if math.isfinite(found.logprob) else None,
            "rank": found.rank,
            "token": found.decoded_token,
        }
        for token_id, found in entry.items()
    ]


def _print_stats(llm: LLM, run: _Run) -> None:
    from specplug.metrics import stats_lines

    if llm.acceptance is None:
        note("no counts: the plugin acceptance is switched off")
        return
    for line in stats_lines(llm.acceptance.aggregate(), run.elapsed_s):
        note(line)
    note(f"kernels      {llm.kernels}")
    note(f"finished     {_ending(run)}")


def _ending(run: _Run) -> str:
    """Which stop matched and where, since a cut text is readily blamed on speculation."""
    text = f"{run.last.finish_reason} at token {len(run.token_ids)}"
    if run.last.stop_reason is not None:
        text += f", matched {run.last.stop_reason!r}"
    if run.last.num_discarded_tokens:
        text += f", {run.last.num_discarded_tokens} tokens of that step discarded"
    return text
