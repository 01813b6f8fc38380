"""What the demo shows: one table per kind, the identity report, a plot."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from specplug.demo.identity import Deviation, Equality, TeacherForcing, compare_outputs
from specplug.demo.measure import Decoded
from specplug.demo.models import DEMO_INSTALL
from specplug.demo.prompts import KINDS
from specplug.metrics import merge

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Cell", "DemoReport"]


@dataclass(slots=True)
class Cell:
    """One kind at one batch size: plain and speculative runs, in pairs."""

    kind: str
    batch: int
    plain: list[Decoded] = field(default_factory=list)
    speculative: list[Decoded] = field(default_factory=list)

    @property
    def plain_tokens_per_s(self) -> float:
        return statistics.median(run.tokens_per_s for run in self.plain)

    @property
    def speculative_tokens_per_s(self) -> float:
        return statistics.median(run.tokens_per_s for run in self.speculative)

    @property
    def speed_up(self) -> float:
        """Median of the ratios of neighbouring runs, so that a slow phase of the machine falls on both."""
        pairs = zip(self.plain, self.speculative, strict=True)
        return statistics.median(b.tokens_per_s / a.tokens_per_s if a.tokens_per_s else 1.0 for a, b in pairs)

    @property
    def equality(self) -> Equality:
        """Of the first runs' outputs."""
        return compare_outputs(self.kind, self.plain[0].output_ids, self.speculative[0].output_ids)

    def rows(self, method: str) -> Iterator[tuple[str, ...]]:
        """Table rows: batch, decoding, tokens/s, speed-up, mean acceptance length, rate, tokens per step."""
        plain = merge(run.counts for run in self.plain)
        counts = merge(run.counts for run in self.speculative)
        rate = counts.draft_acceptance_rate
        yield (
            str(self.batch), "plain", f"{self.plain_tokens_per_s:.1f}", "", "", "", _number(plain.tokens_per_step)
        )  # fmt: skip
        yield (
            "",
            method,
            f"{self.speculative_tokens_per_s:.1f}",
            f"{self.speed_up:.2f}x",
            f"{counts.mean_acceptance_length:.2f}",
            "none drafted" if rate is None else f"{100 * rate:.0f} %",
            _number(counts.tokens_per_step),
        )


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The finished demo."""

    method: str
    num_speculative_tokens: int
    kernels: str
    """What ran the target in bfloat16: "torch", or the name of installed kernels."""
    cells: tuple[Cell, ...]
    num_rounds: int
    equalities: tuple[Equality, ...]
    forced: TeacherForcing
    tokenizer: Any
    decoding_s: float

    @property
    def is_identical(self) -> bool:
        """Whether all float32 outputs equal the plain ones."""
        return all(each.num_equal == each.num_compared for each in self.equalities)

    def renderables(self) -> Iterator[RenderableType]:
        """Tables and lines, in the order to print them."""
        runs = (
            "one run each: the speed-ups are a smoke test, not a measurement"
            if self.num_rounds == 1
            else f"medians of up to {self.num_rounds} runs in turn"
        )
        yield (
            f"bfloat16 on {self.kernels}, greedy, decoding only (prompts excluded), {runs}; "
            f"K={self.num_speculative_tokens}; acceptance length incl. bonus token; "
            f"decoding took {self.decoding_s:.0f} s"
        )
        for kind in dict.fromkeys(cell.kind for cell in self.cells):
            yield self._table(kind)
        yield ""
        yield from self._identity()

    def _table(self, kind: str) -> Table:
        table = Table(title=KINDS[kind], title_justify="left", box=box.SIMPLE_HEAD)
        for column in ("batch", "decoding", "tokens/s", "speed-up", "acceptance length", "accepted", "tokens per step"):
            table.add_column(column, justify="left" if column == "decoding" else "right")
        for cell in self.cells:
            if cell.kind == kind:
                for row in cell.rows(self.method):
                    table.add_row(*row)
        return table

    def _identity(self) -> Iterator[RenderableType]:
        yield "identity"
        yield f"  float32: {_equal(self.equalities)}"
        for each in self.equalities:
            if each.first_difference is not None:
                yield f"  [bold red]{each.kind}: differs from token {each.first_difference} on[/]"
        yield f"  bfloat16 on {self.kernels}: {_equal([cell.equality for cell in self.cells])}"
        deviations = self.forced.deviations
        agreeing = self.forced.num_positions - len(deviations)
        yield (
            f"  bfloat16, read by transformers: {agreeing} of {self.forced.num_positions} emitted tokens are the "
            "target's arg-max given the text before them"
        )
        if deviations:
            yield from self._gaps(deviations)

    def _gaps(self, deviations: Sequence[Deviation]) -> Iterator[RenderableType]:
        yield (
            "  the others, with how far the arg-max's logit is above the emitted token's "
            "(ulp: the last place of bfloat16 there):"
        )
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("output", "token", "emitted", "arg-max", "gap", "ulp"):
            table.add_column(column, justify="right" if column in ("token", "gap", "ulp") else "left")
        for one in deviations:
            emitted, best = (escape(repr(self.tokenizer.decode([each]))) for each in (one.emitted_id, one.best_id))
            table.add_row(one.label, str(one.position), emitted, best, f"{one.gap:.3f}", f"{one.ulps:.1f}")
        yield table

    def save_plot(self, path: Path) -> str:
        """Write the PNG; returns a line that says where it is, or what to install."""
        if importlib.util.find_spec("matplotlib") is None:
            return f"no plot: matplotlib is not installed; pip install {DEMO_INSTALL}"
        _plot(self, path)
        return f"plot saved to {path}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _equal(equalities: Sequence[Equality]) -> str:
    equal, compared = (sum(getattr(each, name) for each in equalities) for name in ("num_equal", "num_compared"))
    return f"{equal} of {compared} outputs equal plain decoding, token for token"


def _plot(report: DemoReport, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches = list(dict.fromkeys(cell.batch for cell in report.cells))
    figure = Figure(figsize=(5.5 * len(batches), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, batch in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
        _bars(axes, [cell for cell in report.cells if cell.batch == batch], report.method)
        axes.set_title(f"batch {batch}")
    figure.suptitle(f"Decoding speed, plain and with {report.method} (K={report.num_speculative_tokens})")
    figure.savefig(path, dpi=130)


def _bars(axes: Any, cells: Sequence[Cell], method: str) -> None:
    width = 0.38
    for offset, label, color, heights in (
        (-width / 2, "plain", "#9aa5b1", [cell.plain_tokens_per_s for cell in cells]),
        (width / 2, method, "#2b6cb0", [cell.speculative_tokens_per_s for cell in cells]),
    ):
        axes.bar([x + offset for x in range(len(cells))], heights, width, label=label, color=color)
    for x, cell in enumerate(cells):
        height = max(cell.plain_tokens_per_s, cell.speculative_tokens_per_s)
        axes.annotate(f"{cell.speed_up:.2f}x", (x, height), ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(cells)), [cell.kind for cell in cells])
    axes.set_ylabel("tokens/s")
    axes.margins(y=0.12)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
