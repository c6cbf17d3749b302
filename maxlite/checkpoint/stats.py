"""What the saves of this process cost and how much work is at risk. All times are of the injected clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Commit(NamedTuple):
    """One committed save: when its state was taken, and when it was durable (seconds)."""

    step: int
    started: float
    committed: float


class Interval(NamedTuple):
    """The distance between two committed checkpoints."""

    steps: float
    seconds: float


@dataclass
class SaveStats:
    """Counts and times of the saves so far."""

    safe_since: float  # when the newest committed state was taken; before any, when training began
    last_committed_step: int | None = None  # restored or saved
    commits: list[Commit] = field(default_factory=list)
    failed: int = 0
    last_failure: str = ""  # why the latest failed save failed
    blocked_seconds: float = 0.0

    @property
    def committed(self) -> int:
        """Saves committed by this process."""
        return len(self.commits)

    def interval(self, percentile: float) -> Interval | None:
        """The given percentile (0 to 100) of the intervals between commits; None before the second one."""
        if len(self.commits) < 2:
            return None
        steps = np.diff([commit.step for commit in self.commits])
        seconds = np.diff([commit.committed for commit in self.commits])
        return Interval(float(np.percentile(steps, percentile)), float(np.percentile(seconds, percentile)))

    def work_at_risk_seconds(self, now: float) -> float:
        """Seconds of training that would be lost if the run died at `now`."""
        return max(0.0, now - self.safe_since)
