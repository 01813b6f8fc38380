"""The demo's course: measure in interleaved rounds, then show that the output is the target's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specplug.demo.identity import Equality, ForcedText, TeacherForcing, compare_outputs, teacher_force
from specplug.demo.measure import Decoded, decode, decode_in_batches
from specplug.demo.prompts import KINDS, load_prompts
from specplug.demo.report import Cell, DemoReport
from specplug.errors import ConfigError
from specplug.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.progress import Progress

    from specplug.host.llm import LLM

__all__ = ["DemoPlan", "run_demo"]

_NUM_SPECULATIVE_TOKENS = 5
_METHOD_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    # Rounds repeat their prompts: with outputs shared, all but the first would be read off.
    "suffix": {"num_speculative_tokens": 32, "suffix_decoding_max_cached_requests": 0},
}
_SHARE_OF_TIME_FOR_ROUNDS = 0.8
"""The rest of the time is for the identity report."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """How much the demo does. ``batches``: batch size -> prompts per kind decoded at that size."""

    speculative_config: Mapping[str, Any]
    minutes: float
    max_tokens: int = 64
    batches: Mapping[int, int] = field(default_factory=lambda: {1: 2, 8: 8})
    max_rounds: int = 2
    identity_prompts: int = 2
    kinds: tuple[str, ...] = tuple(KINDS)

    @classmethod
    def full(cls, *, method: str, speculative_config: str | None, minutes: float) -> DemoPlan:
        """The demo as shown."""
        return cls(_speculative_config(method, speculative_config), minutes)

    @classmethod
    def quick(cls, *, method: str, speculative_config: str | None, minutes: float) -> DemoPlan:
        """A smoke test: one short round."""
        settings = _speculative_config(method, speculative_config)
        return cls(settings, minutes, max_tokens=12, batches={1: 1, 2: 2}, max_rounds=1, identity_prompts=1)

    @property
    def method(self) -> str:
        return str(self.speculative_config["method"])


def _speculative_config(method: str, text: str | None) -> dict[str, Any]:
    """``--speculative-config`` as it stands, or the method with its usual settings."""
    if text is None:
        return {
            "method": method,
            "num_speculative_tokens": _NUM_SPECULATIVE_TOKENS,
            **_METHOD_SETTINGS.get(method, {}),
        }
    from specplug.config.reading import read_mapping

    given = read_mapping(text, "speculative_config")
    if not given:
        raise ConfigError("--speculative-config is empty; leave it out, or write an object with method and settings")
    return {"method": method, **given}


def run_demo(model: str, plan: DemoPlan, bars: Progress) -> DemoReport:
    """Run the whole demo on ``model``, a folder or a hub id in the local cache; ``bars`` shows how far it is.

    Raises ``ModelError`` for a model that cannot be loaded, ``ConfigError`` for a configuration that cannot be.
    """
    from specplug.models.loading import check_folder, find_folder

    folder = find_folder(model, None)
    check_folder(folder)
    return _Demo(str(folder), plan, bars).run()


class _Demo:
    def __init__(self, model: str, plan: DemoPlan, bars: Progress) -> None:
        self._model = model
        self._plan = plan
        self._bars = bars
        self._params = SamplingParams(temperature=0.0, max_tokens=plan.max_tokens)
        self._prompts: dict[str, list[str]] = {}
        self._tokenizer: Any = None
        self._max_model_len = 0
        self._kernels = ""

    def run(self) -> DemoReport:
        self._load_prompts()
        start = time.perf_counter()
        cells, num_rounds = self._measure()
        equalities = self._float32()
        decoding_s = time.perf_counter() - start
        return DemoReport(
            method=self._plan.method,
            num_speculative_tokens=max(run.counts.num_spec_tokens for cell in cells for run in cell.speculative),
            kernels=self._kernels,
            cells=tuple(cells),
            num_rounds=num_rounds,
            equalities=equalities,
            forced=self._bfloat16(cells),
            tokenizer=self._tokenizer,
            decoding_s=decoding_s,
        )

    def _load_prompts(self) -> None:
        from specplug.models.loading import load_tokenizer

        tokenizer = load_tokenizer(self._model)
        prompts = load_prompts()
        self._tokenizer = tokenizer
        self._prompts = {kind: [prompt.render(tokenizer) for prompt in prompts[kind]] for kind in self._plan.kinds}
        longest = max(len(tokenizer(text)["input_ids"]) for texts in self._prompts.values() for text in texts)
        self._max_model_len = longest + self._plan.max_tokens

    # --- speed ------------------------------------------------------------------------------------------------

    def _measure(self) -> tuple[list[Cell], int]:
        plan = self._plan
        cells = [Cell(kind, batch) for kind in plan.kinds for batch in plan.batches]
        with ExitStack() as stack:
            plain, speculative = self._pair(stack, "bfloat16")
            self._kernels = plain.kernels
            for llm in (plain, speculative):
                decode(llm, self._prompts[plan.kinds[0]][:1], SamplingParams(temperature=0.0, max_tokens=8))
            num_rounds = self._rounds(cells, plain, speculative)
        return cells, num_rounds

    def _rounds(self, cells: Sequence[Cell], plain: LLM, speculative: LLM) -> int:
        """Plain and speculative runs in turn, cell by cell; later rounds leave out what would not end in time."""
        deadline = time.perf_counter() + 60 * self._plan.minutes * _SHARE_OF_TIME_FOR_ROUNDS
        costs_s = [0.0] * len(cells)
        for number in range(1, self._plan.max_rounds + 1):
            with _Bar(self._bars, f"decoding, round {number}", sum(map(self._num_tokens, cells))) as bar:
                for index, cell in enumerate(cells):
                    started = time.perf_counter()
                    if number == 1 or started + costs_s[index] <= deadline:
                        self._pair_of_runs(cell, plain, speculative, bar, f"round {number}")
                        costs_s[index] = time.perf_counter() - started
                    bar.complete(self._num_tokens(cell))
        return max(len(cell.plain) for cell in cells)

    def _num_tokens(self, cell: Cell) -> int:
        return 2 * self._plan.batches[cell.batch] * self._plan.max_tokens

    def _pair_of_runs(self, cell: Cell, plain: LLM, speculative: LLM, bar: _Bar, label: str) -> None:
        prompts = self._prompts[cell.kind][: self._plan.batches[cell.batch]]
        for llm, runs, name in ((plain, cell.plain, "plain"), (speculative, cell.speculative, self._plan.method)):
            bar.say(f"{label}: {cell.kind}, batch {cell.batch}, {name}")
            runs.append(decode_in_batches(llm, prompts, self._params, cell.batch, bar.advance))

    # --- identity ---------------------------------------------------------------------------------------------

    def _float32(self) -> tuple[Equality, ...]:
        num = self._plan.identity_prompts
        texts = [text for kind in self._plan.kinds for text in self._prompts[kind][:num]]
        with (
            ExitStack() as stack,
            _Bar(self._bars, "identity in float32", 2 * len(texts) * self._plan.max_tokens) as bar,
        ):
            plain, speculative = (
                decode(llm, texts, self._params, bar.advance).output_ids for llm in self._pair(stack, "float32")
            )
        return tuple(
            compare_outputs(kind, plain[start : start + num], speculative[start : start + num])
            for kind, start in zip(self._plan.kinds, range(0, len(texts), num), strict=True)
        )

    def _bfloat16(self, cells: Sequence[Cell]) -> TeacherForcing:
        import torch
        from transformers import AutoModelForCausalLM

        texts = [text for cell in cells for text in _forced_texts(cell, cell.speculative[0])]
        with _Bar(self._bars, "identity in bfloat16", sum(len(text.output_ids) for text in texts)) as bar:
            model = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.bfloat16)
            return teacher_force(model, texts, bar.advance)

    # --- models -----------------------------------------------------------------------------------------------

    def _pair(self, stack: ExitStack, dtype: str) -> tuple[LLM, LLM]:
        """Plain and speculative; the speculative one loads first, since its configuration may be at fault."""
        speculative = self._llm(stack, dtype, self._plan.speculative_config)
        return self._llm(stack, dtype, None), speculative

    def _llm(self, stack: ExitStack, dtype: str, speculative_config: Mapping[str, Any] | None) -> LLM:
        from specplug.host.llm import LLM

        with _Bar(self._bars, f"loading the model ({dtype})", None):
            llm = LLM(
                self._model,
                speculative_config=speculative_config,
                dtype=dtype,
                max_num_seqs=max(self._plan.batches),
                max_model_len=self._max_model_len,
            )
        return stack.enter_context(llm)


def _forced_texts(cell: Cell, run: Decoded) -> list[ForcedText]:
    pairs = zip(run.prompt_ids, run.output_ids, strict=True)
    return [
        ForcedText(f"{cell.kind} {number}, batch {cell.batch}", prompt_ids, output_ids)
        for number, (prompt_ids, output_ids) in enumerate(pairs, 1)
    ]


class _Bar:
    """One bar among the demo's, gone when its part is done."""

    def __init__(self, bars: Progress, description: str, total: int | None) -> None:
        self._bars = bars
        self._task = bars.add_task(description, total=total)
        self._planned = 0
        self.advance: Callable[[int], object] = lambda count: bars.advance(self._task, count)

    def say(self, description: str) -> None:
        self._bars.update(self._task, description=description)

    def complete(self, planned: int) -> None:
        """A part is done: texts may have ended before their length limit."""
        self._planned += planned
        self._bars.update(self._task, completed=self._planned)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_error: object) -> None:
        self._bars.remove_task(self._task)
