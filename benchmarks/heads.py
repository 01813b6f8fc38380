"""Heads on the target's hidden states, measured on the demo model: EAGLE-3, the MLP speculator, Medusa.

    python benchmarks/heads.py [PART ...] [--trained FOLDER] [--methods eagle3 mlp medusa] [--pairs 5] [--tokens 32]

Parts: ``speed`` (batch 1, HumanEval, edit and chat prompts: acceptance and speed of every method for 2 to 6 draft
tokens, then each at its best length in turn with plain decoding and n-gram) and ``loop`` (what a draft takes beside its
layers' matrix products alone, on torch and on installed kernels).

The heads are those of ``benchmarks/train_heads.py``. A predicted speed-up is T(1) L / (D + T(K + 1)): measured times T
of the target's forward with so many tokens and D of a draft, and the measured tokens per step L. All runs are in one
process on one loaded target. Rows go to ``results/heads_<part>.csv``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import addressof, c_int64
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from common import circumstances, paired_ratio, wait_until_idle
from host import Bench, Parts, Row, TimedTarget, ngram, run_parts

if TYPE_CHECKING:
    from specplug_native.library import Library

KINDS = ("humaneval", "edit", "chat")
LENGTHS = (2, 3, 4, 5, 6)
METHODS = {"eagle3": "eagle3", "mlp": "mlp_speculator", "medusa": "medusa"}
NGRAM_LENGTH = 8
LOOP_LENGTH = 4
REPLAYS = 5
SWEEPS = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. ``forward_s``: tokens of a decoding step -> median seconds; ``propose_s``: of a draft."""

    tokens_per_s: float
    tokens_per_step: float
    acceptance_length: float
    propose_s: float
    draft_tokens: float
    forward_s: dict[int, float]
    moving: float
    """Of the time of all forwards, what moving accepted tree nodes took."""


class TimedForwards(TimedTarget):
    """Keeps the time of every forward since :meth:`clear`."""

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self.steps: list[tuple[int, float]] = []
        self.moving_s = 0.0

    def clear(self) -> None:
        self.steps.clear()
        self.moving_s = 0.0

    def compact(self, *moves: Any) -> None:
        start = time.perf_counter()
        self._target.compact(*moves)
        self.moving_s += time.perf_counter() - start

    def forward(self, input_ids: Any, *arguments: Any, **options: Any) -> Any:
        output = super().forward(input_ids, *arguments, **options)
        self.steps.append((self.num_tokens, self.forward_s))
        return output

    def close(self) -> None:
        """A session that ends leaves the target open for the next one."""

    def medians(self) -> dict[int, float]:
        """Tokens of a step -> median seconds."""
        sizes = {size for size, _ in self.steps}
        return {size: statistics.median(s for other, s in self.steps if other == size) for size in sizes}


class Rig:
    """A loaded target that sessions with one configuration each borrow in turn."""

    def __init__(self, bench: Bench, kernels: str = "auto") -> None:
        import torch

        from specplug.config import resolve_engine_args
        from specplug.models.loading import load_target

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        engine, _ = resolve_engine_args(
            bench.args.model, {"dtype": "bfloat16", "kernels": kernels, "max_num_seqs": 1, "max_model_len": 1024}
        )
        self.bench = bench
        self.target = TimedForwards(load_target(engine))
        self.kernels: str = getattr(self.target.kernels, "name", "torch")
        bench.versions["kernels"] = self.kernels

    def llm(self, config: dict[str, Any] | None) -> Any:
        from specplug import LLM

        return LLM(self.target, speculative_config=config, max_num_seqs=1, max_model_len=1024, strict=True)

    def run(self, config: dict[str, Any] | None, kind: str) -> Measured:
        with self.llm(config) as llm:
            return self.decode(llm, kind)

    def decode(self, llm: Any, kind: str) -> Measured:
        """The kind's prompts, one after the other."""
        from specplug import SamplingParams
        from specplug.demo.measure import decode_in_batches

        params = SamplingParams(temperature=0.0, max_tokens=self.bench.args.tokens, ignore_eos=True)
        self.target.clear()
        done = decode_in_batches(llm, self.bench.some(kind, 1), params, 1)
        totals = llm.acceptance.aggregate()
        num_drafts = max(1, totals.num_drafts)
        return Measured(
            tokens_per_s=done.tokens_per_s,
            tokens_per_step=totals.tokens_per_step or 1.0,
            acceptance_length=totals.mean_acceptance_length,
            propose_s=totals.propose_s / num_drafts,
            draft_tokens=totals.num_draft_tokens / num_drafts,
            forward_s=self.target.medians(),
            moving=self.target.moving_s / sum(seconds for _, seconds in self.target.steps),
        )

    @cached_property
    def methods(self) -> list[str]:
        """Those asked for that were trained."""
        folder = Path(self.bench.args.trained)
        found = [name for name in self.bench.args.methods if (folder / name / "config.json").is_file()]
        if not found:
            raise SystemExit(f"{folder} holds no trained heads; run benchmarks/train_heads.py, or give --trained")
        return found

    def config(self, name: str, k: int) -> dict[str, Any]:
        return {
            "method": METHODS[name],
            "model": str(Path(self.bench.args.trained) / name),
            "num_speculative_tokens": k,
        }


# --- speed ----------------------------------------------------------------------------------------------------


def speed(bench: Bench) -> Iterator[Row]:
    """Every length beside plain decoding, then the best of each method in turn with the others."""
    rig = Rig(bench)
    rig.run(None, KINDS[0])
    for kind in KINDS:
        load = wait_until_idle()
        best: dict[str, int] = {}
        for name in rig.methods:
            rows = [_swept(rig, name, k, kind) for k in LENGTHS]
            best[name] = max(rows, key=lambda row: float(row["speed_up"]))["k"]
            yield from (row | circumstances(load, **bench.versions) for row in rows)
        yield from _in_turn(rig, best, kind)


def _swept(rig: Rig, name: str, k: int, kind: str) -> Row:
    """Medians over pairs of runs, plain and drafted one after the other: the machine's pace changes between pairs."""
    pairs = [(rig.run(None, kind), rig.run(rig.config(name, k), kind)) for _ in range(SWEEPS)]

    def median(value: Callable[[Measured, Measured], float]) -> float:
        return statistics.median(value(plain, drafted) for plain, drafted in pairs)

    _, any_drafted = pairs[0]
    speed_up = median(lambda plain, drafted: drafted.tokens_per_s / plain.tokens_per_s)
    predicted = median(lambda plain, drafted: _predicted(plain, drafted, k))
    of_predicted = median(
        lambda plain, drafted: drafted.tokens_per_s / plain.tokens_per_s / _predicted(plain, drafted, k)
    )
    cost = median(lambda plain, drafted: drafted.propose_s / drafted.draft_tokens / plain.forward_s[1])
    print(
        f"  {kind}, {name} K={k}: acceptance length {any_drafted.acceptance_length:.2f}, {speed_up:.2f} x plain, "
        f"{of_predicted:.2f} of predicted, a draft token {cost:.3f} of a forward",
        flush=True,
    )
    return {
        "what": f"medians of {SWEEPS} pairs",
        "kind": kind,
        "method": name,
        "k": k,
        "mean_acceptance_length": f"{any_drafted.acceptance_length:.3f}",
        "tokens_per_step": f"{any_drafted.tokens_per_step:.3f}",
        "plain_tokens_per_s": f"{median(lambda plain, _: plain.tokens_per_s):.2f}",
        "tokens_per_s": f"{median(lambda _, drafted: drafted.tokens_per_s):.2f}",
        "speed_up": f"{speed_up:.3f}",
        "predicted": f"{predicted:.3f}",
        "measured_over_predicted": f"{of_predicted:.3f}",
        "forward_1_ms": f"{1000 * median(lambda plain, _: plain.forward_s[1]):.2f}",
        "forward_k_ms": f"{1000 * median(lambda _, drafted: _forward_s(drafted, k)):.2f}",
        "draft_ms": f"{1000 * median(lambda _, drafted: drafted.propose_s):.2f}",
        "draft_token_of_forward": f"{cost:.4f}",
    }


def _forward_s(drafted: Measured, k: int) -> float:
    """Of a step with a full draft, or with the longest that came."""
    return drafted.forward_s[max(size for size in drafted.forward_s if size <= k + 1)]


def _predicted(plain: Measured, drafted: Measured, k: int) -> float:
    return plain.forward_s[1] * drafted.tokens_per_step / (drafted.propose_s + _forward_s(drafted, k))


def _in_turn(rig: Rig, best: dict[str, int], kind: str) -> Iterator[Row]:
    """Plain, n-gram and every method, round after round; ratios within a round."""
    configs: dict[str, dict[str, Any] | None] = {"plain": None, "ngram": ngram(NGRAM_LENGTH)}
    configs |= {name: rig.config(name, k) for name, k in best.items()}
    load = wait_until_idle()
    speeds: dict[str, list[float]] = {name: [] for name in configs}
    for _ in range(rig.bench.args.pairs):
        for name, config in configs.items():
            speeds[name].append(rig.run(config, kind).tokens_per_s)
    for name, k in best.items():
        for other in ("plain", "ngram"):
            ratio = paired_ratio(speeds[name], speeds[other])
            print(f"  {kind}, {name} K={k} / {other}: {ratio}", flush=True)
            yield {
                "what": f"in turn, over {other}",
                "kind": kind,
                "method": name,
                "k": k,
                "tokens_per_s": f"{statistics.median(speeds[name]):.2f}",
                "other_tokens_per_s": f"{statistics.median(speeds[other]):.2f}",
                "ratio_median": f"{ratio.median:.3f}",
                "ratio_low": f"{ratio.low:.3f}",
                "ratio_high": f"{ratio.high:.3f}",
                "pairs": ratio.num_pairs,
                **circumstances(load, **rig.bench.versions),
            }


# --- the drafting loop ----------------------------------------------------------------------------------------


def loop(bench: Bench) -> Iterator[Row]:
    """A draft's time, and in the same place that of its matrix products alone, one after the other.

    On torch first, then on installed kernels, whose drafts are also compared with torch's products.
    """
    torch_s: dict[str, float] = {}
    for kernels in ("torch", "auto"):
        rig = Rig(bench, kernels)
        if rig.kernels == kernels or rig.kernels != "torch":
            yield from _loops(rig, torch_s)


def _loops(rig: Rig, torch_s: dict[str, float]) -> Iterator[Row]:
    bench = rig.bench
    rig.run(None, "humaneval")
    for name in rig.methods:
        load = wait_until_idle()
        with rig.llm(rig.config(name, LOOP_LENGTH)) as llm:
            drafts = Drafts(llm._session.hooks.instance(METHODS[name]))
            rig.decode(llm, "chat")
            for _ in range(2 * REPLAYS):
                drafts.start_over()
                drafted = rig.decode(llm, "chat")
        draft_s, products_s, warm_s = drafts.draft_s(), drafts.products_s(), drafts.replay_s()
        torch_s.setdefault(name, products_s)
        print(
            f"  {name}, {LOOP_LENGTH} tokens on {rig.kernels}: {1000 * draft_s:.2f} ms, its products in its place "
            f"{1000 * products_s:.2f} ms, ratio {draft_s / products_s:.2f}; {1000 * warm_s:.2f} ms where the weights "
            f"are in the caches already; over torch's products {draft_s / torch_s[name]:.2f}",
            flush=True,
        )
        yield {
            "method": name,
            "k": LOOP_LENGTH,
            "unit": "ms per draft",
            "draft": f"{1000 * draft_s:.3f}",
            "matrix_products": f"{1000 * products_s:.3f}",
            "ratio": f"{draft_s / products_s:.3f}",
            "matrix_products_warm": f"{1000 * warm_s:.3f}",
            "ratio_warm": f"{draft_s / warm_s:.3f}",
            "ratio_torch_products": f"{draft_s / torch_s[name]:.3f}",
            "products_per_draft": f"{drafts.num_products:.1f}",
            "forward_1_ms": f"{1000 * drafted.forward_s.get(1, float('nan')):.2f}",
            **circumstances(load, **bench.versions),
        }


class Drafts:
    """A proposer's drafts of one text, made several times over: the first time its matrix products are noted, then
    every other draft is timed, and in the place of those between their products alone; after :meth:`start_over` it is
    the other way round.

    Where they are run matters: the target's forward has just pushed all other weights out of the caches.
    """

    def __init__(self, proposer: Any) -> None:
        self._propose = proposer.propose
        self._products: list[Products] = []
        self._times: list[list[list[float]]] = []
        """Of each draft: of itself, of its products."""
        self._number = 0
        self._pass = 0
        proposer.propose = self._noted

    def start_over(self) -> None:
        """The same text comes again."""
        if not self._times:
            self._times = [[[], []] for _ in self._products]
        elif self._number != len(self._products):
            raise SystemExit(f"a text of {len(self._products)} drafts had {self._number} when it was made again")
        self._number, self._pass = 0, self._pass + 1

    def _noted(self, batch: Any, limits: Any) -> Any:
        if self._times:
            return self._timed(batch, limits)
        products = Products()
        self._products.append(products)
        with products.noted():
            return self._propose(batch, limits)

    def _timed(self, batch: Any, limits: Any) -> Any:
        number, self._number = self._number, self._number + 1
        of_itself, of_products = self._times[number]
        if (number + self._pass) % 2:
            of_products.append(self._products[number].run())
            return self._propose(batch, limits)
        start = time.perf_counter()
        draft = self._propose(batch, limits)
        of_itself.append(time.perf_counter() - start)
        return draft

    def draft_s(self) -> float:
        """Seconds of a draft: the mean over the text, the median of the times it was made."""
        return statistics.mean(statistics.median(of_itself) for of_itself, _ in self._times)

    def products_s(self) -> float:
        """The same for its products."""
        return statistics.mean(statistics.median(of_products) for _, of_products in self._times)

    def replay_s(self) -> float:
        """The same for its products, each draft's again and again."""
        return statistics.mean(
            statistics.median(products.run() for _ in range(REPLAYS + 1)) for products in self._products
        )

    @property
    def num_products(self) -> float:
        """In a draft."""
        return statistics.mean(len(products.calls) for products in self._products)


@dataclass(frozen=True, slots=True)
class NativeProduct:
    """A product of specplug-native: ``linear`` of so many rows."""

    linear: Any
    num_rows: int


class Products:
    """The matrix products that a draft consists of, as they reach torch's dispatcher or the kernels."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any] | NativeProduct] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Those of what is done inside."""
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        aten, mkldnn = torch.ops.aten, torch.ops.mkldnn
        products = {aten.mm.default, aten.addmm.default, aten.linear.default, mkldnn._linear_pointwise.default}
        calls = self.calls

        class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func in products:
                    calls.append(partial(func, *args))
                return func(*args, **(kwargs or {}))

        with Recorder(), _native_products(calls):  # type: ignore[no-untyped-call]
            yield

    def run(self) -> float:
        """Seconds of one after the other with nothing between; those of specplug-native that follow each other are
        one call."""
        import torch

        runs = self._runs
        with torch.inference_mode():
            start = time.perf_counter()
            for run in runs:
                run()
            return time.perf_counter() - start

    @cached_property
    def _runs(self) -> list[Callable[[], Any]]:
        runs: list[Callable[[], Any]] = []
        for _, calls in groupby(self.calls, lambda call: isinstance(call, NativeProduct)):
            together = list(calls)
            native = [call for call in together if isinstance(call, NativeProduct)]
            runs += [_in_one_call(native)] if native else [call for call in together if callable(call)]
        return runs


@contextmanager
def _native_products(calls: list[Any]) -> Iterator[None]:
    """Note the products that specplug-native's parts of heads do."""
    from specplug.proposers.heads.reader import HeadReader

    try:
        from specplug_native.layer import NativeLayer
        from specplug_native.weights import NativeLinear
    except ImportError:
        yield
        return
    run_layer, run_linear = NativeLayer.__call__, NativeLinear.__call__

    def layer(self: Any, residual: Any, states: Any, *more: Any) -> Any:
        calls.extend(NativeProduct(product, len(states)) for product in self.products)
        return run_layer(self, residual, states, *more)

    def linear(self: Any, states: Any) -> Any:
        calls.append(NativeProduct(self.struct, len(states)))
        return run_linear(self, states)

    def token_by_token(self: Any, *arguments: Any) -> bool:
        """The same products, one call each."""
        return False

    with (
        patch.object(NativeLayer, "__call__", layer),
        patch.object(NativeLinear, "__call__", linear),
        patch.object(HeadReader, "read_chain", token_by_token),
    ):
        yield


def _in_one_call(products: list[NativeProduct]) -> Callable[[], None]:
    import torch
    from specplug_native.library import Linear, load_library

    linears = (Linear * len(products))(*[product.linear for product in products])
    rows = (c_int64 * len(products))(*[product.num_rows for product in products])
    widest = max(max(each.linear.in_features, each.linear.out_features) * each.num_rows for each in products)
    states, outputs = (torch.zeros(widest, dtype=torch.bfloat16) for _ in range(2))
    run, threads = cast("Library", load_library()).products, torch.get_num_threads()
    return lambda: run(linears, addressof(rows), len(products), threads, states.data_ptr(), outputs.data_ptr())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the heads are, and which of them."""
    from specplug.demo.models import default_cache_dir

    parser.add_argument("--trained", default=str(default_cache_dir(os.environ) / "trained"), metavar="FOLDER")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))


PARTS: Parts = {"speed": speed, "loop": loop}

if __name__ == "__main__":
    run_parts("heads", __doc__, PARTS, tokens=32, pairs=5, options=add_options)
