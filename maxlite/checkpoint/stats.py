"""What the saves of this process cost and how much work is at risk. All times are seconds of the injected clock."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

NEWEST_COMMITS = 1000  # records kept whole
FEWEST_STEPS = 5  # with and without a save, before their difference is more than noise
INTERVALS = 10_000  # kept for the percentiles: exact up to so many saves, within half a percentile after that


class SaveRecord(NamedTuple):
    """One committed save: what it saved, when, and where its time went.

    The parts need not add up to `seconds`: some run side by side (digests while files are written, say).
    """

    step: int
    started: float  # its step's result was there; the state saved is that of this moment
    committed: float  # it was durable
    wait_seconds: float = 0.0  # for the step's result, before which its state cannot be copied
    device_to_host_seconds: float = 0.0
    write_seconds: float = 0.0
    digest_seconds: float = 0.0
    commit_seconds: float = 0.0  # finalize, fsync, rename
    blocked_seconds: float = 0.0  # training was held
    bytes: int = 0

    @property
    def seconds(self) -> float:
        """From the start to the commit; the wait for the step's result comes before."""
        return self.committed - self.started

    @property
    def gb_per_second(self) -> float:
        """10^9 bytes a second from the start to the commit; 0 if the clock stood still."""
        return self.bytes / 1e9 / self.seconds if self.seconds > 0 else 0.0

    def to_event(self) -> dict[str, Any]:
        """For the record of events; without the times, whose clock means nothing to another process."""
        parts = {name: value for name, value in self._asdict().items() if name not in ("started", "committed")}
        return {**parts, "seconds": self.seconds, "gb_per_second": self.gb_per_second}

    def line(self) -> str:
        """For people: size, time and rate, where the time went, and how long training was held."""
        rate = in_bytes(self.gb_per_second * 1e9)
        parts = ", ".join(
            f"{name} {seconds:.2f}"
            for name, seconds in (
                ("device to host", self.device_to_host_seconds),
                ("write", self.write_seconds),
                ("digest", self.digest_seconds),
                ("commit", self.commit_seconds),
            )
        )
        return (
            f"saved step {self.step}: {in_bytes(self.bytes)} in {self.seconds:.2f} s ({rate}/s; {parts}) after "
            f"{self.wait_seconds:.2f} s for its result, training held for {self.blocked_seconds:.2f} s"
        )


class Interval(NamedTuple):
    """The distance between two committed checkpoints."""

    steps: float
    seconds: float


class Commits:
    """The committed saves, in the order of their commits: counts and intervals over all of them, in bounded memory.

    Iterates over the records of the newest. Beyond INTERVALS the intervals that the percentiles are taken of are a
    uniform sample of all (reservoir sampling, algorithm R: J. S. Vitter, "Random sampling with a reservoir", ACM
    TOMS 11(1), 1985).
    """

    def __init__(self) -> None:
        self._newest: deque[SaveRecord] = deque(maxlen=NEWEST_COMMITS)
        self._count = 0
        self._sample = np.empty((INTERVALS, 2))  # steps, seconds
        self._longest = np.zeros(2)
        self._random = random.Random(0)

    def __len__(self) -> int:
        """All that were committed."""
        return self._count

    def __iter__(self) -> Iterator[SaveRecord]:
        return iter(self._newest)

    def append(self, record: SaveRecord) -> None:
        """Adds the save that was committed last."""
        if self._newest:
            last = self._newest[-1]
            interval = record.step - last.step, record.committed - last.committed
            self._longest = np.maximum(self._longest, interval)
            seen = self._count  # intervals, this one included
            place = seen - 1 if seen <= INTERVALS else self._random.randrange(seen)
            if place < INTERVALS:
                self._sample[place] = interval
        self._newest.append(record)
        self._count += 1

    def interval(self, percentile: float) -> Interval | None:
        """The given percentile (0 to 100) of the intervals, steps and seconds each; None before the second commit."""
        if self._count < 2:
            return None
        sample = self._sample[: self._count - 1]
        steps, seconds = self._longest if percentile == 100 else np.percentile(sample, percentile, axis=0)
        return Interval(float(steps), float(seconds))


@dataclass
class SaveStats:
    """Counts and times of the saves so far."""

    safe_since: float  # when the newest committed state was taken; before any, when training began
    clock: Callable[[], float] = time.monotonic  # that all times here are of
    last_committed_step: int | None = None  # restored or saved
    commits: Commits = field(default_factory=Commits)
    failed: int = 0
    last_failure: str = ""  # why the latest failed save failed
    blocked_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.began = self.safe_since  # the run, of this process
        self._step_seconds = {True: 0.0, False: 0.0}  # with and without a save in flight
        self._steps = {True: 0, False: 0}
        self._told = 0  # saves that `news` was asked about

    @property
    def committed(self) -> int:
        """Saves committed by this process."""
        return len(self.commits)

    def interval(self, percentile: float) -> Interval | None:
        """The given percentile (0 to 100) of the intervals between commits; None before the second one."""
        return self.commits.interval(percentile)

    @property
    def usual_seconds(self) -> float | None:
        """What a save takes: the longest of the newest ones; None before the first."""
        return max((commit.seconds for commit in list(self.commits)[-10:]), default=None)

    def where_it_stands(self) -> str:
        """What a restart would go on from, in words."""
        last = self.last_committed_step
        return "nothing is saved yet" if last is None else f"step {last} is the newest saved"

    def news(self) -> list[str]:
        """A line on the newest save, if one was committed since this was last asked."""
        count, self._told = self.committed - self._told, self.committed
        if count == 0:
            return []
        *_, newest = self.commits
        return [newest.line() + (f"; {count} saves since the line before" if count > 1 else "")]

    def observe_step(self, seconds: float, saving: bool) -> None:
        """One step took `seconds`, what a save blocked left out; `saving`: a save was being written during it."""
        self._step_seconds[saving] += seconds
        self._steps[saving] += 1

    def blocked_share(self, now: float) -> float:
        """The share of the run's time, until `now`, for which training was held by saves."""
        seconds = now - self.began
        return self.blocked_seconds / seconds if seconds > 0 else 0.0

    @property
    def slow_down_share(self) -> float | None:
        """The share of all steps' time by which steps were longer for the saves being written beside them.

        n (a - b) over the time of all steps, for n steps with a save in flight that took a seconds in the mean, and
        b seconds for those without. May come out just below 0, as it is measured. None until there were
        FEWEST_STEPS of both.
        """
        if min(self._steps.values()) < FEWEST_STEPS:
            return None
        mean, quiet = (self._step_seconds[saving] / self._steps[saving] for saving in (True, False))
        total = sum(self._step_seconds.values())
        return self._steps[True] * (mean - quiet) / total if total > 0 else 0.0

    def work_at_risk_seconds(self, now: float) -> float:
        """Seconds of training that would be lost if the run died at `now`."""
        return max(0.0, now - self.safe_since)


def in_bytes(count: float) -> str:
    """`1.02 GB`, `24.9 MB`, `310 kB`, `4 B`: three digits, powers of 1000."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * one:  # which rounds to 1.00
            return f"{count / one:#.3g}".rstrip(".") + f" {unit}"
    return f"{count:.0f} B"
