"""The page on sampling parameters lists every one of them, with its default."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path

from specplug import SamplingParams

PAGE = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text(encoding="utf-8")


def test_every_sampling_parameter_is_documented_with_its_default() -> None:
    documented = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", PAGE, re.MULTILINE))
    defaults = {
        field.name: "{}" if field.default is MISSING else str(field.default) for field in fields(SamplingParams)
    }
    assert {name: text.strip("`") for name, text in documented.items()} == defaults
