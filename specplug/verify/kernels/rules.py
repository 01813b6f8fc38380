"""The launch sequence."""

from __future__ import annotations

from specplug.types import Verification
from specplug.verify.inputs import VerifyInputs
from specplug.verify.kernels.coupled import coupled
from specplug.verify.kernels.decide import decide
from specplug.verify.kernels.draft_stats import draft_stats
from specplug.verify.kernels.filters import thresholds
from specplug.verify.kernels.finish import finish
from specplug.verify.kernels.problem import Problem, pack
from specplug.verify.kernels.residual import residual
from specplug.verify.kernels.row_stats import row_stats
from specplug.verify.kernels.walk import walk
from specplug.verify.trees import verify_trees

__all__ = ["TritonRules", "launch"]


def launch(problem: Problem) -> None:
    """Launch what the problem needs, without a host sync.

    Three kernels for greedy and match rows, six where laws are subtracted, one more for coupled rows and four more
    for filters. The same problem may be launched again, from a captured graph too.
    """
    row_stats(problem)
    if problem.filtered_rows.shape[0]:
        thresholds(problem)
        row_stats(problem, problem.filtered_rows)
    if problem.coupled_rows.shape[0]:
        coupled(problem)
    if problem.dense_slots.shape[0] and problem.has_residuals:
        draft_stats(problem)
    decide(problem)
    walk(problem)
    if problem.has_residuals:
        residual(problem)
    if problem.has_open_rows:
        finish(problem)


class TritonRules:
    """All rules in Triton kernels, from logits on the device."""

    def verify(self, inputs: VerifyInputs) -> Verification:
        """Decide every row of checked ``inputs``; tensors stay on the device of the logits."""
        if inputs.parents is not None:
            return verify_trees(inputs, self.verify)
        problem = pack(inputs)
        launch(problem)
        return problem.verification()
