"""The Triton kernels against the reference, on a device or, slowly, in Triton's interpreter on the CPU.

``python -m specplug.testing.kernel_check`` runs on the CUDA device; with ``--interpret`` on the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from specplug.testing.verify_cases import VerifyCase, differences, random_inputs
from specplug.verify.checks import check_inputs
from specplug.verify.reference import verify_reference

__all__ = ["check_kernels", "device_cases", "interpreter_cases"]

POISON = 7_777_777
"""What outputs hold before the kernels write them; no vocabulary here is so large."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreter_cases() -> Iterator[VerifyCase]:
    """Small problems with everything in them, a few seconds each."""
    vocabularies = (3, 129, 1000, 1025, 2100)
    yield from (VerifyCase(vocab, batch_size=7, max_drafts=3, seed=vocab) for vocab in vocabularies)
    yield VerifyCase(129, num_drafts=(0,), rules=("match",))
    yield VerifyCase(129, num_drafts=(0, 0, 0))
    yield VerifyCase(1000, num_drafts=(16, 0, 5), rules=("block", "standard"), laws=("dense", "indirect"))
    yield VerifyCase(1000, batch_size=6, dtype=torch.bfloat16, has_placeholders=True, seed=1)
    yield VerifyCase(1000, batch_size=6, dtype=torch.float16, draft_dtype=torch.float32, is_strided=True, seed=2)
    yield VerifyCase(2100, batch_size=8, max_drafts=2, has_filters=True, seed=3)
    yield VerifyCase(9000, num_drafts=(1, 1), rules=("match", "standard"), has_filters=True, seed=9)
    yield VerifyCase(129, batch_size=6, has_nan=True, has_placeholders=True, seed=4)
    yield VerifyCase(129, batch_size=7, max_drafts=6, has_trees=True, seed=5)
    for seed in range(6):  # NaN in a row that block may or may not need
        yield VerifyCase(5, num_drafts=(2,), rules=("block",), laws=("dense",), has_nan=True, seed=seed)


def device_cases() -> Iterator[VerifyCase]:
    """Every vocabulary and dtype at batch 1, 7 and 33, as far as a CPU reference can follow in minutes."""
    for vocab, dtype in product((3, 129, 1000, 32001, 49152, 151936, 262144), _DTYPES):
        for batch_size in (1, 7, 33):
            size = batch_size * vocab
            max_drafts = 16 if size < 1_200_000 else 5
            case = VerifyCase(vocab, batch_size, max_drafts, dtype=dtype, device="cuda", seed=vocab + batch_size)
            yield case
            if batch_size == 7:
                yield replace(case, max_drafts=2, has_filters=True)
                yield replace(case, max_drafts=2, is_strided=True, has_placeholders=True, draft_dtype=torch.float32)
                yield replace(case, max_drafts=2, has_nan=True)
                yield replace(case, has_trees=True)


def check_kernels(case: VerifyCase) -> list[str]:
    """Run one case through the kernels and the reference; one line per difference."""
    from specplug.verify.kernels.problem import pack
    from specplug.verify.kernels.rules import TritonRules, launch

    inputs = random_inputs(case)
    check_inputs(inputs)
    if inputs.parents is not None:
        return differences(TritonRules().verify(inputs), verify_reference(inputs))
    problem = pack(inputs)
    problem.out.fill_(POISON)
    problem.accepted.fill_(POISON)
    problem.invalid.fill_(1)
    launch(problem)
    return differences(problem.verification(), verify_reference(inputs))


def main() -> int:
    """Print one line per case that differs and a count; the exit status is 1 where any differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interpret", action="store_true", help="small cases on the CPU, in Triton's interpreter")
    is_interpreted = parser.parse_args().interpret
    if is_interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
        torch.set_num_threads(1)
    num_cases = num_wrong = 0
    for case in interpreter_cases() if is_interpreted else device_cases():
        found = check_kernels(case)
        num_cases += 1
        num_wrong += bool(found)
        for line in found:
            sys.stdout.write(f"{case}\n  {line}\n")
    sys.stdout.write(f"{num_cases - num_wrong} of {num_cases} kernel cases equal the reference\n")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
