"""What penalties, bias, masks, grammars and log-probabilities add to one verification step on the CPU.

Batch 32, 5 drafts, vocabulary 49152, fp32 logits; prompts of 256 and outputs of 256 tokens. Rule match. "step" is
everything between the target's forward and commit: processing, the rule, and log-probabilities where asked for. The
settings take turns; the ratio is that of neighbouring runs against temperature + top-p alone, with its 95 % interval.
Drafts are either all accepted (the rule reads every row) or all wrong (it reads one row per request, processing all).
Every setting's tokens are first compared with those of decoding each row alone; no time is printed if they differ.

    scripts/bench sampling [--batch 32] [--vocab 49152] [--rounds 10] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from common import circumstances, paired_ratio, wait_until_idle, write_csv

from specplug import SamplingParams, StructuredOutputsParams
from specplug.host.features import RawLogits, StepLogits, process_step, record_logprobs
from specplug.host.intake import Intake
from specplug.host.request_state import RequestState
from specplug.host.work import batch_of
from specplug.testing import toy_tokenizer
from specplug.testing.toys import TableTarget
from specplug.types import Draft, Verification
from specplug.verify import BuiltinVerifier

NUM_DRAFTS, NUM_PROMPT, NUM_OUTPUT = 5, 256, 256
ALONE = "temperature + top-p"
ALL = "all parameters"


def settings(vocab: int) -> dict[str, dict[str, Any]]:
    """What is measured: a name -> parameters."""
    basic = {"temperature": 0.8, "top_p": 0.95}
    penalties = {"presence_penalty": 0.2, "frequency_penalty": 0.1, "repetition_penalty": 1.1}
    masks = {
        "allowed_token_ids": list(range(0, vocab, 2)),
        "bad_words": [[token] for token in range(2, 42, 2)] + [[2, token, token + 2] for token in range(40, 80, 2)],
        "min_tokens": 10_000,
        "stop_token_ids": [4, 6],
    }
    every = {
        **basic,
        "top_k": 200,
        "min_p": 0.001,
        **penalties,
        "logit_bias": dict.fromkeys(range(0, 600, 2), 0.5),
        **masks,
    }
    return {
        ALONE: basic,
        "+ penalties": basic | penalties,
        "+ masks": basic | masks,
        ALL: every,
        ALL + ", logprobs=5": every | {"logprobs": 5},
        ALL + ", a Python processor": every | {"logits_processors": [lambda output, logits: logits]},
        "+ grammar": basic | {"structured_outputs": StructuredOutputsParams(regex="(a|b|c|d)*")},
    }


class Step:
    """One step of ``batch`` requests with the same parameters, ready to be decided again and again."""

    def __init__(self, params: dict[str, Any], batch: int, vocab: int, *, is_accepted: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        target = TableTarget(logits=lambda text: (), vocab_size=vocab, tokenizer=_tokenizer(), max_model_len=20_000)
        intake = Intake(target, method_names=(), seed=0)
        self.states = [self._state(intake, params, row, vocab, generator) for row in range(batch)]
        ids = 2 * torch.randint(50, vocab // 2, (batch, NUM_DRAFTS), generator=generator)
        if "structured_outputs" in params:
            ids = torch.randint(0, 4, (batch, NUM_DRAFTS), generator=generator)
        # as peaked as a language model is: top-p keeps tens of tokens, not tens of thousands
        self.logits = 4.0 * torch.randn((batch, NUM_DRAFTS + 1, vocab), generator=generator)
        if is_accepted:
            self.logits.scatter_(2, ids.unsqueeze(2), 60.0)
        self.num_emitted = [NUM_DRAFTS + 1 if is_accepted else 1] * batch
        self.draft = Draft.from_lists(ids.tolist())
        self.batch = batch_of(self.states)
        self.raw_logits = RawLogits()
        self.verifier = BuiltinVerifier(vocab_size=vocab)
        self.first_rows = range(0, batch * (NUM_DRAFTS + 1), NUM_DRAFTS + 1)
        self._needs_features = any(state.features.is_needed for state in self.states)

    def _state(
        self, intake: Intake, params: dict[str, Any], row: int, vocab: int, generator: torch.Generator
    ) -> RequestState:
        prompt, output = (
            torch.randint(0, vocab, (size,), generator=generator).tolist() for size in (NUM_PROMPT, NUM_OUTPUT)
        )
        if "structured_outputs" in params:
            output = [token % 4 for token in output]
        [state] = intake.prepare(str(row), prompt, SamplingParams(max_tokens=None, seed=row, **params), "final_only")
        state.append(output)
        return state

    def fresh_logits(self) -> torch.Tensor:
        """A copy, since processing writes into it: ``[batch * (drafts + 1), vocab]``."""
        return self.logits.reshape(-1, self.logits.shape[2]).clone()

    def decide(self, raw: torch.Tensor) -> Verification:
        logits = StepLogits(raw, raw)
        if self._needs_features:
            logits = process_step(self.states, self.draft, raw, self.raw_logits)
        decided = self.verifier.specplug_verify(batch=self.batch, draft=self.draft, target_logits=logits.processed)
        if self._needs_features:
            record_logprobs(self.states, self.first_rows, self.num_emitted, logits)
        return decided


def _tokenizer() -> Any:
    return toy_tokenizer([*"abcd", "<end>"], eos_token_id=4)


def decided_alone(params: dict[str, Any], batch: int, vocab: int, *, is_accepted: bool) -> list[list[int]]:
    """The same decisions from one request and no drafts at a time."""
    step = Step(params, batch, vocab, is_accepted=is_accepted)
    found = []
    for row, state in enumerate(step.states):
        emitted: list[int] = []
        for slot in range(NUM_DRAFTS + 1):
            raw = step.logits[row, slot : slot + 1].clone()
            empty = Draft.empty(1)
            processed = process_step([state], empty, raw, step.raw_logits).processed
            one = step.verifier.specplug_verify(batch=batch_of([state]), draft=empty, target_logits=processed)
            emitted.append(int(one.output_token_ids[0, 0]))
            state.append(emitted[-1:])
            if slot == NUM_DRAFTS or emitted[-1] != step.draft.draft_token_ids[row * NUM_DRAFTS + slot]:
                break
        found.append(emitted)
    return found


def differences(batch: int = 4, vocab: int = 700) -> list[str]:
    """Settings whose batched decisions are not those of each row alone; none is wanted."""
    wrong = []
    for name, params in settings(vocab).items():
        for is_accepted in (True, False):
            step = Step(params, batch, vocab, is_accepted=is_accepted)
            decided = step.decide(step.fresh_logits()).output_token_ids.tolist()
            together = [[token for token in row if token >= 0] for row in decided]
            if together != decided_alone(params, batch, vocab, is_accepted=is_accepted):
                wrong.append(f"{name}, drafts {'accepted' if is_accepted else 'wrong'}")
    return wrong


def milliseconds(step: Step) -> float:
    logits = step.fresh_logits()
    start = perf_counter()
    step.decide(logits)
    return (perf_counter() - start) * 1e3


def measure(steps: dict[str, Step], num_rounds: int) -> dict[str, list[float]]:
    """Times per setting, the settings taking turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        milliseconds(step)
    for number in range(num_rounds):
        names = list(steps) if number % 2 == 0 else list(reversed(steps))
        for name in names:
            times[name].append(statistics.median(milliseconds(steps[name]) for _ in range(3)))
    return times


def rows_of(times: dict[str, list[float]], setting: dict[str, object]) -> list[dict[str, object]]:
    rows = []
    for name, values in times.items():
        row: dict[str, object] = {
            **setting,
            "parameters": name,
            "median": round(statistics.median(values), 2),
            "unit": "ms",
        }
        if name != ALONE:
            ratio = paired_ratio(values, times[ALONE])
            row |= {"times_alone": round(ratio.median, 2), "low95": round(ratio.low, 2), "high95": round(ratio.high, 2)}
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    if wrong := differences():
        print("batched decisions differ; nothing is timed:", *wrong, sep="\n  ")
        return 1
    about = circumstances(wait_until_idle()) | {"threads": str(args.threads)}
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    rows: list[dict[str, object]] = []
    for is_accepted in (True, False):
        make: Callable[[dict[str, Any]], Step] = lambda params, accepted=is_accepted: Step(  # noqa: E731
            params, args.batch, args.vocab, is_accepted=accepted
        )
        steps = {name: make(params) for name, params in settings(args.vocab).items()}
        setting = {"batch": args.batch, "vocab": args.vocab, "drafts": "accepted" if is_accepted else "wrong"}
        rows += rows_of(measure(steps, args.rounds), setting)
    for row in rows:
        against = f"{row['times_alone']}x [{row['low95']}, {row['high95']}]" if "times_alone" in row else ""
        print(f"drafts {row['drafts']:<9} {row['parameters']:<36} {row['median']:>8} ms  {against}")
    print("written:", write_csv("sampling", [row | about for row in rows]))
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
