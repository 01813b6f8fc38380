"""Batches of bare token ids, as the host would make them; and a counter of operations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import specplug.proposers
from specplug.sampling_params import SamplingParams
from specplug.types import Batch, Request, TokenIds

MakeBatch = Callable[..., Batch]


def make_token_ids(ids: Sequence[int]) -> TokenIds:
    return TokenIds(np.asarray(ids, dtype=np.int32))


def _make_batch(
    rows: Sequence[Sequence[int]],
    *,
    ids: Sequence[str] | None = None,
    prompt_lengths: Sequence[int] | None = None,
    in_prompt: Sequence[int] = (),
    speculation: Sequence[dict[str, Any]] | None = None,
) -> Batch:
    """Rows that decode: all but the newest token is computed, and prompt unless ``prompt_lengths`` says less.

    ``in_prompt``: rows that are all prompt, with nothing computed yet.
    """

    def num_prompt_tokens(row: int) -> int:
        if row in in_prompt:
            return len(rows[row])
        return prompt_lengths[row] if prompt_lengths else len(rows[row]) - 1

    requests = tuple(
        Request(
            request_id=ids[row] if ids else f"r{row}",
            prompt_token_ids=make_token_ids(tokens[: num_prompt_tokens(row)]),
            sampling_params=SamplingParams(),
            seed=0,
            speculation=speculation[row] if speculation else {},
        )
        for row, tokens in enumerate(rows)
    )
    return Batch(
        requests=requests,
        token_ids=tuple(make_token_ids(tokens) for tokens in rows),
        num_computed_tokens=tuple(0 if row in in_prompt else len(tokens) - 1 for row, tokens in enumerate(rows)),
        remaining=(100,) * len(rows),
        num_verify_steps=(0,) * len(rows),
    )


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    return _make_batch


class LineCount:
    lines = 0


@contextmanager
def _counted_lines() -> Iterator[LineCount]:
    folder = str(Path(specplug.proposers.__file__).parent)
    count = LineCount()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        count.lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


@pytest.fixture
def counted_lines() -> Callable[[], AbstractContextManager[LineCount]]:
    """Counts the lines that ``specplug.proposers`` executes: operations, not seconds."""
    return _counted_lines
