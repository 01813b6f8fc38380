from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specplug.cli import app, options
from specplug.config import engine
from specplug.demo.models import DEMO_INSTALL, PackagedModel
from specplug.host import llm

NGRAM = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_min":1,"prompt_lookup_max":3}'
PROMPT = "abcabcabcabc"

runner = CliRunner()


def generate(*arguments: str, code: int = 0, **kwargs: Any) -> Any:
    result = runner.invoke(app, ["generate", *arguments], **kwargs)
    assert result.exit_code == code, result.output
    return result


def as_json(*arguments: str, **kwargs: Any) -> Any:
    return json.loads(generate(*arguments, "--json", **kwargs).stdout)


@pytest.fixture
def model(tiny_model: Path) -> list[str]:
    return ["--model", str(tiny_model), "--max-tokens", "12", "--ignore-eos"]


def test_the_prompt_comes_from_argument_file_or_stdin(model: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    from_argument = generate(PROMPT, *model).stdout
    assert from_argument.strip("\n") != ""
    assert generate("--prompt-file", str(file), *model).stdout == from_argument
    assert generate(*model, input=PROMPT).stdout == from_argument
    assert generate("-", *model, input=PROMPT).stdout == from_argument


def test_a_prompt_on_stdin_that_is_no_text(model: list[str]) -> None:
    assert "the prompt on stdin is not utf-8 text" in generate(*model, input=b"ab\xff", code=2).stderr


def test_a_prompt_that_the_tokenizer_cannot_write(model: list[str]) -> None:
    assert "cannot be tokenised" in generate("\udcff", *model, code=2).stderr


def test_kernels_are_chosen_on_the_command_line(model: list[str]) -> None:
    assert "kernels      torch" in generate(PROMPT, *model, "--kernels", "torch", "--stats").stderr
    assert 'kernels="nativ": no kernels of that name' in generate(PROMPT, *model, "--kernels", "nativ", code=2).stderr


def test_the_files_max_num_seqs_stands(model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    resolve = engine.resolve_engine_args
    monkeypatch.setattr(llm, "resolve_engine_args", lambda *given: seen.append(given[1]) or resolve(*given))
    generate(PROMPT, *model)
    file = tmp_path / "a.yaml"
    file.write_text("max_num_seqs: 3\n")
    generate(PROMPT, *model, "--config", str(file))
    assert [each["max_num_seqs"] for each in seen] == [1, 3]


def test_speculation_changes_nothing_but_the_counts(model: list[str]) -> None:
    plain = as_json(PROMPT, *model)
    speculative = as_json(PROMPT, *model, "--speculative-config", NGRAM)
    assert speculative["token_ids"] == plain["token_ids"]
    assert speculative["text"] == plain["text"]
    assert speculative["metrics"]["num_draft_tokens"] > 0
    assert plain["metrics"]["draft_acceptance_rate"] is None
    assert speculative["finish_reason"] == "length"


@pytest.mark.parametrize("spelling", ["--speculative-config", "--speculative_config", "-sc"])
def test_spellings_of_the_speculative_config(model: list[str], spelling: str) -> None:
    assert as_json(PROMPT, *model, spelling, NGRAM)["metrics"]["num_spec_tokens"] == 3


def test_streamed_text_is_the_same_text(model: list[str]) -> None:
    assert generate(PROMPT, *model, "--stream").stdout == generate(PROMPT, *model).stdout


def test_sampling_options_reach_the_sampler(model: list[str]) -> None:
    hot = ["--temperature", "1.5", "--seed"]
    first = as_json(PROMPT, *model, *hot, "1")["token_ids"]
    assert as_json(PROMPT, *model, *hot, "1")["token_ids"] == first
    assert as_json(PROMPT, *model, *hot, "2")["token_ids"] != first
    assert as_json(PROMPT, *model, *hot, "1", "--top-k", "1")["token_ids"] == as_json(PROMPT, *model)["token_ids"]
    assert len(as_json(PROMPT, *model, "--max-tokens", "3")["token_ids"]) == 3


def test_a_stop_string_ends_the_text_and_is_reported(model: list[str]) -> None:
    text = as_json(PROMPT, *model)["text"]
    stopped = generate(PROMPT, *model, "--stop", text[4], "--stats")
    assert stopped.stdout.rstrip("\n") == text[: text.index(text[4])]
    assert f"stop at token {text.index(text[4]) + 1}, matched {text[4]!r}" in stopped.stderr


def test_stats_go_to_stderr_with_length_rate_and_k_on_one_line(model: list[str]) -> None:
    result = generate(PROMPT, *model, "-sc", NGRAM, "--stats")
    (line,) = [line for line in result.stderr.splitlines() if "incl. bonus" in line]
    assert "% of drafted, K=3" in line
    for wanted in ("tokens/s", "over all", "per position", "finished     length at token 12"):
        assert wanted in result.stderr
    assert "tokens/s" not in result.stdout


def test_stats_without_the_acceptance_plugin(model: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from specplug.host.llm import LLM

    monkeypatch.setattr(LLM, "acceptance", property(lambda _self: None))
    result = generate(PROMPT, *model, "--stats")
    assert "the plugin acceptance is switched off" in result.stderr
    assert "metrics" not in as_json(PROMPT, *model)  # B112: switched off, the field is absent


def test_settings_from_a_file_and_options_over_them(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        f"model: {tiny_model}\n"
        f"speculative_config: {NGRAM}\n"
        "gpu-memory-utilization: 0.5\n"
        "sampling_params:\n  max_tokens: 5\n  ignore_eos: true\n"
    )
    from_file = as_json(PROMPT, "--config", str(file))
    assert (len(from_file["token_ids"]), from_file["metrics"]["num_spec_tokens"]) == (5, 3)
    over = as_json(PROMPT, "--config", str(file), "--max-tokens", "7", "-sc", NGRAM.replace(":3,", ":2,", 1))
    assert (len(over["token_ids"]), over["metrics"]["num_spec_tokens"]) == (7, 2)


def test_plugins_of_file_and_options_add_up(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("plugins: [first]\n")
    found = options.gather(file, model=None, speculative_config=None, plugins=["second:{}"], engine={})
    assert found.plugins == ("first", "second:{}")


@pytest.mark.parametrize("text", ["plugins: 3\n", "sampling_params: [1]\n"])
def test_sections_of_the_wrong_shape_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    assert f"{text.split(':')[0]}=" in generate(PROMPT, "--config", str(file), code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--prompt-file", "y"], "both given; keep one"),
        (["--prompt-file", "no-such-file"], "no-such-file cannot be read"),
        (["x", "--stream", "--json"], "keep one"),
        (["x", "--temperature", "-1"], "temperature=-1.0"),
        (["x", "-sc", "{'method': 'ngram'}"], "JSON needs double quotes"),
        (["x", "--config", "no-such-file.yaml"], "no-such-file.yaml cannot be read"),
        (["x", "--plugin", "no-such-plugin"], "no-such-plugin"),
        (["x", "--chat"], "no chat template"),
        (["a" * 600], "max_model_len is 512"),
        ([""], "prompt is empty"),
    ],
)
def test_bad_input_is_one_message(model: list[str], arguments: list[str], message: str) -> None:
    result = generate(*arguments, *model, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_no_prompt_at_a_terminal_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from specplug.cli.generate import _read_prompt
    from specplug.errors import ConfigError

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    with pytest.raises(ConfigError, match="no prompt"):
        _read_prompt(None, None)


def test_without_a_model_the_demo_model_or_its_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECPLUG_CACHE", str(tmp_path))
    absent = PackagedModel("absent", (("no_such_package_here", "x"),), "0" * 64, DEMO_INSTALL)
    monkeypatch.setattr(options, "SMOLLM2", absent)
    assert "pip install '.[demo]' in a checkout" in generate("x", code=2).stderr
    (tmp_path / absent.folder_name).mkdir()
    assert options.default_model() == str(tmp_path / absent.folder_name)
