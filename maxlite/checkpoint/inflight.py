"""The save being written, one at a time, and what becomes of saves: whom it concerns is told of each end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from maxlite.checkpoint import layout
from maxlite.checkpoint.committing import Committed
from maxlite.checkpoint.errors import in_words
from maxlite.checkpoint.policy import SavePolicy
from maxlite.checkpoint.saving import Pending, Saver
from maxlite.checkpoint.stats import SaveRecord, SaveStats
from maxlite.checkpoint.tree import array_infos, named_leaves
from maxlite.checkpoint.watch import DirectoryWatch
from maxlite.config import CheckpointConfig

LATE_SECONDS = 10.0  # a save is late after this, and after LATE_TIMES the longest of the newest saves
LATE_TIMES = 5.0
GIVE_UP_SECONDS = 120.0  # and it is given up after this, and after GIVE_UP_TIMES as long
GIVE_UP_TIMES = 20.0
HANG_GRACE_SECONDS = 10.0  # a write is given up at its timeout; this is for what the timeout does not bound


class InFlight:
    """Starts saves and sees each to its end; a save that fails is reported, never raised.

    `run` goes into every checkpoint. Keeps `stats`, and tells `policy` and `watch` what became of each save.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run: dict[str, Any],
        saver: Saver,
        policy: SavePolicy,
        watch: DirectoryWatch,
        stats: SaveStats,
        *,
        report: Callable[[str], None],
        record: Callable[..., None],
    ) -> None:
        self.stats = stats
        self.pending: Pending | None = None  # the save being written, as far as this process has noticed
        self.owed = ""  # why the newest save failed, if no other was committed since
        self._config = config
        self._run = run
        self._saver = saver
        self._policy = policy
        self._watch = watch
        self._clock = stats.clock
        self._report = report
        self._record = record
        self._waited = 0.0  # seconds from the decision for the pending save until its step's result was there
        self._held = 0.0  # seconds that it held training
        self._late = False  # the pending save was said to be late
        self._beside = False  # a save was being written at some time since the newest step was observed

    def start(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, float],
        *,
        waited: float = 0.0,
        held_since: float | None = None,
    ) -> None:
        """Starts to save `state`; no other may be being written. Returns once the arrays may be donated.

        `waited` seconds passed from the decision until its step's result was there. Training is held from
        `held_since` until this returns; None: it has ended.
        """
        now = self._clock()
        self._policy.started(step, now)
        arrays = named_leaves(state)
        metadata = layout.StepMetadata(
            step, time.time(), self.stats.last_committed_step, array_infos(arrays), dict(metrics), self._run
        )
        self._waited, self._held, self._late, self._beside = waited, 0.0, False, True
        self.pending = self._saver.start(arrays, metadata)
        if held_since is not None and self._config.async_checkpointing:
            self._held = self._clock() - held_since
            self.stats.blocked_seconds += self._held

    def wait(self, timeout_seconds: float | None = None, then: str | None = None) -> bool:
        """Blocks until the save being written has ended, if there is one; whether it was committed.

        After the timeout (None: what a save may take) it is given up. `then` says what follows if it fails, which
        else is another try some time later; empty: the caller raises it, so it is not reported.
        """
        pending = self.pending
        if pending is None:
            return False
        if pending.result.wait(self._longest_seconds() if timeout_seconds is None else timeout_seconds):
            return self._settle(pending, then)
        self._abandon(pending, self._clock() - pending.started, then)
        return False

    def wait_for_deletions(self) -> None:
        """Blocks until what is no longer kept is deleted, for `checkpoint_timeout_seconds` at most."""
        for warning in self._saver.wait_for_deletions(self._config.checkpoint_timeout_seconds):
            self._report(warning)

    def poll(self) -> None:
        """Notices if the save being written has ended, is late or hangs, or saved ones are gone; never blocks."""
        for warning in self._saver.warnings():
            self._report(warning)
        pending = self.pending
        if pending is None:
            if lost := self._watch.problem():
                self._lost(*lost)
            return
        took, usual = self._clock() - pending.started, self.stats.usual_seconds
        if pending.result.done():
            self._settle(pending)
        elif took > self._longest_seconds():
            self._abandon(pending, took)
        elif not self._late and took > max(LATE_SECONDS, LATE_TIMES * (usual or LATE_SECONDS)):
            self._late = True
            self._report(f"save of step {pending.step} is late: not committed after {took:.0f} s; training goes on")
            self._record("save_late", step=pending.step, seconds=took)

    def observe_step(self, seconds: float) -> None:
        """A step took `seconds`, what saves held it for left out: tells the cost of saving beside the training."""
        saving, self._beside = self._beside, self.pending is not None
        self.stats.observe_step(seconds, saving)
        self._policy.pacing.observe_step(seconds, saving)
        if line := self._policy.pacing.changed():
            self._report(line)
            self._record("save_interval", seconds=self._policy.pacing.interval_seconds(), why=line)

    def _longest_seconds(self) -> float:
        """How long a save may take before it is given up: a multiple of what the newest took, once that is known."""
        limit, usual = self._config.checkpoint_timeout_seconds, self.stats.usual_seconds
        if usual is not None:
            limit = min(limit, max(GIVE_UP_SECONDS, GIVE_UP_TIMES * usual))
        return limit + HANG_GRACE_SECONDS

    def _abandon(self, pending: Pending, took: float, then: str | None = None) -> None:
        pending.abandoned.set()
        self._failed(pending.step, TimeoutError(f"not committed within {took:.0f} s, given up"), then)

    def _settle(self, pending: Pending, then: str | None = None) -> bool:
        pending.result.join()
        error = pending.result.exception()
        if error is not None:
            self._failed(pending.step, error, then)
            return False
        self._committed(pending, pending.result.result())
        return True

    def _committed(self, pending: Pending, committed: Committed) -> None:
        self.pending, self.owed = None, ""
        held = self._held
        if not self._config.async_checkpointing:
            held = self._clock() - pending.started
            self.stats.blocked_seconds += held
        saved = SaveRecord(
            pending.step,
            pending.started,
            committed.at,
            wait_seconds=self._waited,
            device_to_host_seconds=pending.device_to_host_seconds,
            write_seconds=committed.write_seconds,
            digest_seconds=committed.digest_seconds,
            commit_seconds=committed.commit_seconds,
            blocked_seconds=held,
            bytes=pending.bytes,
        )
        self._policy.committed(self._clock())
        self._policy.pacing.observe_save(saved.blocked_seconds, saved.seconds)
        self.stats.commits.append(saved)
        self.stats.last_committed_step = pending.step
        self.stats.safe_since = pending.started
        self._watch.expect(pending.step)
        self._record("save", **saved.to_event())
        self._saver.committed(pending.metadata, committed.stored_bytes)
        for warning in committed.warnings:
            self._report(warning)

    def _failed(self, step: int, error: BaseException, then: str | None = None) -> None:
        self.pending = None
        self._saver.forget_writer()
        self.stats.failed += 1
        self.stats.last_failure = self.owed = in_words(error)
        delay = self._policy.failed(self._clock())
        self._record("save_failed", step=step, why=self.stats.last_failure, retry_seconds=delay)
        if then is None:
            stop = self._config.on_save_failure == "stop"
            then = "and on_save_failure=stop" if stop else f"next try in {delay:.0f} s or later"
        if then:
            self._report(
                f"save of step {step} failed, {then}: {self.stats.last_failure}; {self.stats.where_it_stands()}"
            )

    def _lost(self, problem: str, newest: int | None) -> None:
        """The directory is not as it was left: what was safe is no more, but for older steps, and is saved anew."""
        self.stats.last_committed_step = newest
        times = {commit.step: commit.started for commit in self.stats.commits}
        self.stats.safe_since = self.stats.began if newest is None else times.get(newest, self.stats.began)
        self._policy.failed(self._clock())
        self._report(f"{problem}; saving again; {self.stats.where_it_stands()}")
        self._record("checkpoints_lost", why=problem)
