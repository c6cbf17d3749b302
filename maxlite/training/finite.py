"""What the host does about an update that the train step refused."""

from __future__ import annotations

from collections.abc import Mapping

from maxlite.config import OptimizerConfig


class NonFiniteError(Exception):
    """The loss or the gradient of a step was not finite, and the config says to stop."""


def require_finite(step: int, metrics: Mapping[str, float], config: OptimizerConfig) -> None:
    """Stops at a step whose update was refused, unless `on_nonfinite=skip`.

    Raises:
        NonFiniteError: names the step, its batch and what was not finite.
    """
    if metrics["finite"] or config.on_nonfinite == "skip":
        return
    raise NonFiniteError(
        f"step {step} is not finite: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}, on batch {step}; "
        "its update was refused and nothing of it was saved. Lower learning_rate, or leave such batches out with "
        "on_nonfinite=skip"
    )
