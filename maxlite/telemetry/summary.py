"""The last lines of a run."""

from __future__ import annotations

import shlex
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

    failed: int
    blocked_seconds: float
    last_committed_step: int | None

    @property
    def committed(self) -> int: ...
    def interval(self, percentile: float) -> Interval | None: ...


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
    loss, rate, interval = log.evaluation_of(step), log.tokens_per_second, saves.interval(50)
    last_saved = "nothing" if saves.last_committed_step is None else f"step {saves.last_committed_step}"
    rows = {
        "final step": f"{step} of {last}",
        "held-out loss": "not evaluated" if loss is None else f"{loss:.4f} nats per token",
        "tokens/s": "no step was left to do" if rate is None else f"{rate:,.0f} (median step)",
        "saves committed": f"{saves.committed}" + (f", {saves.failed} failed" if saves.failed else ""),
        "last saved": last_saved,
        "interval P50": f"{interval.steps:.0f} steps, {interval.seconds:.2f} s" if interval else "under two saves",
        "blocked": f"{saves.blocked_seconds:.2f} seconds of training held by saves",
        "run directory": str(run_directory),
        "resume": resume,
        "sample": f"python -m maxlite.generate {shlex.quote(str(run_directory))} prompt='The people'",
    }
    return ["", *(f"{name:<16} {value}" for name, value in rows.items())]
