"""Draft models measured: what a tiny one costs and brings, and how often drafts across vocabularies are accepted.

    python benchmarks/draft.py [PART ...] [--model FOLDER] [--draft FOLDER] [--tli-draft FOLDER] [--gemma FOLDER]

Parts: ``tiny`` (a draft of about 5 million parameters with the demo model at batch 1, on HumanEval and edit prompts,
with the target's vocabulary and with its own: cost of a draft token in target forwards, at most 0.08; speed-up over
plain decoding, and that over the speed-up which the measured acceptance and times predict, at least 0.9) , ``pair``
(Gemma 3 270M drafted for by SmolLM2 135M and the reverse: mean acceptance length by sampling beside transformers'
sampled path at a constant draft length, and its greedy path; a piece of it, ``--pair-target gemma3-270m
--pair-sampling greedy``, takes a minute, and rows of other pieces stay in the file) and ``likelihood`` (the target's
mean -log p of tokens sampled plainly, by us and by transformers across vocabularies: an exact method leaves it where
plain sampling has it, so acceptance lengths compare only where it does). The tiny drafts are those of
``train_tiny_draft.py``.
Runs take turns (A B A B ...); rows go to ``benchmarks/results/draft_<part>.csv``.

Predicted, after Leviathan et al. (2023) with measured times: emitted tokens a step x time of a plain forward / (time of
drafting + time of the forward that verifies).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Ratio, circumstances, paired_ratio, wait_until_idle, write_csv
from prompts import benchmark_prompts, checksum

from specplug import LLM, MethodSpec, SamplingParams, StepOutcome, hookimpl
from specplug.demo.models import default_cache_dir, gemma3_path, smollm2_path
from specplug.hooks import ProcessManager
from specplug.testing.proposers import MethodPlugin

Row = dict[str, Any]

DRAFT_LENGTHS = (2, 3, 5)
"""Tried for the tiny drafts; the fastest is measured."""
PAIR_LENGTH = 4


# --- engines --------------------------------------------------------------------------------------------------


class Recorder:
    """The newest step's outcome."""

    outcome: StepOutcome | None = None

    @hookimpl
    def specplug_accept_metrics(self, outcome: StepOutcome) -> None:
        self.outcome = outcome


@dataclass
class Measured:
    """Decoding steps added up: wall-clock and phases, in seconds."""

    wall_s: float = 0.0
    propose_s: float = 0.0
    forward_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    texts: list[list[int]] = field(default_factory=list)

    def add(self, outcome: StepOutcome, wall_s: float) -> None:
        self.wall_s += wall_s
        self.propose_s += outcome.propose_s
        self.forward_s += outcome.forward_s
        self.num_steps += 1
        for row in outcome.rows:
            self.num_tokens += row.num_emitted_tokens
            self.num_drafted += row.num_draft_tokens
            self.num_accepted += row.num_accepted_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps


class Engine:
    """Our host, one prompt at a time."""

    def __init__(self, label: str, model: str, config: Mapping[str, Any] | None, **engine: Any) -> None:
        self.label = label
        self._recorder = Recorder()
        manager = ProcessManager()
        spec = MethodSpec("recorder", "observer", lambda config, context: self._recorder)
        manager.register(MethodPlugin(spec), name="recorder")
        settings = {"dtype": "bfloat16", "max_num_seqs": 1, "max_model_len": 1024} | engine
        self.llm = LLM(model, speculative_config=config, plugins=["recorder"], manager=manager, **settings)

    def run(self, prompts: Sequence[str], params: SamplingParams) -> Measured:
        """Decode the prompts; steps that read a prompt do not count."""
        measured = Measured()
        for number, prompt in enumerate(prompts):
            self.llm.add_request(f"{self.label}-{number}", prompt, params)
            while self.llm.has_unfinished_requests():
                start = time.perf_counter()
                outputs = self.llm.step()
                wall_s = time.perf_counter() - start
                outcome = self._recorder.outcome
                if outcome is not None and not outcome.num_prefill_tokens:
                    measured.add(outcome, wall_s)
                measured.texts += [list(each.outputs[0].token_ids) for each in outputs if each.finished]
        return measured

    def close(self) -> None:
        self.llm.close()


class Bench:
    """Arguments, prompts, and what every row carries."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.args = args
        self.prompts = benchmark_prompts(lambda text: len(tokenizer(text)["input_ids"]))

    def about(self, load: float) -> Row:
        return circumstances(load, prompts=checksum(self.prompts))


# --- a tiny draft -----------------------------------------------------------------------------------------------


def tiny(bench: Bench) -> Iterator[Row]:
    """The tiny drafts beside plain decoding, each at its fastest draft length."""
    params = SamplingParams(temperature=0.0, max_tokens=bench.args.tokens, ignore_eos=True)
    plain = Engine("plain", bench.args.model, None)
    for label, config in _tiny_configs(bench.args):
        for kind in ("humaneval", "edit"):
            prompts = bench.prompts[kind][: bench.args.prompts]
            length = _best_length(bench, label, config, prompts)
            drafting = Engine(label, bench.args.model, config | {"num_speculative_tokens": length})
            load = _warm_up([plain, drafting], prompts)
            pairs = [(plain.run(prompts, params), drafting.run(prompts, params)) for _ in range(bench.args.pairs)]
            drafting.close()
            row = {"kind": kind, "draft": label, "k": length, **_compared(pairs), **bench.about(load)}
            print(f"  {label}, {kind}, K={length}: {_shown(row)}", flush=True)
            yield row
    plain.close()


def _tiny_configs(args: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    for label, folder, more in (
        ("tiny draft", args.draft, {}),
        ("tiny draft, own vocabulary", args.tli_draft, {"use_heterogeneous_vocab": True}),
    ):
        if Path(folder, "config.json").is_file():
            yield label, {"method": "draft_model", "model": folder, **more}
        else:
            print(f"  {label}: {folder} is not there; make it with benchmarks/train_tiny_draft.py", flush=True)


def _best_length(bench: Bench, label: str, config: Row, prompts: Sequence[str]) -> int:
    """The fastest of ``DRAFT_LENGTHS`` on one prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=bench.args.tokens, ignore_eos=True)
    speeds = {}
    for length in DRAFT_LENGTHS:
        engine = Engine(label, bench.args.model, config | {"num_speculative_tokens": length})
        _warm_up([engine], prompts, wait=False)
        speeds[length] = engine.run(prompts[:1], params).tokens_per_s
        engine.close()
    print(f"  {label}: " + ", ".join(f"K={k} {speed:.1f} tokens/s" for k, speed in speeds.items()), flush=True)
    return max(speeds, key=speeds.__getitem__)


def _warm_up(engines: Sequence[Engine], prompts: Sequence[str], *, wait: bool = True) -> float:
    for engine in engines:
        engine.run(prompts[:1], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    return wait_until_idle(most_s=20.0) if wait else 0.0


def _compared(pairs: Sequence[tuple[Measured, Measured]]) -> Row:
    """What one configuration brought, over all pairs."""
    speed_up = paired_ratio([draft.tokens_per_s for _, draft in pairs], [plain.tokens_per_s for plain, _ in pairs])
    predicted = [_predicted(plain, draft) for plain, draft in pairs]
    reached = paired_ratio(
        [draft.tokens_per_s / plain.tokens_per_s for plain, draft in pairs],
        predicted,
    )
    cost = paired_ratio(
        [draft.propose_s / draft.num_drafted for _, draft in pairs],
        [plain.forward_s / plain.num_steps for plain, _ in pairs],
    )
    plain_s = statistics.median(plain.forward_s / plain.num_steps for plain, _ in pairs)
    verify_s = statistics.median(draft.forward_s / draft.num_steps for _, draft in pairs)
    draft_s = statistics.median(draft.propose_s / draft.num_drafted for _, draft in pairs)
    first = pairs[0][1]
    return {
        "acceptance_rate": f"{first.num_accepted / first.num_drafted:.3f}",
        "tokens_per_step": f"{first.tokens_per_step:.3f}",
        "equal_outputs": f"{sum(a == b for a, b in zip(pairs[0][0].texts, first.texts, strict=True))}"
        f"/{len(first.texts)}",
        "ms_plain_forward": f"{1000 * plain_s:.2f}",
        "ms_verify_forward": f"{1000 * verify_s:.2f}",
        "ms_per_draft_token": f"{1000 * draft_s:.2f}",
        **_columns("draft_token_in_forwards", cost, at_most=0.08),
        **_columns("speed_up", speed_up),
        "predicted_speed_up": f"{statistics.median(predicted):.3f}",
        **_columns("of_predicted", reached, at_least=0.9),
        "pairs": speed_up.num_pairs,
    }


def _predicted(plain: Measured, draft: Measured) -> float:
    plain_s = plain.forward_s / plain.num_steps
    return draft.tokens_per_step * plain_s / ((draft.propose_s + draft.forward_s) / draft.num_steps)


def _columns(name: str, ratio: Ratio, **bounds: float) -> Row:
    limits = {f"{name}_{bound}": limit for bound, limit in bounds.items()}
    return {
        name: f"{ratio.median:.3f}",
        f"{name}_low": f"{ratio.low:.3f}",
        f"{name}_high": f"{ratio.high:.3f}",
        **limits,
    }


def _shown(row: Row) -> str:
    return (
        f"accepted {row['acceptance_rate']}, a draft token costs {row['draft_token_in_forwards']} forwards, speed-up "
        f"{row['speed_up']} [{row['speed_up_low']}, {row['speed_up_high']}], predicted {row['predicted_speed_up']}, "
        f"reached {row['of_predicted']} [{row['of_predicted_low']}, {row['of_predicted_high']}] of it"
    )


# --- a pair with different vocabularies -------------------------------------------------------------------------


def pair(bench: Bench) -> Iterator[Row]:
    """Mean acceptance length, ours and transformers', on the same prompts at a constant draft length.

    Counts of tokens and forwards, not times: no other load can change them.
    """
    folders = {"gemma3-270m": bench.args.gemma, "smollm2-135m": bench.args.model}
    prompts = [*bench.prompts["humaneval"][: bench.args.prompts], *bench.prompts["chat"][: bench.args.prompts]]
    for target in bench.args.pair_target:
        (draft,) = folders.keys() - {target}
        for sampling in bench.args.pair_sampling:
            ours, others = _lengths(bench, folders[target], folders[draft], prompts, sampling)
            ratio = paired_ratio(ours, others)
            row = {
                "pair": f"{target} <- {draft}",
                "sampling": sampling,
                "k": PAIR_LENGTH,
                "unit": "tokens per target forward",
                "ours": f"{statistics.fmean(ours):.3f}",
                "transformers": f"{statistics.fmean(others):.3f}",
                **_columns("ratio", ratio),
                "runs": len(ours),
                **bench.about(float("nan")),
            }
            print(f"  {row['pair']}, {sampling}: ours {row['ours']}, transformers {row['transformers']}, "
                  f"ratio {ratio}", flush=True)  # fmt: skip
            yield row


def _lengths(
    bench: Bench, target: str, draft: str, prompts: Sequence[str], sampling: str
) -> tuple[list[float], list[float]]:
    """Mean acceptance lengths per run, ours and theirs: prompts x seeds sampled, prompts greedy."""
    is_sampled = sampling == "sampled"
    config = {
        "method": "draft_model",
        "model": draft,
        "use_heterogeneous_vocab": True,
        "num_speculative_tokens": PAIR_LENGTH,
        "draft_sample_method": "probabilistic" if is_sampled else "greedy",
    }
    engine, theirs = Engine("pair", target, config), Assisted(target, draft)
    ours: list[float] = []
    others: list[float] = []
    num_tokens, temperature = bench.args.pair_tokens, 1.0 if is_sampled else 0.0
    for seed in range(bench.args.seeds if is_sampled else 1):
        params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=seed)
        for prompt in prompts:
            ours.append(engine.run([prompt], params).tokens_per_step)
            others.append(theirs.run(prompt, num_tokens, temperature, seed))
    engine.close()
    return ours, others


class Assisted:
    """transformers' universal assisted generation at a constant draft length, without a confidence threshold.

    An object samples or does not: the sampled path rebuilds the draft model's head and embeddings for good.
    """

    def __init__(self, target: str, draft: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (target, draft)]
        self._target, self._draft = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval() for folder in (target, draft)
        )
        settings = self._draft.generation_config
        settings.num_assistant_tokens = PAIR_LENGTH
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        for model in (self._target, self._draft):
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
        self._num_forwards = 0
        self._target.register_forward_hook(self._count)

    def _count(self, module: Any, args: Any, output: Any) -> None:
        self._num_forwards += 1

    def run(self, prompt: str, num_tokens: int, temperature: float, seed: int) -> float:
        """Tokens per target forward; the first forward reads the prompt and a draft at once."""
        return self.sample(prompt, num_tokens, temperature, seed)[1]

    def sample(self, prompt: str, num_tokens: int, temperature: float, seed: int) -> tuple[list[int], float]:
        """The tokens that follow the prompt, and how many there were per target forward."""
        import torch

        torch.manual_seed(seed)
        target_tokenizer, draft_tokenizer = self._tokenizers
        ids = target_tokenizer(prompt, return_tensors="pt")
        self._num_forwards = 0
        output = self._target.generate(
            **ids,
            max_new_tokens=num_tokens,
            assistant_model=self._draft,
            tokenizer=target_tokenizer,
            assistant_tokenizer=draft_tokenizer,
            **(
                {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
                if temperature
                else {"do_sample": False}
            ),
        )
        token_ids = output[0, ids.input_ids.shape[1] :].tolist()
        return token_ids, len(token_ids) / self._num_forwards


def likelihood(bench: Bench) -> Iterator[Row]:
    """Whether sampled texts are the target's own: its mean -log p of their tokens."""
    target, draft = bench.args.gemma, bench.args.model
    prompts = [*bench.prompts["humaneval"][: bench.args.prompts], *bench.prompts["chat"][: bench.args.prompts]]
    config = {"method": "draft_model", "model": draft, "use_heterogeneous_vocab": True}
    config |= {"num_speculative_tokens": PAIR_LENGTH, "draft_sample_method": "probabilistic"}
    score = Scorer(target)
    ours, alone, theirs = Engine("ours", target, config), Engine("alone", target, None), Assisted(target, draft)
    makers: dict[str, Callable[[str, int], list[int]]] = {
        "plain": lambda prompt, seed: alone.run([prompt], _sampled(bench, seed)).texts[0],
        "specplug": lambda prompt, seed: ours.run([prompt], _sampled(bench, seed)).texts[0],
        "transformers": lambda prompt, seed: theirs.sample(prompt, bench.args.pair_tokens, 1.0, seed)[0],
    }
    for name, make in makers.items():
        found = [
            loss for seed in range(bench.args.seeds) for prompt in prompts for loss in score(prompt, make(prompt, seed))
        ]
        row = {
            "pair": "gemma3-270m <- smollm2-135m",
            "sampled_by": name,
            "unit": "mean -log p of the target, nats per token",
            "mean": f"{statistics.fmean(found):.3f}",
            "standard_error": f"{statistics.stdev(found) / len(found) ** 0.5:.3f}",
            "tokens": len(found),
            **bench.about(float("nan")),
        }
        print(f"  {name}: {row['mean']} +- {row['standard_error']} over {len(found)} tokens", flush=True)
        yield row


def _sampled(bench: Bench, seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=bench.args.pair_tokens, ignore_eos=True, seed=seed)


class Scorer:
    """-log p of each token of a text after a prompt, at temperature 1."""

    def __init__(self, target: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(target)
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()

    def __call__(self, prompt: str, token_ids: Sequence[int]) -> list[float]:
        import torch

        prompt_ids = self._tokenizer(prompt)["input_ids"]
        ids = torch.tensor([*prompt_ids, *token_ids])
        with torch.inference_mode():
            log_probs = torch.log_softmax(self._model(ids[None]).logits[0].float(), -1)
        places = range(len(prompt_ids), len(ids))
        return [-log_probs[place - 1, ids[place]].item() for place in places]


# --- the command line ---------------------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[Bench], Iterator[Row]]] = {"tiny": tiny, "pair": pair, "likelihood": likelihood}
KEYS = {"pair": ("pair", "sampling")}
"""Columns that tell apart the rows of what is measured in pieces."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--model", help="folder of SmolLM2; default: the demo model")
    parser.add_argument("--draft", help="folder of the tiny draft; default: as train_tiny_draft.py leaves it")
    parser.add_argument("--tli-draft", help="folder of the tiny draft with its own vocabulary; default likewise")
    parser.add_argument("--gemma", help="folder of Gemma 3 270M; default: made from its packages")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="tokens generated per prompt in part tiny")
    parser.add_argument("--pair-tokens", type=int, default=24, help="tokens generated per prompt in part pair")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of each kind")
    parser.add_argument("--seeds", type=int, default=2, help="sampled runs of each prompt in part pair")
    for option, choices in (("target", ("gemma3-270m", "smollm2-135m")), ("sampling", ("sampled", "greedy"))):
        parser.add_argument(f"--pair-{option}", nargs="+", choices=choices, default=choices, help="a piece of pair")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    cache = default_cache_dir(os.environ)
    args.model = args.model or str(smollm2_path(cache))
    args.draft = args.draft or str(cache / "trained" / "tiny_draft")
    args.tli_draft = args.tli_draft or str(cache / "trained" / "tiny_draft_tli")
    wanted = args.parts or list(PARTS)
    if "pair" in wanted:
        args.gemma = args.gemma or str(gemma3_path(cache))
    import torch

    torch.set_num_threads(args.threads)
    bench = Bench(args)
    for part in wanted:
        print(f"{part}:", flush=True)
        print(f"  -> {write_csv(f'draft_{part}', list(PARTS[part](bench)), key=KEYS.get(part, ()))}", flush=True)


if __name__ == "__main__":
    main()
