"""How often continuous saves start: measured as the run goes, from a budget, from how often it fails. No I/O."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from maxlite.config import CheckpointConfig

BASELINE_STEPS = 8  # steps without a save before the first one, to compare with
QUIET_WINDOW = 32  # newest steps without a save that later ones are compared with
SAVE_WINDOW = 16  # newest saves that the cost is taken from
OUTLIER = 3.0  # times the median: a step that compiled, or waited for something else
QUIET_STEPS_PER_SAVE = 2  # keep the comparison fresh
AIM = 0.9  # share of the budget that is planned for: what is measured is noisy
NOTABLE = 1.25  # ratio of intervals that is worth a line


def young_daly_seconds(cost: float, mtbf: float) -> float:
    """The interval between the starts of two saves, in seconds, that loses the least time.

    A save costs C = `cost` seconds of training, and failures come at random (Poisson), every M = `mtbf` seconds in
    the mean; each loses the work since the last committed state was taken. Per second of run time the loss is about
    C / T + (T / 2 + L) / M, least at T = sqrt(2 C M): J. W. Young, "A first order approximation to the optimum
    checkpoint interval", CACM 17(9), 1974. J. T. Daly, "A higher order estimate of the optimum checkpoint interval
    for restart dumps", FGCS 22(3), 2006, eq. 37, takes failures during a save and several in a row into account:

        T - C = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C    for C < 2M,    else M

    where T - C is the training done between two saves. The time L from the start of an asynchronous save to its
    commit adds the constant L / M to the loss, since a failure in it goes back one save further; it does not move
    the optimum, and nor does the time of a restart.
    """
    if cost >= 2 * mtbf:
        return mtbf + cost
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9)


class Pacing:
    """The least interval between the starts of two continuous saves.

    It is the greatest of

    - `continuous_checkpointing_minimum_interval_secs`;
    - with `continuous_checkpointing_max_overhead` = b: C (1 + b) / b, where C is what a save costs. Of T seconds
      between two starts C are the saves', so that the run takes T / (T - C) times as long as without saves, which
      is 1 + b at that T. The plan is for 90% of b, to leave room for noise;
    - with `expected_mtbf_hours`: the optimum of Young and Daly, see `young_daly_seconds`;
    - with either: the seconds that a save takes to commit, and two steps.

    C = seconds that training was blocked + seconds by which the steps during the save were longer than steps without
    one. Both sides are measured close together, for machines drift: a step's excess is against the mean of the last
    32 steps without a save, less those over three times their median (compilation, a hiccup); two such steps per save
    keep that mean fresh. C is the interquartile mean over the last 16 saves, so that up to a quarter of them may have
    been struck by something else; steps within a save are all counted, as one of them may bear its whole cost.

    With neither budget nor failure rate the interval is the minimum interval, from the first step on. With either,
    there is no save before 8 steps without one are measured, then one to measure by, then the rest.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._minimum = config.continuous_checkpointing_minimum_interval_secs
        self._budget = config.continuous_checkpointing_max_overhead
        self._mtbf_hours = config.expected_mtbf_hours
        self._quiet: deque[float] = deque(maxlen=QUIET_WINDOW)
        self._costs: deque[float] = deque(maxlen=SAVE_WINDOW)
        self._blocked: deque[float] = deque(maxlen=SAVE_WINDOW)
        self._commits: deque[float] = deque(maxlen=SAVE_WINDOW)
        self._excess: float | None = 0.0  # of the steps since the last save ended; None: not known
        self._said: float | None = None

    def observe_step(self, seconds: float, saving: bool) -> None:
        """One step took `seconds`, without what a save blocked; `saving`: a save was being written during it."""
        if not saving:
            self._quiet.append(seconds)
        elif len(self._quiet) < BASELINE_STEPS:
            self._excess = None
        elif self._excess is not None:
            self._excess += seconds - self._quiet_step_seconds()

    def observe_save(self, blocked_seconds: float, seconds_to_commit: float) -> None:
        """A save that held training for `blocked_seconds` was committed `seconds_to_commit` after its start."""
        if self._excess is not None and len(self._quiet) >= BASELINE_STEPS:
            self._blocked.append(blocked_seconds)
            self._costs.append(blocked_seconds + self._excess)
            self._commits.append(seconds_to_commit)
        self._excess = 0.0

    def interval_seconds(self) -> float:
        """The least interval between the starts of two saves, in seconds; infinite until a first one may start."""
        return max(self._limits().values())

    def explain(self) -> str:
        """What was chosen and why, in one line."""
        if not self._measures:
            rest = f", at least {_seconds(self._minimum)} after it started" if self._minimum else ""
            return f"a save starts as soon as the last one is committed{rest}"
        if not self._costs:
            return f"{BASELINE_STEPS} steps without a save, then one save, are measured first, to choose the interval"
        limits = self._limits()
        chosen = max(limits, key=lambda name: limits[name])
        asked = ", ".join(f"{name} for {_seconds(seconds)}" for name, seconds in limits.items() if seconds)
        cost, blocked = self._cost_seconds(), _middle_mean(self._blocked)
        return (
            f"a save every {_seconds(limits[chosen])}, by {chosen}: one costs {_seconds(cost)} of training "
            f"({_seconds(blocked)} blocked, {_seconds(cost - blocked)} in slower steps) and takes "
            f"{_seconds(_middle_mean(self._commits))} to commit; asked is {asked}"
        )

    def changed(self) -> str:
        """`explain()` if the choice has moved by a quarter since this last said so, else nothing."""
        if not self._measures:
            return ""
        interval = self.interval_seconds() if self._costs else math.inf
        said = self._said
        if said is not None and (said == interval or max(said, interval) < NOTABLE * min(said, interval)):
            return ""
        self._said = interval
        return self.explain()

    @property
    def _measures(self) -> bool:
        return bool(self._budget or self._mtbf_hours)

    def _limits(self) -> dict[str, float]:
        """Each least interval, in seconds, by what asks for it."""
        limits = {"continuous_checkpointing_minimum_interval_secs": self._minimum}
        if not self._measures:
            return limits
        if not self._costs:
            return limits if len(self._quiet) >= BASELINE_STEPS else {"measuring": math.inf}
        cost = self._cost_seconds()
        if self._budget:
            budget = AIM * self._budget
            limits[f"continuous_checkpointing_max_overhead={self._budget:g}"] = cost * (1 + budget) / budget
        if self._mtbf_hours:
            limits[f"expected_mtbf_hours={self._mtbf_hours:g}"] = young_daly_seconds(cost, 3600 * self._mtbf_hours)
        limits["storage"] = _middle_mean(self._commits) + QUIET_STEPS_PER_SAVE * self._quiet_step_seconds()
        return limits

    def _cost_seconds(self) -> float:
        return max(_middle_mean(self._costs), _middle_mean(self._blocked))

    def _quiet_step_seconds(self) -> float:
        limit = OUTLIER * statistics.median(self._quiet)
        return statistics.fmean(seconds for seconds in self._quiet if seconds <= limit)


def _middle_mean(values: Sequence[float]) -> float:
    """The mean without the greatest and the least quarter."""
    drop = (len(values) + 1) // 4
    return statistics.fmean(sorted(values)[drop : len(values) - drop])


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"
