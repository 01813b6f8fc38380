"""How the configuration is written: text, mapping, plugin entries, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specplug.config import SpeculativeConfig, load_config_file
from specplug.errors import ConfigError

GIVEN = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "value",
    [
        GIVEN,
        json.dumps(GIVEN),
        {"method": "ngram", "num-speculative-tokens": 3},
        SpeculativeConfig(method="ngram", num_speculative_tokens=3),
    ],
)
def test_every_way_of_writing_gives_the_same(resolve: Any, value: Any) -> None:
    resolved = resolve(value)
    assert (resolved.method, resolved.num_speculative_tokens) == ("ngram", 3)
    assert resolved.origins["num_speculative_tokens"] == "given"


@pytest.mark.parametrize("value", [None, "null"])
def test_no_config_is_no_speculation(resolve: Any, value: Any) -> None:
    resolved = resolve(value)
    assert resolved.speculative is None
    assert resolved.method is None
    assert resolved.num_speculative_tokens == 0
    assert [each.name for each in resolved.plugins] == ["acceptance"]


def test_the_users_mapping_is_left_alone(resolve: Any) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3}
    resolve(given)
    assert given == GIVEN


def test_B11_python_dict_repr(fault: Any, resolve: Any) -> None:
    text = fault("{'method': 'ngram', 'num_speculative_tokens': 3, 'x': True}")
    assert "looks like a Python dict" in text
    assert "JSON needs double quotes and true/false/null" in text
    assert "pass the mapping itself" in text
    assert "First bad character at 1" in text
    assert '{"method": "ngram", "num_speculative_tokens": 3, "x": true}' in text
    assert resolve(GIVEN).num_speculative_tokens == 3


def test_B12_quoted_twice(fault: Any, resolve: Any) -> None:
    once = json.dumps(GIVEN)
    text = fault(json.dumps(once))
    assert "decoded to *text*, not a mapping: it is quoted twice" in text
    assert "remove one layer" in text
    assert 'method: "ngram"; num_speculative_tokens: 3' in text
    assert f"speculative_config: '{once}'" in text
    assert resolve(once).num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", "is empty"),
        ("ngram", 'is a bare word; write {"method": "ngram", "num_speculative_tokens": 3}'),
        ("'" + json.dumps(GIVEN) + "'", "still has the shell's quotes around it"),
        ('{"method": "ngram",}', "is not valid JSON"),
        ('{"method": ngram}', "at character 11"),
        ('"not json inside"', "quoted twice"),
        ("[1, 2]", "is of type list; write a mapping"),
        ("7", "is of type int; write a mapping"),
        (7, "is of type int; write a mapping"),
        ('{"method": "ngram", "method": "suffix"}', "method is given twice"),
        ({"max-model-len": 1, "max_model_len": 2}, "max_model_len is given twice"),
        ({1: 2}, "keys are text"),
        ('{"num_speculative_tokens": NaN}', "not a JSON number"),
    ],
)
def test_unreadable_values(fault: Any, value: Any, expected: str) -> None:
    text = fault(value)
    assert text.startswith("speculative_config")
    assert expected in text


def test_unreadable_config_is_reported_with_other_faults(faults: Any) -> None:
    assert len(faults("{'a': 1}", plugins=[3, "absent"])) == 3


YAML = """
model: models/tiny
max-num-seqs: 4
speculative-config:
  method: ngram
  num-speculative-tokens: 3
plugins:
  - name: mine
    mine_level: 2
sampling_params:
  temperature: 0.5
"""
EXPECTED = {
    "model": "models/tiny",
    "max_num_seqs": 4,
    "speculative_config": GIVEN,
    "plugins": [{"name": "mine", "mine_level": 2}],
    "sampling_params": {"temperature": 0.5},
}


def test_file_in_yaml_and_json(tmp_path: Path, resolve: Any) -> None:
    (tmp_path / "a.yaml").write_text(YAML)
    (tmp_path / "a.json").write_text(json.dumps(EXPECTED))
    assert load_config_file(tmp_path / "a.yaml") == EXPECTED
    assert load_config_file(str(tmp_path / "a.json")) == EXPECTED
    settings = load_config_file(tmp_path / "a.yaml")
    assert resolve(settings["speculative_config"], plugins=settings["plugins"]).num_speculative_tokens == 3


def test_json_text_inside_yaml(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text("speculative_config: '" + json.dumps(GIVEN) + "'\n")
    assert load_config_file(file)["speculative_config"] == GIVEN
    file.write_text("speculative_config: " + json.dumps(json.dumps(json.dumps(GIVEN))) + "\n")
    with pytest.raises(ConfigError, match="quoted twice"):
        load_config_file(file)


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert load_config_file(tmp_path / "a.yaml") == {}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "a: [1", "is not valid YAML"),
        ("a.yaml", "- 1\n- 2\n", "not a mapping"),
        ("a.yaml", "a: 1\nb: 2\na: 3\n", "line 3: a is given twice"),
        ("a.yaml", "speculative_config:\n  x: 1\n  x: 2\n", "line 3: x is given twice"),
        ("a.yaml", "!!python/object/apply:os.getcwd []\n", "is not valid YAML"),
        ("a.yaml", "[" * 5000, "is nested too deeply"),
        ("a.json", '{"a":' * 100_000, "is nested too deeply"),
        ("a.json", '{"a": ' + "1" * 5000 + "}", "cannot be read: Exceeds the limit"),
        ("a.json", "{", "is not valid JSON"),
        ("a.json", '{"a": 1, "a": 2}', "a is given twice"),
    ],
)
def test_bad_file(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        load_config_file(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_yaml_error_is_one_readable_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: [1")
    with pytest.raises(ConfigError) as caught:
        load_config_file(tmp_path / "a.yaml")
    assert "\\n" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mappings_nested_too_deeply_to_print(fault: Any) -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"x": deep}
    assert "speculative_config.method=a dict too long to print" in fault({"method": deep, "num_speculative_tokens": 1})


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config_file(tmp_path / "absent.yaml")
