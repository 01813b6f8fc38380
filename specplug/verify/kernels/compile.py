"""Ahead-of-time compilation of every kernel, without a GPU, and what each one takes of one."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specplug.verify.kernels.coupled import coupled_kernel
from specplug.verify.kernels.decide import decide_kernel
from specplug.verify.kernels.draft_stats import LINES, draft_stats_kernel
from specplug.verify.kernels.filters import CAPACITY, CHUNK, bound_kernel, gather_kernel, select_kernel
from specplug.verify.kernels.finish import finish_kernel
from specplug.verify.kernels.residual import residual_kernel
from specplug.verify.kernels.row_stats import row_stats_kernel
from specplug.verify.kernels.walk import walk_kernel
from specplug.verify.noise import TILE

__all__ = ["TARGETS", "Resources", "compile_kernels"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_NUM_WARPS = {row_stats_kernel: 8, draft_stats_kernel: 8, gather_kernel: 8, select_kernel: 16, walk_kernel: 1}
_KERNELS = (
    row_stats_kernel,
    draft_stats_kernel,
    bound_kernel,
    gather_kernel,
    select_kernel,
    coupled_kernel,
    decide_kernel,
    walk_kernel,
    residual_kernel,
    finish_kernel,
)

_POINTERS = {
    "draft_ids_ptr": "*i64",
    "row_list_ptr": "*i64",
    "row_requests_ptr": "*i64",
    "requests_ptr": "*i64",
    "slots_ptr": "*i64",
    "dense_slots_ptr": "*i64",
    "argmax_ptr": "*i32",
    "num_gathered_ptr": "*i32",
    "out_ptr": "*i32",
    "accepted_ptr": "*i32",
    "ending_ptr": "*i32",
    "row_ending_ptr": "*i32",
    "token_ptr": "*i32",
    "invalid_ptr": "*i8",
    "stands_ptr": "*i8",
    "number_ptr": "*fp64",
    "score_ptr": "*fp64",
    "rates_ptr": "*fp64",
}
"""Pointer arguments by name; the others hold float32."""

_CONSTANTS: dict[str, Any] = {
    "LAW_DTYPE": tl.float32,
    "MAP_DTYPE": tl.int64,
    "IS_ALIGNED": True,
    "HAS_FILTERS": True,
    "TILES": 256,
    "TILE": TILE,
    "LINES": LINES,
    "WIDTH": 16,
    "CAPACITY": CAPACITY,
    "CHUNK": CHUNK,
    "col_stride": 1,
    "law_col_stride": 1,
}
"""For contiguous rows of a vocabulary of 262144, which takes the most of a GPU."""


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel uses. Spilled registers lie in local memory (``local_bytes`` per thread)."""

    kernel: str
    target: str
    dtype: str
    num_registers: int
    local_bytes: int
    shared_memory_bytes: int


def compile_kernels(target: str, dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")) -> Iterator[Resources]:
    """Compile every kernel for ``target`` (a key of ``TARGETS``), those that read logits once per dtype."""
    for kernel in _KERNELS:
        reads_logits = "logits_ptr" in kernel.arg_names
        for dtype in dtypes if reads_logits else dtypes[:1]:
            for is_filtered in (False, True) if "IS_FILTERED" in kernel.arg_names else (False,):
                yield _compile(kernel, target, dtype, is_filtered)


def _compile(kernel: Any, target: str, dtype: str, is_filtered: bool) -> Resources:
    signature, constants = {}, {}
    for name in kernel.arg_names:
        if name == "IS_FILTERED" or name in _CONSTANTS:
            signature[name] = "constexpr"
            constants[name] = _CONSTANTS.get(name, is_filtered)
        elif name.endswith("_ptr"):
            signature[name] = f"*{dtype}" if name == "logits_ptr" else _POINTERS.get(name, "*fp32")
        else:
            signature[name] = "i32"
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants),
        target=TARGETS[target],
        options={"num_warps": _NUM_WARPS.get(kernel, 4), "enable_fp_fusion": True},
    )
    measure = _cuda_usage if "cubin" in compiled.asm else _hip_usage
    num_registers, local_bytes = measure(compiled)
    name = kernel.__name__ + (", filtered" if is_filtered else "")
    return Resources(name, target, dtype, num_registers, local_bytes, int(compiled.metadata.shared))


def _cuda_usage(compiled: Any) -> tuple[int, int]:
    """From the cubin: registers per thread and bytes of local memory."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", str(cubin)], check=True, capture_output=True, text=True
        ).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


def _hip_usage(compiled: Any) -> tuple[int, int]:
    """From the assembly's metadata: vector registers per thread and bytes of scratch memory."""
    text = compiled.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", text)
        return int(found.group(1)) if found else 0

    return number("vgpr_count"), number("private_segment_fixed_size")


def main() -> int:
    """Print one line per kernel and target; the exit status is 1 where registers spill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16", "fp16"], help="dtypes of the logits")
    arguments = parser.parse_args()
    has_spills = False
    sys.stdout.write(f"{'target':<8}{'dtype':<6}{'kernel':<28}registers  local bytes  shared bytes\n")
    for target in arguments.targets:
        for found in compile_kernels(target, tuple(arguments.dtypes)):
            has_spills |= found.local_bytes > 0
            sys.stdout.write(
                f"{found.target:<8}{found.dtype:<6}{found.kernel:<28}{found.num_registers:>9}"
                f"{found.local_bytes:>13}{found.shared_memory_bytes:>14}\n"
            )
    return int(has_spills)


if __name__ == "__main__":
    sys.exit(main())
