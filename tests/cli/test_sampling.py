from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from specplug import SamplingParams
from specplug.cli import app

runner = CliRunner()
NGRAM = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_min":1,"prompt_lookup_max":3}'


def only_b(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor for the flag."""
    kept = logits[12].clone()
    logits[:] = -torch.inf
    logits[12] = kept
    return logits


@pytest.fixture
def model(tiny_model: Path) -> list[str]:
    return ["generate", "abcabcabcabc", "--model", str(tiny_model), "--max-tokens", "8", "--ignore-eos"]


def as_json(*arguments: str) -> Any:
    result = runner.invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_every_sampling_parameter_has_a_flag() -> None:
    parameters = typer.main.get_command(app).commands["generate"].params  # type: ignore[attr-defined]
    flags = {name for each in parameters for name in each.opts}
    for field in fields(SamplingParams):
        assert f"--{field.name.replace('_', '-')}" in flags, field.name


@pytest.mark.parametrize(
    "flags",
    [
        ["--presence-penalty", "2"],
        ["--frequency-penalty", "2"],
        ["--repetition-penalty", "5"],
        ["--allowed-token-ids", "11", "--allowed-token-ids", "12"],
        ["--logit-bias", "12:100"],
        ["--logits-processors", f"{__name__}:only_b"],
        ["--structured-outputs", '{"regex": "[0-9]{20}"}'],
        ["--temperature", "1.5", "--seed", "3"],
    ],
)
def test_flags_act_the_same_with_and_without_speculation(model: list[str], flags: list[str]) -> None:
    if "--structured-outputs" in flags:
        pytest.importorskip("xgrammar")
    plain = as_json(*model, *flags)
    assert plain["token_ids"] != as_json(*model)["token_ids"]
    assert as_json(*model, *flags, "-sc", NGRAM)["token_ids"] == plain["token_ids"]
    assert len(plain["token_ids"]) == 8


def test_samples_logprobs_and_reasoning_are_in_the_json(model: list[str]) -> None:
    found = as_json(*model, "--n", "2", "--temperature", "1", "--seed", "5", "--logprobs", "1")
    first, second = found["samples"]
    assert first["token_ids"] == found["token_ids"] != second["token_ids"]
    assert as_json(*model, "--temperature", "1", "--seed", "6")["token_ids"] == second["token_ids"]
    assert [entry[0]["token_id"] for entry in found["logprobs"]] == found["token_ids"]
    processed = as_json(*model, "--logprobs", "-1", "--logprobs-mode", "processed_logprobs", "--logit-bias", "3:1")
    assert len(processed["logprobs"]) == 8
    prompt = as_json(*model, "--prompt-logprobs", "0")
    assert [entry and entry[0]["token"] for entry in prompt["prompt_logprobs"]] == [None, *"bcabcabcabc"]
    assert as_json(*model, "--reasoning-end", "~~~~")["num_reasoning_tokens"] == 8


def test_samples_are_printed_one_after_another(model: list[str]) -> None:
    result = runner.invoke(app, [*model, "--n", "2", "--temperature", "1", "--allowed-token-ids", "12"])
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert first.startswith("[0] ")
    assert second.startswith("[1] ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--logit-bias", "x"], "--logit-bias x must be ID:VALUE"),
        (["--structured-outputs", "{"], "--structured-outputs is not JSON"),
        (["--structured-outputs", '{"a":' * 100_000], "--structured-outputs is nested too deeply"),
        (["--structured-outputs", "[]"], "--structured-outputs [] must be a JSON object"),
        (["--structured-outputs", '{"regexp": "a"}'], "structured_outputs has no 'regexp'"),
        (["--logits-processors", "nowhere:f"], "must be an importable MODULE:NAME"),
        (["--presence-penalty", "3"], "presence_penalty=3.0 must be in [-2, 2]"),
        (["--n", "2"], "n=2 must be 1 with temperature=0.0"),
        (["--n", "2", "--temperature", "1", "--stream"], "n=2 must be 1 with a stream"),
        (["--extra-args", '{"specplug": {"on": 1}}'], "['on'] is unknown"),
        (["--allowed-token-ids", "100000"], "allowed_token_ids names token id 100000"),
    ],
)
def test_bad_flags_are_one_message(model: list[str], flags: list[str], message: str) -> None:
    result = runner.invoke(app, [*model, *flags])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
