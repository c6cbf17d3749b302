"""The Checkpointer: restores or initialises a run, saves it while it trains, and says what became of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Self

from maxlite.checkpoint import layout, start, storage
from maxlite.checkpoint.background import Job
from maxlite.checkpoint.committing import Committed
from maxlite.checkpoint.errors import PeerError, RestoreError, SaveError, in_words
from maxlite.checkpoint.peers import Peers
from maxlite.checkpoint.policy import NONE, SavePolicy, Votes, worth_another_save
from maxlite.checkpoint.reading import check_step
from maxlite.checkpoint.saving import Pending, Saver
from maxlite.checkpoint.stats import SaveRecord, SaveStats
from maxlite.checkpoint.tree import array_infos, named_leaves
from maxlite.checkpoint.watch import DirectoryWatch
from maxlite.config import CheckpointConfig

FINAL_ATTEMPTS = 2
LATE_SECONDS = 10.0  # a save is late after this, and after LATE_TIMES the longest of the newest saves
LATE_TIMES = 5.0
GIVE_UP_SECONDS = 120.0  # and it is given up after this, and after GIVE_UP_TIMES as long
GIVE_UP_TIMES = 20.0
HANG_GRACE_SECONDS = 10.0  # a write is given up at its timeout; this is for what the timeout does not bound
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
        self._metadata: dict[str, Any] = json.loads(json.dumps(dict(metadata or {})))  # fails now, not at a save
        self._peers = peers or Peers()
        self._clock = clock
        self._report = report
        self._record = record
        self._policy = SavePolicy(config, primary=self._peers.primary)
        self._saver = Saver(self.directory, config, self._peers, clock)
        self._watch = DirectoryWatch(self.directory)
        self._pending: Pending | None = None
        self._waited = 0.0  # seconds from the decision for the pending save until its step's result was there
        self._held = 0.0  # seconds that it held training
        self._told = 0  # saves that `news` was asked about
        self._beside = False  # a save was being written at some time since the newest step was observed
        self._late = False  # the pending save was said to be late
        self._decided_at = clock()
        self._resumed_step: int | None = None
        self._stopping = False  # a save failed, and on_save_failure=stop
        self._then: str | None = None  # what follows when the pending save fails; "": the caller raises what failed
        self._owed = ""  # why the newest save failed, if no other was committed since
        self._agreements = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._then = "and the run ends"
            if self._peers.count > 1:  # another may be gone, and a save that waits for it would wait out its timeout
                self.wait(self._config.preemption_grace_seconds)
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
            self._resumed_step = found.step
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
        votes = self._policy.votes(step, self._clock(), saving=self._pending is not None)
        if problem := self._policy.problem():
            self._report(
                f"{problem}; it is not asked again, and saves go by checkpoint_period and the like from now on"
            )
            self._record("save_policy_failed", why=problem)
        return {"save_busy": votes.busy, "save_due": votes.due, "save_failed": self._stopping}

    def due(self, step: int, agreed: Mapping[str, float], cast_for: int | None = None) -> bool:
        """Whether the state after `step` updates is to be saved now; the same on every process for equal votes.

        `cast_for` is the step whose `flags` the agreed ones are; None: of this one.

        Raises SaveError if a save failed and `on_save_failure=stop`.
        """
        if not self._config.enable_checkpointing:
            return False
        if agreed["save_failed"]:
            self._await_pending(HANG_GRACE_SECONDS)  # another process knew first; this one is about to hear why
            why = self.stats.last_failure or "on another process"
            raise SaveError(f"a save failed ({why}) and on_save_failure=stop; {self._where_it_stands()}")
        votes = Votes(busy=bool(agreed["save_busy"]), due=bool(agreed["save_due"]))
        self._decided_at = self._clock()
        return self._policy.decide(step, votes, cast_for) and step != self._resumed_step

    def maybe_save(self, step: int, state: Any) -> bool:
        """For one process: saves if a save is due; whether one was started."""
        return self.due(step, self.flags(step)) and self.save(step, state)

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> bool:
        """Starts to save `state`, the state after `step` updates, with its metrics; whether that worked so far.

        Returns once the arrays may be donated, or with `async_checkpointing=false` once they are committed.
        Waits for the save being written, if any. The caller sees to it that the state is finite.
        """
        if not self._config.enable_checkpointing or step == self._resumed_step:
            return False
        began = self._clock()
        self._await_pending()
        self._start(step, state, metrics or {}, waited=began - self._decided_at)
        self._held = self._clock() - began
        if not self._config.async_checkpointing:
            return self._await_pending()
        self.stats.blocked_seconds += self._held
        return True

    def save_final(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Commits `state`, the last of a finished run, and reads it back: storage holds these very bits.

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
            committed = self._all_have(step)
            for left in reversed(range(FINAL_ATTEMPTS)):
                self._then = "trying again at once" if left else ""
                if not committed:
                    self._start(step, state, metrics or {}, waited=0.0)
                    self._await_pending()
                    committed = self._all_have(step)
                problem = self._verify(step, state) if committed else self._why_not()
                if not problem:
                    self._saver.delete_old()  # what it replaces, now that it is known to be good
                    self.wait()
                    return
                committed = False
        finally:
            self._then = None
            self._record("final_save", step=step, seconds=self._clock() - began)
        raise SaveError(f"the final state, step {step}, is not saved in {self.directory}: {problem}")

    def save_preempted(
        self, step: int, state: Any, grace_seconds: float, metrics: Mapping[str, float] | None = None
    ) -> int | None:
        """Commits `state`, or a recent enough one that is being written, within the grace; the step that is safe.

        A save that is being written is finished first; `policy.worth_another_save` says whether it is enough. None if
        checkpointing is off. Raises SaveError if neither is committed in time.
        """
        if not self._config.enable_checkpointing:
            return None
        # A save that one process has seen to end may still be pending in another: what all do goes by all answers.
        last, writing = self.stats.last_committed_step, NONE if self._pending is None else self._pending.step
        answers = self._agree([last, writing, grace_seconds], grace_seconds)
        if all(answer[0] == step for answer in answers):
            return step
        writing, deadline = max(answer[1] for answer in answers), self._clock() + min(answer[2] for answer in answers)
        safe: int | None = None
        self._then = ""
        try:
            if writing != NONE:
                self._await_pending(deadline - self._clock())
                safe = writing if self._all_have(writing, deadline) else None
            if self._saves_another(step, safe, deadline):
                self._start(step, state, metrics or {}, waited=0.0)
                self._await_pending(deadline - self._clock())
                safe = step if self._all_have(step, deadline) else safe
        finally:
            self._then = None
        if safe is None:
            why = f"{self._why_not()}; {self._where_it_stands()}"
            raise SaveError(f"step {step} is not saved within preemption_grace_seconds: {why}")
        return safe

    def _saves_another(self, step: int, safe: int | None, deadline: float) -> bool:
        """Whether all save `step` too, when `safe` is committed on all of them."""
        left, work = deadline - self._clock(), self._clock() - self.stats.safe_since
        worth = safe is None or worth_another_save(left, save_seconds=self._usual_seconds(), work_seconds=work)
        return safe != step and all(self._agree(left > 0 and worth, max(left, 1.0)))

    def poll(self) -> None:
        """Notices if the save being written has ended, is late or hangs; never blocks. `flags` does this too."""
        for warning in self._saver.warnings():
            self._report(warning)
        pending = self._pending
        if pending is None:
            if lost := self._watch.problem():
                self._lost(*lost)
            return
        took, usual = self._clock() - pending.started, self._usual_seconds()
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
        saving, self._beside = self._beside, self._pending is not None
        self.stats.observe_step(seconds, saving)
        self._policy.pacing.observe_step(seconds, saving)
        if line := self._policy.pacing.changed():
            self._report(line)
            self._record("save_interval", seconds=self._policy.pacing.interval_seconds(), why=line)

    def news(self) -> list[str]:
        """A line on the newest save, if one was committed since this was last asked."""
        count, self._told = self.stats.committed - self._told, self.stats.committed
        if count == 0:
            return []
        *_, newest = self.stats.commits
        return [newest.line() + (f"; {count} saves since the line before" if count > 1 else "")]

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Blocks until no save is being written, for `timeout_seconds` (`checkpoint_timeout_seconds`) at most."""
        self._await_pending(timeout_seconds)
        for warning in self._saver.wait_for_deletions(self._config.checkpoint_timeout_seconds):
            self._report(warning)

    def require_saved(self) -> None:
        """Waits for the save being written, at the end of a run. Raises SaveError if the newest one failed."""
        self._await_pending()
        if self._owed:
            raise SaveError(f"the last save failed: {self._owed}; {self._where_it_stands()}")

    def close(self) -> None:
        """Waits for the save being written and releases everything; may be called twice."""
        self.wait()
        self._watch.close()
        self._saver.close()

    def work_at_risk_seconds(self) -> float:
        """Seconds of training that would be lost if the run died now."""
        return self.stats.work_at_risk_seconds(self._clock())

    def _start(self, step: int, state: Any, metrics: Mapping[str, float], waited: float) -> None:
        now = self._clock()
        self._policy.started(step, now)
        arrays = named_leaves(state)
        metadata = layout.StepMetadata(
            step, time.time(), self.stats.last_committed_step, array_infos(arrays), dict(metrics), self._metadata
        )
        self._waited, self._held, self._late, self._beside = waited, 0.0, False, True
        self._pending = self._saver.start(arrays, metadata)

    def _longest_seconds(self) -> float:
        """How long a save may take before it is given up: a multiple of what the newest took, once that is known."""
        limit, usual = self._config.checkpoint_timeout_seconds, self._usual_seconds()
        if usual is not None:
            limit = min(limit, max(GIVE_UP_SECONDS, GIVE_UP_TIMES * usual))
        return limit + HANG_GRACE_SECONDS

    def _usual_seconds(self) -> float | None:
        """The longest of the newest saves; None before the first."""
        return max((commit.seconds for commit in list(self.stats.commits)[-10:]), default=None)

    def _verify(self, step: int, state: Any) -> str:
        """What is wrong with a committed step, which then is one no more; empty if it holds what was saved."""
        path = layout.step_path(self.directory, step)
        check = partial(check_step, path, self._report, abstract_state=state, config=self._config, peers=self._peers)
        reading, longest = Job("checkpoint-verify", check), self._config.checkpoint_timeout_seconds
        try:
            if not reading.wait(longest):
                raise RestoreError(f"not read back within {longest:g} s")
            problem = reading.result()
            if problem:
                self.stats.last_committed_step = None
                self._report(f"checkpoint {path} is damaged: {problem}")
                self._record("checkpoint_damaged", step=step, why=problem)
                if moved := self._saver.set_aside(step):
                    self._report(moved)
        except (RestoreError, OSError) as error:  # nothing says that the step is bad: it stays
            raise SaveError(
                f"the final state, step {step}, is committed but not verified: {in_words(error)}"
            ) from error
        if not problem:
            self._saver.verified(step)
        return problem

    def _agree(self, answer: Any, timeout_seconds: float) -> list[Any]:
        """Every process's answer, anything JSON can hold; for the end of a run, when no train step carries it.

        Raises SaveError if one does not answer in time.
        """
        self._agreements += 1
        try:
            topic, text = f"agree/{self._agreements}", json.dumps(answer)
            return [json.loads(text) for text in self._peers.exchange(topic, text, timeout_seconds=timeout_seconds)]
        except PeerError as error:
            raise SaveError(f"{error}; {self._where_it_stands()}") from error

    def _all_have(self, step: int, deadline: float | None = None) -> bool:
        """Whether every process knows the step to be committed."""
        left = self._config.checkpoint_timeout_seconds if deadline is None else deadline - self._clock() + 1.0
        return all(last == step for last in self._agree(self.stats.last_committed_step, left))

    def _await_pending(self, timeout_seconds: float | None = None) -> bool:
        """Blocks until the save being written has ended, if there is one; whether it was committed."""
        pending = self._pending
        if pending is None:
            return False
        if pending.result.wait(self._longest_seconds() if timeout_seconds is None else timeout_seconds):
            return self._settle(pending)
        self._abandon(pending, self._clock() - pending.started)
        return False

    def _abandon(self, pending: Pending, took: float) -> None:
        pending.abandoned.set()
        self._failed(pending.step, TimeoutError(f"not committed within {took:.0f} s, given up"))

    def _settle(self, pending: Pending) -> bool:
        pending.result.join()
        error = pending.result.exception()
        if error is not None:
            self._failed(pending.step, error)
            return False
        self._committed(pending, pending.result.result())
        return True

    def _committed(self, pending: Pending, committed: Committed) -> None:
        self._pending, self._owed = None, ""
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

    def _failed(self, step: int, error: BaseException) -> None:
        self._pending = None
        self._saver.forget_writer()
        self.stats.failed += 1
        self.stats.last_failure = self._owed = in_words(error)
        self._stopping = self._config.on_save_failure == "stop"
        delay = self._policy.failed(self._clock())
        self._record("save_failed", step=step, why=self.stats.last_failure, retry_seconds=delay)
        then = self._then
        if then is None:
            then = "and on_save_failure=stop" if self._stopping else f"next try in {delay:.0f} s or later"
        if then:
            self._report(f"save of step {step} failed, {then}: {self.stats.last_failure}; {self._where_it_stands()}")

    def _lost(self, problem: str, newest: int | None) -> None:
        """The directory is not as it was left: what was safe is no more, but for older steps, and is saved anew."""
        self.stats.last_committed_step = newest
        times = {commit.step: commit.started for commit in self.stats.commits}
        self.stats.safe_since = self.stats.began if newest is None else times.get(newest, self.stats.began)
        self._policy.failed(self._clock())
        self._report(f"{problem}; saving again; {self._where_it_stands()}")
        self._record("checkpoints_lost", why=problem)

    def _why_not(self) -> str:
        """Why a step that this process has saved is not committed on all."""
        return self.stats.last_failure or "another process does not know it to be committed"

    def _where_it_stands(self) -> str:
        last = self.stats.last_committed_step
        return "nothing is saved yet" if last is None else f"step {last} is the newest saved"
