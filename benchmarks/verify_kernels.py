"""What each verification kernel takes of a GPU: compiled ahead of time, so no GPU is needed.

Registers per thread, local memory per thread (spilled registers; none is wanted) and shared memory per program, for
contiguous rows of a vocabulary of 262144.

    scripts/bench verify_kernels
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib.metadata import version

from common import circumstances, write_csv

from specplug.verify.kernels.compile import TARGETS, compile_kernels


def main() -> int:
    about = circumstances(0.0, triton=version("triton"))
    found = [resources for target in TARGETS for resources in compile_kernels(target)]
    for one in found:
        print(*asdict(one).values(), sep="\t")
    rows = [asdict(one) | {"versions": about["versions"], "git": about["git"], "date": about["date"]} for one in found]
    print("written:", write_csv("verify_kernels", rows).name)
    return int(any(one.local_bytes for one in found))


if __name__ == "__main__":
    sys.exit(main())
