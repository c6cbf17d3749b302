"""What the host does about updates that the train step refused."""

from __future__ import annotations

import math
from collections.abc import Mapping

from maxlite.config import OptimizerConfig

# So many refused updates in a row are no bad batches but a run that learns no more.
MAX_REFUSED_IN_A_ROW = 10


class NonFiniteError(Exception):
    """The result of a step was not finite, and the run is not to go on."""


class FiniteGuard:
    """Follows the steps of a run; `refused` counts the updates that were refused."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._skip = config.on_nonfinite == "skip"
        self._in_a_row = 0
        self.refused = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes a finished step. To be called for every step, in order.

        Raises:
            NonFiniteError: its update was refused, and `on_nonfinite` is not `skip` or MAX_REFUSED_IN_A_ROW were
                refused without one in between that was not; names the step, its batch and what was not finite.
        """
        if metrics["finite"]:
            self._in_a_row = 0
            return
        self.refused += 1
        self._in_a_row += 1
        loss, norm = metrics["loss"], metrics["grad_norm"]
        # The train step looks at them in this order.
        where = "its updated state, after " if math.isfinite(loss) and math.isfinite(norm) else ""
        what = f"step {step} is not finite: {where}loss {loss}, gradient norm {norm}, on batch {step}"
        if not self._skip:
            raise NonFiniteError(
                f"{what}; its update was refused and nothing of it was saved. Lower learning_rate, or leave such "
                "batches out with on_nonfinite=skip"
            )
        if self._in_a_row >= MAX_REFUSED_IN_A_ROW:
            raise NonFiniteError(
                f"{what}; it is the {self._in_a_row}th update in a row that was refused, too many to skip. Go on from "
                "an earlier checkpoint with a lower learning_rate"
            )
