"""``specplug doctor``: whether a draft model can draft for a target, and whether it can pay."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from specplug.cli import options
from specplug.cli.console import output, progress, text_table
from specplug.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from specplug.tli.cost import CostReport, ModelSize
    from specplug.tli.report import PairReport

__all__ = ["doctor"]

_K = 3
"""The draft length of the advised configuration."""


def doctor(
    target: Annotated[str, typer.Option("--target", metavar="FOLDER", help="The model that is to be sped up.")],
    draft: Annotated[str, typer.Option("--draft", metavar="FOLDER", help="The model that is to draft for it.")],
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", metavar="FILE", help="Text such as you decode; default: a page of prose, code and more."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Examine a target and a draft model: vocabularies, special tokens, expected gain. Loads no weights."""
    sample = _read(text)
    options.check_model(target, "--target")
    options.check_model(draft, "--draft")
    with progress() as bars:
        bars.add_task("reading the two models", total=None)
        found = examine(target, draft, sample)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2, ensure_ascii=False))
        return
    console = output()
    for part in _render(found):
        console.print(part, soft_wrap=isinstance(part, str))  # a line to be copied must stay one


def _read(text: Path | None) -> str | None:
    if text is None:
        return None
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"--text {text} cannot be read: {fault}") from fault
    if not content.strip():
        raise ConfigError(f"--text {text} is empty; give a file with text such as you decode")
    return content


@dataclass(frozen=True, slots=True)
class Examination:
    """What the doctor found. ``vocabulary``: "same", "compatible" (equal ids, other sizes) or "different";
    ``difference`` says where. ``pair``: only for different ones."""

    target: ModelSize
    draft: ModelSize
    spelling: dict[str, str]
    vocabulary: str
    difference: str | None
    pair: PairReport | None
    cost: CostReport
    advice: tuple[str, ...]
    speculative_config: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; bytes as text that shows them."""
        found = asdict(self)
        if self.pair is not None:
            found["pair"]["strings"]["lost"] = [repr(data)[2:-1] for data in self.pair.strings.lost]
            found["pair"]["coverage"] |= _shares(self.pair.coverage)
            found["pair"]["strings"]["coverage"] |= _shares(self.pair.strings.coverage)
        return found


def _shares(coverage: Any) -> dict[str, float]:
    return {"token_share": coverage.token_share, "byte_share": coverage.byte_share}


def examine(target: str, draft: str, text: str | None = None) -> Examination:
    """Everything that can be told without weights. Raises ``ModelError`` or ``ConfigError`` for what is no model."""
    from specplug.tli import Vocabulary, is_same_vocabulary
    from specplug.tli.cost import estimate_cost
    from specplug.tli.report import report_pair, sample_text

    target_size, target_tokenizer = _open(target)
    draft_size, draft_tokenizer = _open(draft)
    sides = (
        Vocabulary(target_tokenizer, target_size.vocab_size, side="target"),
        Vocabulary(draft_tokenizer, draft_size.vocab_size, side="draft"),
    )
    vocabulary, difference = "same", None
    if not is_same_vocabulary(target_tokenizer, draft_tokenizer):
        difference = _difference(target_tokenizer, draft_tokenizer)
        vocabulary = "compatible" if difference is None else "different"
    pair = report_pair(*sides, sample_text() if text is None else text) if vocabulary == "different" else None
    cost = estimate_cost(target_size, draft_size, pair.coverage.token_share if pair else 1.0)
    return Examination(
        target=target_size,
        draft=draft_size,
        spelling={"target": sides[0].spelling.name, "draft": sides[1].spelling.name},
        vocabulary=vocabulary,
        difference=difference,
        pair=pair,
        cost=cost,
        advice=tuple(_advice(pair, cost, draft_size)),
        speculative_config={"method": "draft_model", "model": draft, "num_speculative_tokens": _K}
        | ({"use_heterogeneous_vocab": True} if pair else {}),
    )


def _open(model: str) -> tuple[ModelSize, Any]:
    """The model's size and its tokenizer."""
    from transformers import AutoConfig

    from specplug.models.loading import check_folder, find_folder, load_tokenizer
    from specplug.tli.cost import read_size

    folder = find_folder(model, None)
    check_folder(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return read_size(folder, config), load_tokenizer(folder)


def _difference(target_tokenizer: Any, draft_tokenizer: Any) -> str | None:
    """Where the two vocabularies differ; None where all ids that both have agree."""
    from specplug.proposers.draft_vocabulary import check_same_vocabulary

    try:
        check_same_vocabulary(target_tokenizer, draft_tokenizer)
    except ConfigError as error:
        return str(error).partition(". Set ")[0]
    return None


def _advice(pair: PairReport | None, cost: CostReport, draft: ModelSize) -> Iterable[str]:
    if pair is None:
        yield "The two models share their token ids: use the draft as it is, without use_heterogeneous_vocab."
    else:
        yield "The two models have different vocabularies: the draft needs use_heterogeneous_vocab."
        if "eos" not in pair.shared_roles:
            yield "One side declares no end of text, so that drafts never end; declare eos_token in both tokenizers."
    yield _cost_advice(cost)


def _cost_advice(cost: CostReport) -> str:
    from specplug.tli.cost import speed_up

    price = f"A draft token costs about {cost.least:.2f} to {cost.most:.2f} of a target step"
    if cost.ceiling <= cost.least:
        return (
            f"{price}, and at most {cost.ceiling:.0%} of the tokens can be accepted: this draft cannot pay. Take a "
            "much smaller one, or a method without a model (ngram, suffix)."
        )
    need = f"it pays where the acceptance rate is above that (it can reach {cost.ceiling:.0%})"
    if cost.ceiling <= cost.most:
        return (
            f"{price}; {need}. On a machine where small models are slow for their size it will not: measure with "
            "`specplug generate --stats`, and take a smaller draft if tokens per second fall."
        )
    least, most = (speed_up(cost.ceiling, _K, each) for each in (cost.most, cost.least))
    return (
        f"{price}; {need}. With {_K} draft tokens the most it can give is {least:.1f} to {most:.1f} times plain "
        "decoding, if nearly every draft is right. How many are was not measured: `specplug generate --stats` does."
    )


# --- for the eye --------------------------------------------------------------------------------------------------


def _render(found: Examination) -> Iterable[RenderableType]:
    yield _models_table(found)
    yield f"vocabularies: {found.vocabulary}" + (f" ({escape(found.difference)})" if found.difference else "")
    if found.pair is not None:
        yield _pair_table(found, found.pair)
        yield _roles_table(found.pair)
    for line in found.advice:
        yield escape(f"- {line}")
    yield escape(f"speculative_config: {json.dumps(found.speculative_config)}")


def _models_table(found: Examination) -> Table:
    table = text_table("models", "", "target", "draft")
    sides = (found.target, found.draft)
    table.add_row("folder", *(escape(size.folder) for size in sides))
    table.add_row("type", *(size.model_type for size in sides))
    table.add_row("vocabulary", *(f"{size.vocab_size:,} ids" for size in sides))
    table.add_row("spelling", found.spelling["target"], found.spelling["draft"])
    table.add_row("layers", *(str(size.num_layers) for size in sides))
    table.add_row("weights", *(f"{size.num_weights / 1e6:,.0f} M" for size in sides))
    table.add_row("read per step", *(f"{size.num_weights_read / 1e6:,.0f} M" for size in sides))
    return table


def _pair_table(found: Examination, pair: PairReport) -> Table:
    strings, coverage = pair.strings, pair.coverage
    table = text_table("tokens that can be drafted", "", "by bytes (specplug)", "by strings (others)")
    of_target, of_draft = (100.0 * pair.num_shared / size.vocab_size for size in (found.target, found.draft))
    table.add_row("pairs of equal bytes", f"{pair.num_by_bytes:,}", f"{strings.num_pairs - strings.num_wrong:,}")
    table.add_row("pairs of other bytes", "0", f"{strings.num_wrong:,}")
    table.add_row("with roles", f"{pair.num_shared:,}: {of_target:.1f} % of target, {of_draft:.1f} % of draft", "")
    table.add_row("draft ids masked as duplicates", f"{pair.num_duplicates:,}", "")
    table.add_row(
        "tokens of the text (acceptance ceiling)", _percent(coverage, "token"), _percent(strings.coverage, "token")
    )
    table.add_row("bytes of the text", _percent(coverage, "byte"), _percent(strings.coverage, "byte"))
    examples = " ".join(repr(data)[1:] for data in strings.lost)
    lost = f"{strings.num_lost:,}, such as {examples}" if examples else f"{strings.num_lost:,}"
    table.add_row("lost by strings", "", escape(lost))
    return table


def _percent(coverage: Any, what: str) -> str:
    return f"{100.0 * getattr(coverage, f'{what}_share'):.1f} %"


def _roles_table(pair: PairReport) -> Table:
    table = text_table("special tokens, by declared role", "role", "target", "draft", "paired")
    for role, tokens in pair.roles.items():
        shown = (escape(token) if token is not None else "none" for token in tokens)
        table.add_row(role, *shown, "yes" if role in pair.shared_roles else "no")
    return table
