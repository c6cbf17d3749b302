"""The last lines of a run."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from maxlite.telemetry.run_log import RunLog


class Interval(Protocol):
    """A distance between two commits."""

    @property
    def steps(self) -> float: ...
    @property
    def seconds(self) -> float: ...


class SaveStats(Protocol):
    """What is shown of the saves of a process."""

    clock: Callable[[], float]
    failed: int
    last_failure: str
    blocked_seconds: float
    last_committed_step: int | None

    @property
    def committed(self) -> int: ...
    @property
    def slow_down_share(self) -> float | None: ...
    def interval(self, percentile: float) -> Interval | None: ...
    def blocked_share(self, now: float) -> float: ...
    def work_at_risk_seconds(self, now: float) -> float: ...


def summary(step: int, last: int, log: RunLog, saves: SaveStats, run_directory: Path, resume: str) -> list[str]:
    """Where the run ended, what it reached, what its saves cost, and how to go on from here.

    Args:
        step: updates done.
        last: updates wanted.
        log: for losses and times.
        saves: of this process.
        run_directory: where everything is.
        resume: the command that goes on.
    """
    loss, held_out, rate = log.last_loss, log.evaluation_of(step), log.tokens_per_second
    rows = {
        "final step": f"{step} of {last}",
        "training loss": "not logged" if loss is None else f"{loss[1]:.4f} nats per token (step {loss[0]})",
        "held-out loss": "not evaluated" if held_out is None else f"{held_out:.4f} nats per token",
        "tokens/s": "no step was left to do" if rate is None else f"{rate:,.0f} (median step)",
        **_of_saves(step, saves),
        "run directory": str(run_directory),
        "resume": resume,
        "sample": f"python -m maxlite.generate {shlex.quote(str(run_directory))} prompt='The people'",
    }
    return ["", *(f"{name:<16} {value}" for name, value in rows.items())]


def _of_saves(step: int, saves: SaveStats) -> dict[str, str]:
    now, slower = saves.clock(), saves.slow_down_share
    rows = {"saves committed": f"{saves.committed}"}
    if saves.failed:
        rows["saves failed"] = f"{saves.failed}, the last one: {saves.last_failure}"
    rows["last saved"] = "nothing" if saves.last_committed_step is None else f"step {saves.last_committed_step}"
    for percentile, name in ((50, "interval P50"), (90, "interval P90"), (100, "interval max")):
        interval = saves.interval(percentile)
        if interval is not None:
            rows[name] = f"{interval.steps:,.0f} steps, {interval.seconds:.2f} s"
        elif percentile == 50:
            rows[name] = "under two saves"
    share = saves.blocked_share(now)
    rows["blocked"] = f"{saves.blocked_seconds:.2f} s of training held by saves, {share:.1%} of the run"
    rows["slow-down"] = (
        "not known: it takes steps with a save being written beside them and steps without"
        if slower is None
        else f"{slower:.1%} of the time of all steps, for the saves being written beside them"
    )
    # A committed last step is all there is, however long ago it was taken.
    at_risk = 0.0 if saves.last_committed_step == step else saves.work_at_risk_seconds(now)
    rows["work at risk"] = f"{at_risk:.2f} s of training is not saved" if at_risk else "none"
    return rows
