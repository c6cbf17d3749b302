"""The Checkpointer: restores or initialises a run, saves it while it trains, and says what became of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from os import PathLike
from types import TracebackType
from typing import Any, Self

from maxlite.checkpoint import start, storage
from maxlite.checkpoint.ending import Ending
from maxlite.checkpoint.errors import SaveError
from maxlite.checkpoint.inflight import HANG_GRACE_SECONDS, InFlight
from maxlite.checkpoint.peers import Peers
from maxlite.checkpoint.policy import SavePolicy, Votes
from maxlite.checkpoint.saving import Saver
from maxlite.checkpoint.stats import SaveStats
from maxlite.checkpoint.tree import named_leaves
from maxlite.checkpoint.watch import DirectoryWatch
from maxlite.config import CheckpointConfig

NO_FLAGS = {"save_busy": False, "save_due": False, "save_failed": False}


class Checkpointer:
    """Saves of one run in one directory. Every process of the run has one and calls it at the same steps.

    A save that fails never raises into the training loop (but with `on_save_failure=stop`): it is reported once,
    counted, and retried with a growing delay. Only the last save raises, because a run must not end well without it.

    `metadata` (anything JSON can hold) goes into every checkpoint. `clock` gives seconds and orders the saves; it is
    called from a background thread too. `report` gets one line per event, for people; `record` gets its kind and
    fields, for `events.jsonl`.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        config: CheckpointConfig,
        *,
        metadata: Mapping[str, Any] | None = None,
        peers: Peers | None = None,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str], None] = print,
        record: Callable[..., None] = lambda kind, **fields: None,
    ) -> None:
        self.directory = storage.absolute(directory)
        self.stats = SaveStats(safe_since=clock(), clock=clock)
        self.saved_metadata: dict[str, Any] | None = None  # `metadata` of the restored checkpoint
        self._config = config
        self._peers = peers or Peers()
        self._clock = clock
        self._report = report
        self._record = record
        self._policy = SavePolicy(config, primary=self._peers.primary)
        self._saver = Saver(self.directory, config, self._peers, clock)
        self._watch = DirectoryWatch(self.directory)
        run = json.loads(json.dumps(dict(metadata or {})))  # fails now, not at a save
        self._saves = InFlight(
            config, run, self._saver, self._policy, self._watch, self.stats, report=report, record=record
        )
        self._ending = Ending(
            self.directory, config, self._peers, self._saver, self._saves, report=report, record=record
        )
        self._decided_at = clock()
        self.resumed_step: int | None = None  # the step of the run's own checkpoint that it goes on from

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # Another may be gone, and a save that waits for it would wait out its timeout.
            longest = self._config.preemption_grace_seconds if self._peers.count > 1 else None
            self._saves.wait(longest, then="and the run ends")
        self.close()

    def restore_or_init(
        self,
        abstract_state: Any,
        init_fn: Callable[[], Any],
        admit: Callable[[Mapping[str, Any]], object] = lambda run: None,
    ) -> tuple[Any, int]:
        """Returns (state, step): the newest good checkpoint, or else the state to start from, and its step.

        `abstract_state` is a tree of `jax.ShapeDtypeStruct`; every array is read straight to the sharding and dtype
        given there (no sharding: the first device), whatever mesh and processes saved it, and may be donated.
        `init_fn` must itself be jitted with these shardings. Leftovers of a killed run are removed first, and damaged
        checkpoints newer than the one taken are set aside. `admit` is given the `metadata` of a checkpoint before its
        arrays are read, and raises InputError if the run must not go on from it.

        Raises InputError if the checkpoint has another structure, or the directory cannot be made or is not the same
        for all processes; RestoreError if checkpoints exist and none is good: a run never starts anew over them.
        """
        found = start.restore_or_init(
            self.directory, self._config, abstract_state, init_fn, self._peers, self._report, self._record, admit
        )
        now = self._clock()
        self.stats.safe_since = self.stats.began = now
        self.saved_metadata = None if found.metadata is None else found.metadata.run
        if self._config.enable_checkpointing:
            self._saver.prepare(named_leaves(found.state))
            self._watch.start()
        if found.resumed:
            self.resumed_step = found.step
            self.stats.last_committed_step = found.step
            self._policy.resumed(found.step, now)
            self._watch.expect(found.step)
            if self._config.checkpoint_verify == "full":
                self._saver.verified(found.step)
        return found.state, found.step

    def flags(self, step: int) -> dict[str, bool]:
        """This process's votes on whether to save the state after `step` updates; host work of microseconds.

        Once per step. The votes of all processes, reduced by "any" inside the train step, are what `due` takes.
        Notices first what became of the save being written.
        """
        self.poll()
        if not self._config.enable_checkpointing:
            return dict(NO_FLAGS)
        votes = self._policy.votes(step, self._clock(), saving=self._saves.pending is not None)
        if problem := self._policy.problem():
            self._report(
                f"{problem}; it is not asked again, and saves go by checkpoint_period and the like from now on"
            )
            self._record("save_policy_failed", why=problem)
        stopping = self.stats.failed > 0 and self._config.on_save_failure == "stop"
        return {"save_busy": votes.busy, "save_due": votes.due, "save_failed": stopping}

    def due(self, step: int, agreed: Mapping[str, float], cast_for: int | None = None) -> bool:
        """Whether the state after `step` updates is to be saved now; the same on every process for equal votes.

        `cast_for` is the step whose `flags` the agreed ones are; None: of this one.

        Raises SaveError if a save failed and `on_save_failure=stop`.
        """
        if not self._config.enable_checkpointing:
            return False
        if agreed["save_failed"]:
            self._saves.wait(HANG_GRACE_SECONDS)  # another process knew first; this one is about to hear why
            why = self.stats.last_failure or "on another process"
            raise SaveError(f"a save failed ({why}) and on_save_failure=stop; {self.stats.where_it_stands()}")
        votes = Votes(busy=bool(agreed["save_busy"]), due=bool(agreed["save_due"]))
        self._decided_at = self._clock()
        return self._policy.decide(step, votes, cast_for) and step != self.resumed_step

    def maybe_save(self, step: int, state: Any) -> bool:
        """For one process: saves if a save is due; whether one was started."""
        return self.due(step, self.flags(step)) and self.save(step, state)

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> bool:
        """Starts to save `state`, the state after `step` updates, with its metrics; whether that worked so far.

        Returns once the arrays may be donated, or with `async_checkpointing=false` once they are committed.
        Waits for the save being written, if any. The caller sees to it that the state is finite.
        """
        if not self._config.enable_checkpointing or step == self.resumed_step:
            return False
        began = self._clock()
        self._saves.wait()
        self._saves.start(step, state, metrics or {}, waited=began - self._decided_at, held_since=began)
        return True if self._config.async_checkpointing else self._saves.wait()

    def save_final(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Commits `state`, the last of a finished run, and reads it back: storage holds these very bits.

        Does nothing if checkpointing is off, and writes nothing if `step` is committed already and good. A step
        that reads back otherwise is set aside and saved again. Blocks for up to `checkpoint_timeout_seconds`
        per attempt, and for the reading. Raises SaveError if the state cannot be committed or read back.
        """
        if self._config.enable_checkpointing:
            self._ending.save_final(step, state, metrics or {})

    def save_preempted(
        self, step: int, state: Any, grace_seconds: float, metrics: Mapping[str, float] | None = None
    ) -> int | None:
        """Commits `state`, or a recent enough one that is being written, within the grace; the step that is safe.

        A save that is being written is finished first; `policy.worth_another_save` says whether it is enough. None if
        checkpointing is off. Raises SaveError if neither is committed in time.
        """
        if not self._config.enable_checkpointing:
            return None
        return self._ending.save_preempted(step, state, grace_seconds, metrics or {})

    def poll(self) -> None:
        """Notices if the save being written has ended, is late or hangs; never blocks. `flags` does this too."""
        self._saves.poll()

    def observe_step(self, seconds: float) -> None:
        """A step took `seconds`, what saves held it for left out: tells the cost of saving beside the training."""
        self._saves.observe_step(seconds)

    def news(self) -> list[str]:
        """A line on the newest save, if one was committed since this was last asked."""
        return self.stats.news()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Blocks until no save is being written, for `timeout_seconds` (`checkpoint_timeout_seconds`) at most."""
        self._saves.wait(timeout_seconds)
        self._saves.wait_for_deletions()

    def require_saved(self) -> None:
        """Waits for the save being written, at the end of a run. Raises SaveError if the newest one failed."""
        self._saves.wait()
        if self._saves.owed:
            raise SaveError(f"the last save failed: {self._saves.owed}; {self.stats.where_it_stands()}")

    def close(self) -> None:
        """Waits for the save being written and releases everything; may be called twice."""
        self.wait()
        self._watch.close()
        self._saver.close()

    def work_at_risk_seconds(self) -> float:
        """Seconds of training that would be lost if the run died now."""
        return self.stats.work_at_risk_seconds(self._clock())
