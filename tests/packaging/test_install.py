"""Built wheels in a fresh environment, away from the checkout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Built = dict[str, tuple[Path, Path]]

RUN_HELLO = """
from specplug import LLM, SamplingParams
from specplug.testing import MarkovTarget

config = {"method": "hello", "num_speculative_tokens": 4, "hello_window": 2}
params = SamplingParams(temperature=0, max_tokens=80)
prompt = {"prompt_token_ids": [5, 6, 7]}
with LLM(MarkovTarget()) as plain, LLM(MarkovTarget(), speculative_config=config, strict=True) as hello:
    (expected,), (seen,) = plain.generate(prompt, params), hello.generate(prompt, params)
assert seen.outputs[0].token_ids == expected.outputs[0].token_ids
print(seen.outputs[0].spec_decode_metrics.num_draft_tokens)
"""

LOAD_NATIVE = """
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

(found,) = entry_points(group="specplug.kernels")
kernels = found.load()
from specplug_native.library import load_library

load_library()  # None on a processor that it does not run on, but it loads everywhere
assert not [name for name in sys.modules if name.split(".")[0] == "transformers"]
print(find_spec("specplug_native._kernels").origin, kernels.name)
"""


def test_the_core_alone(built: Built, environment: Callable[..., Any]) -> None:
    fresh = environment(built["specplug"][0])
    done = fresh.run(
        "python", "-c", "import specplug, sys; assert 'torch' not in sys.modules; print(specplug.__file__)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(fresh.site_packages / "specplug/__init__.py")

    done = fresh.run("specplug", "plugins", "--json")
    assert done.returncode == 0, done.stderr
    listed = {plugin["name"]: plugin for plugin in json.loads(done.stdout)}
    assert set(listed) == {"acceptance", "custom_class", "draft_model", "ngram", "tli"}
    assert {plugin["distribution"] for plugin in listed.values()} == {"specplug"}
    assert {plugin["version"] for plugin in listed.values()} == {"0.1.0"}

    wrong = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":5,"temperature":0.7}'
    done = fresh.run("specplug", "explain", "--speculative-config", wrong)
    assert done.returncode != 0
    assert "temperature" in done.stderr
    assert "SamplingParams" in done.stderr


def test_specplug_hello_from_its_wheel(built: Built, environment: Callable[..., Any], tmp_path: Path) -> None:
    fresh = environment(built["specplug"][0], built["specplug-hello"][0])
    done = fresh.run("specplug", "plugins", "--json")
    hello = next(plugin for plugin in json.loads(done.stdout) if plugin["name"] == "hello")
    assert (hello["kind"], hello["distribution"], hello["version"]) == ("proposer", "specplug-hello", "0.1.0")

    done = fresh.run("python", "-c", RUN_HELLO, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "it must have drafted something"


@pytest.mark.parametrize("example", ["specplug-hello", "specplug-hello-tree"])
def test_the_examples_pass_their_own_tests(
    example: str, built: Built, environment: Callable[..., Any], distributions: dict[str, Path], tmp_path: Path
) -> None:
    fresh = environment(built["specplug"][0], built[example][0])
    tests = tmp_path / "tests"
    tests.mkdir()
    source = distributions[example] / "tests/test_conformance.py"
    (tests / source.name).write_text(source.read_text())
    done = fresh.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "22 passed" in done.stdout


def test_specplug_suffix_from_its_wheel_without_a_compiler(
    built: Built, environment: Callable[..., Any], distributions: dict[str, Path], tmp_path: Path
) -> None:
    assert built["specplug-suffix"][0].name.endswith("-py3-none-any.whl")
    fresh = environment(built["specplug"][0], built["specplug-suffix"][0])
    done = fresh.run("specplug", "plugins", "--json")
    suffix = next(plugin for plugin in json.loads(done.stdout) if plugin["name"] == "suffix")
    assert (suffix["kind"], suffix["distribution"], suffix["version"]) == ("proposer", "specplug-suffix", "0.1.0")

    page = (distributions["specplug-suffix"] / "README.md").read_text()
    shown = page.partition("```python\n")[2].partition("```")[0]
    done = fresh.run("python", "-c", shown, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str([5, 6, 7, 8] * 10) in done.stdout
    assert "suffix:local" in done.stdout

    done = fresh.run("specplug", "explain", "--speculative-config", '{"method": "suffix"}', "--json")
    assert done.returncode == 0, done.stderr
    options = {row["key"]: row["value"] for row in json.loads(done.stdout)["plugins"][0]["options"]}
    assert (options["suffix_max_draft"], options["suffix_factor"]) == (32, 2.0)


def test_specplug_native_from_its_wheel(native_wheel: Path, built: Built, environment: Callable[..., Any]) -> None:
    fresh = environment(built["specplug"][0], native_wheel)
    done = fresh.run("python", "-c", LOAD_NATIVE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(fresh.site_packages / "specplug_native/_kernels.abi3.so"), "native"]

    done = fresh.run("specplug", "plugins")
    assert "kernels: native (specplug-native 0.1.0)" in done.stdout


def test_every_plugin_is_found_beside_the_core(built: Built, environment: Callable[..., Any]) -> None:
    fresh = environment(*(wheel for wheel, _ in built.values()))
    done = fresh.run("specplug", "plugins", "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert {plugin["distribution"] for plugin in listed} == set(built) - {"specplug-native"}
    assert [plugin for plugin in listed if plugin["status"] not in ("available", "loaded")] == []
