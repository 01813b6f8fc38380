from __future__ import annotations

import re
import string
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specplug.cli import app
from specplug.demo import run
from specplug.demo.measure import Decoded, decode, decode_in_batches
from specplug.demo.prompts import KINDS, Prompt
from specplug.demo.report import Cell
from specplug.demo.run import DemoPlan
from specplug.errors import ConfigError
from specplug.host.llm import LLM
from specplug.metrics import merge
from specplug.sampling_params import SamplingParams
from specplug.testing import EOS_TOKEN_ID, tiny_llama, toy_tokenizer

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = sorted(set(string.printable) - set("\r\x0b\x0c"))
    texts.insert(EOS_TOKEN_ID, "<end>")
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_llama(vocab_size=len(texts), max_position_embeddings=128).save_pretrained(folder)
    toy_tokenizer(texts).save_pretrained(folder)
    return folder


def short_prompts() -> dict[str, list[Prompt]]:
    return {kind: [Prompt(kind, f"{kind} {number} abcabc", is_chat=False) for number in range(8)] for kind in KINDS}


def test_decoding_is_timed_after_the_first_tokens(tiny_model: Path) -> None:
    counted: list[int] = []
    with LLM(str(tiny_model), speculative_config=NGRAM, max_num_seqs=4) as llm:
        found = decode(llm, ["abcabcabc", "xyzxyz"], GREEDY, counted.append)
        plain = [output.outputs[0].token_ids for output in llm.generate(["abcabcabc", "xyzxyz"], GREEDY)]
    assert found.output_ids == plain
    assert [len(ids) for ids in found.prompt_ids] == [9, 6]
    assert sum(counted) == 18
    assert found.num_decode_tokens <= 16
    assert found.tokens_per_s > 0
    assert found.counts.num_emitted_tokens == 18


def test_batches_are_added_up(tiny_model: Path) -> None:
    with LLM(str(tiny_model), max_num_seqs=4) as llm:
        found = decode_in_batches(llm, ["abc", "abcd", "abcde"], GREEDY, batch=2)
    assert [len(ids) for ids in found.output_ids] == [9, 9, 9]
    assert found.num_decode_tokens == 24
    assert (found.counts.num_steps, found.counts.tokens_per_step) == (27, 1.0)


def test_the_whole_demo_on_a_tiny_model(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(run, "load_prompts", short_prompts)
    plot = tmp_path / "plot.png"
    result = CliRunner().invoke(app, ["demo", "--quick", "--model", str(tiny_model), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    for title in KINDS.values():
        assert title in result.stdout
    for wanted in ("speed-up", "acceptance length", "tokens per step", "float32: 5 of 5 outputs equal", "arg-max"):
        assert wanted in result.stdout
    assert re.search(r"bfloat16 on (torch|native): \d+ of 15 outputs equal plain decoding", result.stdout)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_difference_in_float32_fails_the_demo(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load_prompts", short_prompts)
    monkeypatch.setattr(run._Demo, "_float32", lambda _demo: (run.compare_outputs("edit", [[1]], [[2]]),))
    plot = str(tmp_path / "plot.png")
    result = CliRunner().invoke(app, ["demo", "--quick", "--model", str(tiny_model), "--plot", plot])
    assert result.exit_code == 1
    assert "edit: differs from token 0 on" in result.stdout


def test_methods_have_settings_and_a_given_config_wins() -> None:
    plan = DemoPlan.full(method="ngram", speculative_config=None, minutes=6)
    assert (plan.method, plan.speculative_config["prompt_lookup_min"]) == ("ngram", 2)
    other = DemoPlan.quick(method="mine", speculative_config=None, minutes=6)
    assert dict(other.speculative_config) == {"method": "mine", "num_speculative_tokens": 5}
    given = DemoPlan.full(method="ngram", speculative_config='{"method":"suffix"}', minutes=6)
    assert dict(given.speculative_config) == {"method": "suffix"}
    with pytest.raises(ConfigError, match="--speculative-config is empty"):
        DemoPlan.full(method="ngram", speculative_config="{}", minutes=6)


def test_every_cell_runs_once_and_again_only_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.progress import Progress

    seconds = iter(range(10_000))
    monkeypatch.setattr(run.time, "perf_counter", lambda: float(next(seconds)))
    done: list[Cell] = []

    def pair(self: run._Demo, cell: Cell, *_arguments: object) -> None:
        done.append(cell)
        cell.plain.append(Decoded(1, 1.0, [], [], merge([])))

    monkeypatch.setattr(run._Demo, "_pair_of_runs", pair)
    cells = [Cell(kind, 1) for kind in KINDS]
    for minutes, rounds in ((0.0, 1), (100.0, 2)):
        done.clear()
        demo = run._Demo("model", DemoPlan(NGRAM, minutes=minutes), Progress(disable=True))
        demo._rounds(cells, None, None)  # type: ignore[arg-type]
        assert done == cells * rounds


def test_speed_up_is_the_median_of_neighbouring_runs() -> None:
    def run_of(tokens_per_s: float) -> Decoded:
        return Decoded(100, 100 / tokens_per_s, [], [], merge([]))

    cell = Cell("edit", 1, [run_of(10), run_of(5), run_of(10)], [run_of(20), run_of(15), run_of(21)])
    assert cell.speed_up == pytest.approx(2.1)
    assert cell.plain_tokens_per_s == pytest.approx(10)
