from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGES = [HERE.parent / "README.md", HERE.parents[2] / "docs" / "methods" / "eagle.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_the_page_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not page.is_file():
        pytest.skip("not a checkout of the whole repository")
    code = "".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    exec(compile(code, str(page), "exec"), {})
    assert capsys.readouterr().out.startswith("eagle3 3\n")
