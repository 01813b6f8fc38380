"""A verification problem laid out for the kernels: two tables, lists of rows, and scratch space."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from specplug.errors import TensorError
from specplug.types import Dense, Indirect, Verification, cumulative
from specplug.verify.inputs import RowInputs, Rule, VerifyInputs
from specplug.verify.kernels import common
from specplug.verify.kernels.filters import CAPACITY
from specplug.verify.noise import num_tiles

__all__ = ["Problem", "pack"]

Ints: TypeAlias = NDArray[np.int64]

_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}

_RULE_CODES: dict[Rule, Any] = {
    "greedy": common.GREEDY,
    "match": common.MATCH,
    "standard": common.STANDARD,
    "block": common.BLOCK,
    "synthetic": common.SYNTHETIC,
    "coupled": common.COUPLED,
}


@dataclass(slots=True, eq=False)
class Problem:
    """Everything the kernels read and write; the launchers take one of these and nothing else."""

    inputs: VerifyInputs
    logits: torch.Tensor
    draft_ids: torch.Tensor
    requests: torch.Tensor
    slots: torch.Tensor
    row_requests: torch.Tensor
    filtered_rows: torch.Tensor
    coupled_rows: torch.Tensor
    dense_slots: torch.Tensor
    rates: torch.Tensor
    law_dtype: Any
    map_dtype: Any
    law_col_stride: int
    are_laws_aligned: bool
    kept_alive: list[torch.Tensor]
    """Converted law tensors whose addresses the slot table holds."""
    batch_size: int = field(init=False)
    num_slots: int = field(init=False)
    num_rows: int = field(init=False)
    vocab_size: int = field(init=False)
    width: int = field(init=False)
    num_tiles: int = field(init=False)
    padded_tiles: int = field(init=False)
    padded_width: int = field(init=False)
    has_open_rows: bool = field(init=False)
    """Whether some request's rule leaves a draw to ``finish``."""
    has_residuals: bool = field(init=False)
    tile_max: torch.Tensor = field(init=False)
    tile_sum: torch.Tensor = field(init=False)
    tile_argmax: torch.Tensor = field(init=False)
    draft_max: torch.Tensor = field(init=False)
    draft_sum: torch.Tensor = field(init=False)
    coupled_score: torch.Tensor = field(init=False)
    thresholds: torch.Tensor = field(init=False)
    bound: torch.Tensor = field(init=False)
    gathered: torch.Tensor = field(init=False)
    num_gathered: torch.Tensor = field(init=False)
    stands: torch.Tensor = field(init=False)
    row_ending: torch.Tensor = field(init=False)
    token: torch.Tensor = field(init=False)
    ratio: torch.Tensor = field(init=False)
    number: torch.Tensor = field(init=False)
    residual_weight: torch.Tensor = field(init=False)
    residual_mass: torch.Tensor = field(init=False)
    ending: torch.Tensor = field(init=False)
    out: torch.Tensor = field(init=False)
    accepted: torch.Tensor = field(init=False)
    invalid: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        inputs = self.inputs
        self.batch_size, self.num_slots = len(inputs.rows), sum(inputs.num_draft_tokens)
        self.num_rows, self.vocab_size = self.logits.shape
        self.width = max(inputs.num_draft_tokens, default=0) + 1
        self.num_tiles = num_tiles(self.vocab_size)
        self.padded_tiles = triton.next_power_of_2(self.num_tiles)
        self.padded_width = triton.next_power_of_2(self.width)
        rules = {row.rule for row in inputs.rows}
        self.has_open_rows = bool(rules & {"standard", "block", "synthetic"})
        self.has_residuals = self.num_slots > 0 and bool(rules & {"standard", "block"})
        self._allocate()

    def _allocate(self) -> None:
        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self.logits.device)

        num_filtered, num_dense = self.filtered_rows.shape[0], self.dense_slots.shape[0]
        num_coupled = self.num_rows if self.coupled_rows.shape[0] else 0
        self.tile_max, self.tile_sum = (empty(torch.float32, self.num_rows, self.num_tiles) for _ in range(2))
        self.tile_argmax = empty(torch.int32, self.num_rows, self.num_tiles)
        self.draft_max, self.draft_sum = (empty(torch.float32, num_dense, self.num_tiles) for _ in range(2))
        self.coupled_score = empty(torch.float64, num_coupled, self.num_tiles)
        self.thresholds = empty(torch.float32, self.num_rows if num_filtered else 0).fill_(-torch.inf)
        self.bound, self.num_gathered = empty(torch.float32, num_filtered), empty(torch.int32, num_filtered)
        self.gathered = empty(torch.float32, num_filtered, CAPACITY)
        self.stands, self.number = empty(torch.int8, self.num_rows), empty(torch.float64, self.num_rows)
        self.row_ending, self.token = empty(torch.int32, self.num_rows), empty(torch.int32, self.num_rows)
        self.ratio = empty(torch.float32, self.num_rows)
        self.residual_weight = empty(torch.float32, max(1, self.num_slots))
        self.residual_mass = empty(torch.float32, max(1, self.num_slots), self.num_tiles)
        self.out = empty(torch.int32, self.batch_size, self.width)
        self.accepted, self.ending = empty(torch.int32, self.batch_size), empty(torch.int32, self.batch_size)
        self.invalid = empty(torch.int8, self.batch_size)

    def verification(self) -> Verification:
        """The result tensors, on the device."""
        return Verification(self.out, self.accepted, self.invalid.view(torch.bool))


def pack(inputs: VerifyInputs) -> Problem:
    """Lay out checked ``inputs`` on the device of their logits, with one copy from the host and no sync.

    Raises ``TensorError`` for logits of a dtype that the kernels do not read.
    """
    logits = inputs.target_logits.detach()
    laws = _Laws(inputs)
    _check_dtype("target_logits", logits)
    counts = np.array(inputs.num_draft_tokens, dtype=np.int64)
    row_requests = np.repeat(np.arange(len(counts), dtype=np.int64), counts + 1)
    filtered = np.array([_is_filtered(row) for row in inputs.rows], dtype=bool)
    coupled = np.array([row.rule == "coupled" for row in inputs.rows], dtype=bool)
    parts = [
        _request_table(inputs),
        laws.slot_table(),
        row_requests,
        np.flatnonzero(filtered[row_requests]),
        np.flatnonzero(coupled[row_requests]),
        np.array(laws.dense_slots, dtype=np.int64),
        np.array(inputs.synthetic_rates, dtype=np.float64).view(np.int64),
    ]
    draft_ids = inputs.draft_token_ids
    if draft_ids.device != logits.device:
        parts.append(draft_ids.to(torch.int64).numpy())
    tensors = _to_device(parts, logits.device)
    return Problem(
        inputs=inputs,
        logits=logits,
        draft_ids=draft_ids.contiguous() if draft_ids.device == logits.device else tensors[7],
        requests=tensors[0],
        slots=tensors[1],
        row_requests=tensors[2],
        filtered_rows=tensors[3],
        coupled_rows=tensors[4],
        dense_slots=tensors[5],
        rates=tensors[6].view(torch.float64),
        law_dtype=_DTYPES[laws.dtype],
        map_dtype=_DTYPES[laws.map_dtype],
        law_col_stride=laws.col_stride,
        are_laws_aligned=laws.are_aligned,
        kept_alive=laws.kept_alive,
    )


def _to_device(parts: list[Ints], device: torch.device) -> list[torch.Tensor]:
    packed = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]))
    if device.type == "cuda":
        packed = packed.pin_memory()
    on_device = packed.to(device, non_blocking=True)
    ends = cumulative(part.size for part in parts)
    return [on_device[start:end] for start, end in pairwise(ends)]


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        found = str(tensor.dtype).removeprefix("torch.")
        raise TensorError(f"{name}: expected dtype float32, bfloat16 or float16, found {found}")


def _is_filtered(row: RowInputs) -> bool:
    return row.has_filters and row.rule != "greedy" and not (row.rule == "synthetic" and row.is_greedy)


def _request_table(inputs: VerifyInputs) -> Ints:
    rows = inputs.rows
    is_greedy = [row.rule == "greedy" or (row.rule == "synthetic" and row.is_greedy) for row in rows]
    fields: dict[Any, Any] = {
        common.RULE: [_rule_code(row) for row in rows],
        common.SEED: np.array([row.seed for row in rows], dtype=np.uint64).view(np.int64),
        common.POSITION: [row.position for row in rows],
        common.STEP: [row.step for row in rows],
        common.SLOT_START: inputs.slot_starts[:-1],
        common.NUM_SLOTS: inputs.num_draft_tokens,
        common.TOP_K: [row.top_k for row in rows],
    }
    real_fields: dict[Any, list[float]] = {
        common.INVERSE_TEMPERATURE: [
            1.0 if greedy else 1.0 / row.temperature for row, greedy in zip(rows, is_greedy, strict=True)
        ],
        common.TOP_P: [row.top_p for row in rows],
        common.MIN_P: [row.min_p for row in rows],
    }
    table = np.zeros((common.NUM_REQUEST_FIELDS, len(rows)), dtype=np.int64)
    for number, values in fields.items():
        table[number.value] = values
    for number, reals in real_fields.items():
        table.view(np.float64)[number.value] = reals
    return table


def _rule_code(row: RowInputs) -> int:
    is_synthetic_greedy = row.rule == "synthetic" and row.is_greedy
    return int((common.SYNTHETIC_GREEDY if is_synthetic_greedy else _RULE_CODES[row.rule]).value)


class _Laws:
    """The addresses of the slots' laws. Tensors that do not share dtype and inner stride are converted."""

    def __init__(self, inputs: VerifyInputs) -> None:
        self.kept_alive: list[torch.Tensor] = []
        self.dense_slots: list[int] = []
        self._spans, self._num_slots = inputs.laws, sum(inputs.num_draft_tokens)
        tensors = [span.law.draft_logits for span in inputs.laws if isinstance(span.law, Dense | Indirect)]
        maps = [span.law.target_to_draft_ids for span in inputs.laws if isinstance(span.law, Indirect)]
        for tensor in tensors:
            _check_dtype("draft_logits", tensor)
        dtypes, strides = {t.dtype for t in tensors}, {t.stride(1) for t in tensors}
        self._is_uniform = len(dtypes) <= 1 and len(strides) <= 1
        self.dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
        self.col_stride = int(next(iter(strides))) if len(strides) == 1 and len(dtypes) == 1 else 1
        self.map_dtype = maps[0].dtype if len({m.dtype for m in maps}) == 1 else torch.int64
        self.are_aligned = False

    def slot_table(self) -> Ints:
        """int64 ``[NUM_SLOT_FIELDS, num_slots]``."""
        table = np.zeros((common.NUM_SLOT_FIELDS, self._num_slots), dtype=np.int64)
        for span in self._spans:
            slots, index = slice(span.start, span.stop), np.arange(span.stop - span.start)
            law = span.law
            if not isinstance(law, Dense | Indirect):
                continue
            logits = law.draft_logits if self._is_uniform else law.draft_logits.to(self.dtype).contiguous()
            self.kept_alive.append(logits)
            table[common.LAW_ROW.value, slots] = logits.data_ptr() + index * logits.stride(0) * logits.element_size()
            if isinstance(law, Dense):
                table[common.KIND.value, slots] = common.DENSE.value
                table[common.STATS_ROW.value, slots] = len(self.dense_slots) + index
                self.dense_slots += range(span.start, span.stop)
            else:
                lse, ids = law.logsumexp.float().contiguous(), law.target_to_draft_ids.to(self.map_dtype).contiguous()
                self.kept_alive += [lse, ids]
                table[common.KIND.value, slots] = common.INDIRECT.value
                table[common.LOGSUMEXP.value, slots] = lse.data_ptr() + index * lse.element_size()
                table[common.ID_MAP.value, slots] = ids.data_ptr()
        self.are_aligned = bool((table[common.LAW_ROW.value] % 16 == 0).all())
        return table
