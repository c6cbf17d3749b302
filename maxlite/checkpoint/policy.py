"""When to save: pure decisions from the step, the clock and what became of earlier saves. No I/O."""

from __future__ import annotations

import math
from typing import NamedTuple

from maxlite.checkpoint.custom import SaveContext, ask_should_save, load_save_policy
from maxlite.checkpoint.pacing import Pacing
from maxlite.config import CheckpointConfig, InputError

LONGEST_RETRY_SECONDS = 60.0
NONE = -1  # before every step


class Votes(NamedTuple):
    """What one process says about one step; reduced over all processes by "any" inside the train step."""

    busy: bool  # no save can start here: one is being written, or one that failed is not to be tried again yet
    due: bool  # a save is wanted for a reason that not every process can see for itself


class SavePolicy:
    """Decides at every step whether a save starts, on every process alike and without a message of its own.

    What is equal everywhere (the step, the saves that started) is kept here; what is not (clocks, how far each
    process's save is, failures) goes only through the votes. So `decide` gives the same answer wherever it is given
    the same steps and reduced votes.

    - Continuous: as soon as no save is being written and the interval of `pacing` has passed since the last start.
    - Otherwise: at multiples of `checkpoint_period`, and `checkpoint_period_seconds` after the last start.
    - A person's own `checkpoint_save_policy` takes the place of both, until it raises: then the keys apply again.
    - In every mode: step 0 with `save_checkpoint_on_start`, and a save that failed, after a delay that doubles from 1
      second to a minute, even within the interval: work is at risk.

    A save that is due while another is being written never blocks training: it is owed, and starts at the first step
    at which every process is ready.

    `primary`: this is the one process whose clock, and whose own policy, decide. Raises InputError if the person's
    own policy cannot be loaded.
    """

    def __init__(self, config: CheckpointConfig, *, primary: bool = True) -> None:
        self.pacing = Pacing(config)
        self._config = config
        self._primary = primary
        path = config.checkpoint_save_policy
        self._custom = None if path is None else load_save_policy(path)
        # Equal on every process.
        self._owed_step = NONE  # the newest step at which a save was due, none having started since
        self._voted_step = NONE  # the newest step that votes were cast for
        self._stale_until = NONE  # votes for steps up to this were cast before the newest save started
        # This process's own.
        self._retry = False
        self._failures = 0
        self._retry_at = -math.inf
        self._dropped = False  # the person's own policy raised; it is not asked any more
        self._wanted_step = NONE  # as _owed_step, by the person's own policy
        self._problem: str | None = None  # why the person's own policy is not asked any more, until it is said
        self._began: float | None = None
        self._started: tuple[int, float] | None = None  # the newest save's step and second
        self._committed: tuple[int, float] | None = None

    def votes(self, step: int, now: float, *, saving: bool) -> Votes:
        """This process's votes on whether to save the state after `step` updates; once per step.

        They may be cast before the decision on an earlier step, as steps are dispatched ahead of their results.

        Args:
            step: the step that the reduced votes will be given to `decide` for.
            now: seconds, by the clock that `started`, `committed` and `failed` go by.
            saving: a save is being written by this process; false only once `committed` or `failed` was told.
        """
        self._voted_step = step
        self._began = now if self._began is None else self._began
        due = self._primary and step > 0 and self._due_here(step, now, saving)
        return Votes(busy=saving or now < self._retry_at, due=due or self._retry)

    def decide(self, step: int, votes: Votes, cast_for: int | None = None) -> bool:
        """Whether the state after `step` updates is to be saved now; once per step.

        Args:
            step: of the state.
            votes: the reduced ones.
            cast_for: the step that they were given for; None: for this one.
        """
        if step == 0:
            by_step = self._config.save_checkpoint_on_start
        else:
            by_period = self._custom is None and not self._config.enable_continuous_checkpointing
            by_step = by_period and step % self._config.checkpoint_period == 0
        if by_step:
            self._owed_step = step
        # Votes from before the newest save started do not know about it: one is being written.
        asked = step if cast_for is None else cast_for
        return (self._owed_step != NONE or votes.due) and not votes.busy and asked > self._stale_until

    def resumed(self, step: int, now: float) -> None:
        """The run goes on from `step`, which is on storage."""
        self.started(step, now)
        self.committed(now)

    def started(self, step: int, now: float) -> None:
        """A save of `step` started at `now`; on every process alike, after the `decide` that wanted it, if any."""
        self._retry = False
        self._stale_until = self._voted_step
        # What came up for a later step, dispatched already, stays.
        self._owed_step = self._owed_step if self._owed_step > step else NONE
        self._wanted_step = self._wanted_step if self._wanted_step > step else NONE
        self._started = (step, now)

    def committed(self, now: float) -> None:
        """The save that was being written is on storage."""
        self._failures = 0
        self._retry_at = -math.inf
        self._committed = None if self._started is None else (self._started[0], now)

    def failed(self, now: float) -> float:
        """The save that was being written failed here; returns the seconds until it may be tried again."""
        delay = min(2.0**self._failures, LONGEST_RETRY_SECONDS)
        self._failures = min(self._failures + 1, 10)
        self._retry = True
        self._retry_at = now + delay
        return delay

    def problem(self) -> str | None:
        """What the person's own policy did wrong, once."""
        said, self._problem = self._problem, None
        return said

    def _due_here(self, step: int, now: float, saving: bool) -> bool:
        """By this process's clock, or by the person's own policy."""
        config = self._config
        if self._custom is not None and not self._dropped:
            try:
                if ask_should_save(self._custom, self._context(step, now, saving)):
                    self._wanted_step = step
                return self._wanted_step != NONE
            except InputError as error:  # hours of training are not given up for it
                self._dropped, self._problem = True, str(error)
        if config.enable_continuous_checkpointing:
            interval = self.pacing.interval_seconds()
            return interval < math.inf and (self._started is None or now - self._started[1] >= interval)
        # `decide` goes by the period, but not where it took the person's own policy to decide.
        steps = step - (0 if self._started is None else self._started[0])
        if self._dropped and steps >= config.checkpoint_period:
            return True
        since = self._began if self._started is None else self._started[1]
        seconds = config.checkpoint_period_seconds
        return seconds > 0 and since is not None and now - since >= seconds

    def _context(self, step: int, now: float, saving: bool) -> SaveContext:
        started, committed = self._started, self._committed
        return SaveContext(
            step,
            saving,
            last_started_step=None if started is None else started[0],
            last_committed_step=None if committed is None else committed[0],
            seconds_since_start=None if started is None else now - started[1],
            seconds_since_commit=None if committed is None else now - committed[1],
        )


def worth_another_save(grace: float, *, save_seconds: float | None, work_seconds: float) -> bool:
    """Whether a process that must leave saves its newest state, though one of `work_seconds` ago is on storage.

    A save that is being written at SIGTERM or SIGINT is finished first, always: to give it up would lose what it has
    written, and another would take longer. It is the last one

    - if the work since its state is worth no more than another save costs: to save for 30 s what can be recomputed in
      10 s delays the restart and gains nothing;
    - or if another would not be committed within the grace period: it would be killed half-way, so its work is lost
      all the same, and the process would leave late and without its exit status.

    Args:
        grace: seconds until the process must have left.
        save_seconds: expected seconds of a save, from its start to its commit; None: not known, and so worth trying.
        work_seconds: seconds of training since the state that is on storage.
    """
    expected = save_seconds or 0.0
    return work_seconds > expected and expected < grace
