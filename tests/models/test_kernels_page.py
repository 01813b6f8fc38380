"""The page on kernels shows the contract as it is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from specplug.models.kernels import Kernels

PAGE = (Path(__file__).parents[2] / "docs/kernels.md").read_text(encoding="utf-8")
METHODS = {name: method for name, method in vars(Kernels).items() if inspect.isfunction(method) and name[0] != "_"}


def test_the_example_has_the_methods_and_parameters_of_the_contract() -> None:
    (shown,) = (
        text for text in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) if "class " in text
    )
    exec(compile(shown, "docs/kernels.md", "exec", dont_inherit=True), {})  # as it is copied
    names: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{shown}", names)
    example = names["MyKernels"]
    assert example.name == "mine"
    assert {name for name in vars(example) if name[0] != "_"} == {"name", *METHODS}
    for name, method in METHODS.items():
        expected, found = inspect.signature(method), inspect.signature(getattr(example, name))
        assert list(found.parameters.values()) == list(expected.parameters.values()), name
        assert found.return_annotation == expected.return_annotation, name


def test_every_method_is_explained() -> None:
    assert set(re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE)) == set(METHODS)
