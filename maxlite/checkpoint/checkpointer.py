"""The Checkpointer: restores or initialises a run, saves it while it trains, and says what became of it."""

from __future__ import annotations

import concurrent.futures
import json
import time
from collections.abc import Callable, Mapping
from os import PathLike
from types import TracebackType
from typing import Any, Self

from maxlite.checkpoint import layout, storage, verify
from maxlite.checkpoint.errors import RestoreError, SaveError, in_words
from maxlite.checkpoint.policy import SavePolicy
from maxlite.checkpoint.reading import restore_newest
from maxlite.checkpoint.saving import Pending, Saver
from maxlite.checkpoint.stats import Commit, SaveStats
from maxlite.checkpoint.tree import array_infos, named_leaves
from maxlite.config import CheckpointConfig, InputError

FINAL_ATTEMPTS = 2
HANG_GRACE_SECONDS = 10.0  # Orbax gives up a write at the timeout; this is for what it does not bound


class Checkpointer:
    """Saves of one run in one directory, for one process.

    A save that fails never raises into the training loop: it is reported once, counted, and retried at the
    next due moment. Only the final save raises, because a run must not end well without it.

    `metadata` (anything JSON can hold) goes into every checkpoint. `clock` gives seconds and orders the
    saves; it is called from a background thread too. `report` gets one line per event.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        config: CheckpointConfig,
        *,
        metadata: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str], None] = print,
    ) -> None:
        self.directory = storage.absolute(directory)
        self.stats = SaveStats(safe_since=clock())
        self.saved_metadata: dict[str, Any] | None = None  # `metadata` of the restored checkpoint
        self._config = config
        self._metadata: dict[str, Any] = json.loads(json.dumps(dict(metadata or {})))  # fails now, not at a save
        self._clock = clock
        self._report = report
        self._policy = SavePolicy(config)
        self._longest_save_seconds = config.checkpoint_timeout_seconds + HANG_GRACE_SECONDS
        self._saver = Saver(
            self.directory, config.max_num_checkpoints_to_keep, config.checkpoint_timeout_seconds, clock
        )
        self._pending: Pending | None = None
        self._final_attempts_left: int | None = None  # None: not in save_final

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def restore_or_init(self, abstract_state: Any, init_fn: Callable[[], Any]) -> tuple[Any, int]:
        """Returns (state, step): the newest good checkpoint, or `init_fn()` and 0 if there is none.

        `abstract_state` is a tree of `jax.ShapeDtypeStruct`; every array is read straight to the sharding
        given there (none: the first device), whatever mesh saved it, and may be donated. `init_fn` must
        itself be jitted with these shardings. Leftovers of a killed run are removed first.

        Raises InputError if the checkpoint has another structure or the directory cannot be made,
        RestoreError if checkpoints exist and none can be read: a run never starts anew over them.
        """
        restored = None
        if self._config.enable_checkpointing:
            self._prepare_directory()
            restored = restore_newest(self.directory, abstract_state, self._report)
        elif existing := layout.steps(self.directory)[0]:
            self._report(f"enable_checkpointing=false: checkpoint {existing[0]} in {self.directory} is not used")
        state = init_fn() if restored is None else restored.state
        now = self._clock()
        self.stats.safe_since = now
        if restored is None:
            return state, 0
        self.saved_metadata = restored.metadata.run
        self.stats.last_committed_step = restored.metadata.step
        self._saver.damaged = frozenset(restored.damaged)
        self._policy.started(now)
        return state, restored.metadata.step

    def due(self, step: int) -> bool:
        """Whether the state after `step` updates should be saved now; host work of microseconds, once per step.

        Notices first what became of the save being written.
        """
        self.poll()
        if not self._config.enable_checkpointing or step == self.stats.last_committed_step:
            return False
        return self._policy.due(step, self._clock(), saving=self._pending is not None)

    def maybe_save(self, step: int, state: Any) -> bool:
        """Saves if a save is due; whether one was started."""
        return self.due(step) and self.save(step, state)

    def save(self, step: int, state: Any) -> bool:
        """Starts to save `state`, the state after `step` updates; whether that worked.

        Returns once the arrays may be donated, or with `async_checkpointing=false` once they are committed.
        Waits for the save being written, if any. The caller sees to it that the state is finite.
        """
        if not self._config.enable_checkpointing:
            return False
        began = self._clock()
        try:
            self._await_pending()
            if step == self.stats.last_committed_step:
                return True
            return self._start(step, state) and (self._config.async_checkpointing or self._await_pending())
        finally:
            self.stats.blocked_seconds += self._clock() - began

    def save_final(self, step: int, state: Any) -> None:
        """Commits `state`, the last of this process, and reads it back: storage holds these very bits.

        Does nothing if checkpointing is off, and writes nothing if `step` is committed already and good. A step
        that reads back otherwise is set aside and saved again. Blocks for up to `checkpoint_timeout_seconds`
        per attempt, and for the reading. Raises SaveError if the state cannot be committed or read back.
        """
        if not self._config.enable_checkpointing:
            return
        began = self._clock()
        problem = ""
        try:
            self._await_pending()
            committed = step == self.stats.last_committed_step
            for self._final_attempts_left in reversed(range(FINAL_ATTEMPTS)):
                committed = committed or (self._start(step, state) and self._await_pending())
                problem = self._verify(step, state) if committed else self.stats.last_failure
                if not problem:
                    return
                committed = False
        finally:
            self._final_attempts_left = None
            self.stats.blocked_seconds += self._clock() - began
        raise SaveError(f"the final state, step {step}, is not saved in {self.directory}: {problem}")

    def poll(self) -> None:
        """Notices if the save being written has ended or hangs; never blocks. `due` does this too."""
        pending = self._pending
        if pending is None:
            return
        if pending.result.done():
            self._settle(pending)
        elif self._clock() - pending.started > self._longest_save_seconds:
            self._abandon(pending)

    def wait(self) -> None:
        """Blocks until no save is being written, for `checkpoint_timeout_seconds` at most."""
        began = self._clock()
        self._await_pending()
        self.stats.blocked_seconds += self._clock() - began

    def close(self) -> None:
        """Waits for the save being written and releases everything; may be called twice."""
        self.wait()
        self._saver.close()

    def work_at_risk_seconds(self) -> float:
        """Seconds of training that would be lost if the run died now."""
        return self.stats.work_at_risk_seconds(self._clock())

    def _prepare_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for path in layout.leftovers(self.directory):
                path.rmtree()
        except OSError as error:
            raise InputError(f"checkpoint directory {self.directory} cannot be used: {in_words(error)}") from error

    def _start(self, step: int, state: Any) -> bool:
        self._policy.started(self._clock())
        arrays = named_leaves(state)
        parent = self.stats.last_committed_step
        metadata = layout.StepMetadata(step, time.time(), parent, array_infos(arrays), self._metadata)
        try:
            if moved := self._saver.make_way(step):
                self._report(moved)
            self._pending = self._saver.start(arrays, metadata)
        except Exception as error:  # storage libraries raise all kinds; reported, counted and retried
            self._failed(step, error)
            return False
        return True

    def _verify(self, step: int, state: Any) -> str:
        """What is wrong with a committed step, which then is one no more; empty if it holds `state`."""
        path = layout.step_path(self.directory, step)
        try:
            problem = verify.damage(path, named_leaves(state), self._report)
            if problem:
                self.stats.last_committed_step = None
                self._report(f"checkpoint {path} is damaged: {problem}")
                if moved := self._saver.make_way(step):
                    self._report(moved)
        except (RestoreError, OSError) as error:  # nothing says that the step is bad: it stays
            raise SaveError(f"the final state, step {step}, is committed but not verified: {error}") from error
        return problem

    def _await_pending(self) -> bool:
        """Blocks until the save being written has ended, if there is one; whether it was committed."""
        pending = self._pending
        if pending is None:
            return False
        concurrent.futures.wait([pending.result], timeout=self._longest_save_seconds)
        if pending.result.done():
            return self._settle(pending)
        self._abandon(pending)
        return False

    def _abandon(self, pending: Pending) -> None:
        pending.abandoned.set()
        self._failed(pending.step, TimeoutError(f"not committed within {self._longest_save_seconds:g} s"))

    def _settle(self, pending: Pending) -> bool:
        error = pending.result.exception()
        if error is not None:
            self._failed(pending.step, error)
            return False
        committed = pending.result.result()
        self._pending = None
        self._policy.committed()
        self._saver.damaged -= {pending.step}
        self.stats.commits.append(Commit(pending.step, pending.started, committed.at))
        self.stats.last_committed_step = pending.step
        self.stats.safe_since = pending.started
        for warning in committed.warnings:
            self._report(warning)
        return True

    def _failed(self, step: int, error: BaseException) -> None:
        self._pending = None
        self._saver.forget_writer()
        self.stats.failed += 1
        self.stats.last_failure = in_words(error)
        delay = self._policy.failed(self._clock())
        if self._final_attempts_left == 0:
            return  # SaveError says it
        then = f"next try in {delay:.0f} s or later" if self._final_attempts_left is None else "trying again at once"
        self._report(f"save of step {step} failed, {then}: {self.stats.last_failure}")
