"""One save from its snapshot to its commit: the part that runs in the background.

Every process writes its part; when all have, one process makes the step whole, records what it must hold, and commits
it. What one process cannot do fails the save on all of them at once, in that process's words.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from etils import epath

from maxlite.checkpoint import fingerprint, integrity, layout, orbax_io, storage
from maxlite.checkpoint.errors import Damage, PeerError, SaveError, in_words
from maxlite.checkpoint.peers import Peers
from maxlite.config import CheckpointConfig

T = TypeVar("T")

RECLAIM_LOOKS = 10
RECLAIM_PAUSE_SECONDS = 0.05


class Committed(NamedTuple):
    """A save that worked, and where its time went. Times are of the clock, in seconds."""

    at: float  # when it was durable
    write_seconds: float  # from the snapshot until this process's part was on storage
    digest_seconds: float  # waiting for the fingerprints, and recording them and the files
    commit_seconds: float  # waiting for the other processes, making the step whole, syncing and naming it
    stored_bytes: int | None  # the step's size on storage; known to the primary process
    warnings: list[str]  # what to tell the user besides


class _Step(NamedTuple):
    """What the primary process knows of the step that it has committed."""

    digested_at: float
    stored_bytes: int
    warnings: list[str]


@dataclass
class Commit:
    """Sees one save through. `error`: what went wrong before; then `writer` and `fingerprints` may be missing."""

    directory: epath.Path
    target: epath.Path  # where the save is written until it is committed
    metadata: layout.StepMetadata
    bytes: int  # of all arrays
    attempt: int  # a number of its own, the same on every process
    began: float
    writer: orbax_io.Writer | None
    fingerprints: jax.Array | None  # being computed
    error: Exception | None
    abandoned: threading.Event
    config: CheckpointConfig
    peers: Peers
    clock: Callable[[], float]

    def run(self) -> Committed:
        """Blocks until the step is committed. Raises what went wrong."""
        try:
            self._together("written", self._finish)
            written = self.clock()
            step = self._together("committed", lambda: self._commit(written) if self.peers.primary else None)
        except Exception as error:
            if self.peers.primary:
                self._reclaim(error)
            raise
        at = self.clock()
        if step is None:
            return Committed(at, written - self.began, 0.0, at - written, None, [])
        digested, stored_bytes, warnings = step
        return Committed(at, written - self.began, digested - written, at - digested, stored_bytes, warnings)

    def _finish(self) -> None:
        """This process's part is on storage, and the fingerprints are computed."""
        if self.error is not None:
            raise self.error
        assert self.writer is not None
        self.writer.finish()
        np.asarray(self.fingerprints)

    def _commit(self, written: float) -> _Step:
        """Makes one step of what all processes wrote."""
        assert self.writer is not None
        assert self.fingerprints is not None
        self.writer.merge(self.target / layout.STATE)
        layout.write_metadata(self.target, self.metadata)
        merged = self.clock()
        record = integrity.write(self.target, fingerprint.named(self.metadata.arrays, self.fingerprints))
        if record.bytes < self.bytes and not self.config.checkpoint_storage_compression:
            # Orbax does not notice when the directory is removed under it.
            raise SaveError(f"{self.target} has {record.bytes} bytes, and the arrays alone are {self.bytes}")
        digested = written + self.clock() - merged
        storage.sync_files(self.target)
        if self.abandoned.is_set():  # while storage hung
            raise SaveError("given up")
        path, warnings = layout.step_path(self.directory, self.metadata.step), self._vanished()
        if path != self.target and path.exists():
            if _holds(path, record):  # committed by a save that was thought to have failed, in its last moment
                storage.remove(self.target)
                return _Step(digested, record.bytes, warnings)
            warnings.append(f"{path} was in the way of a save and is now {storage.set_aside(path).name}")
        storage.commit(self.target, path)
        for leftover in storage.unfinished(self.directory):  # of saves that failed or were given up
            storage.remove(leftover)
        return _Step(digested, record.bytes, warnings)

    def _vanished(self) -> list[str]:
        """A line if the newest committed step, and so perhaps all, was removed: this save would hide that."""
        parent = self.metadata.parent_step
        if parent is None or layout.is_committed(layout.step_path(self.directory, parent)):
            return []
        return [
            f"checkpoint {layout.step_path(self.directory, parent)} has vanished; step {self.metadata.step} is saved"
        ]

    def _together(self, phase: str, part: Callable[[], T]) -> T:
        """Does this process's part; raises if any process could not do its own."""
        if self.abandoned.is_set():  # while this thread hung; others may speak of a later save by now
            raise SaveError("given up")
        done: list[T] = []
        failed: Exception | None = None
        try:
            done.append(part())
        except Exception as error:  # of all kinds
            failed = error
        try:
            self.peers.exchange(
                f"save/{self.attempt}/{phase}",
                error="" if failed is None else in_words(failed),
                timeout_seconds=self.config.checkpoint_timeout_seconds,
                abandoned=self.abandoned,
            )
        except PeerError:
            if failed is not None:
                raise failed from None
            raise
        return done[0]

    def _reclaim(self, error: Exception) -> None:
        """Removes what failed saves left; only its own, if it was given up and another may be being written.

        By the primary process alone, since only it knows that it commits no more. Looks again until nothing is left,
        as other parts of a write whose first part failed may still make files. What another process writes even later
        goes with the next commit.
        """
        problem: OSError | None = None
        for look in range(RECLAIM_LOOKS):
            try:
                found = [self.target] if self.abandoned.is_set() else storage.unfinished(self.directory)
                found = [path for path in found if path.exists()]
                for path in found:
                    storage.remove(path)
                if look and not found:
                    return
                problem = None
            except OSError as raised:
                problem = raised
            time.sleep(RECLAIM_PAUSE_SECONDS)
        if problem is not None:  # the failure itself is what matters; the next save, or start, cleans up
            error.add_note(f"its leftovers could not be removed: {in_words(problem)}")


def _holds(path: epath.Path, record: integrity.Record) -> bool:
    """Whether a step directory is committed and holds these very arrays."""
    try:
        there = integrity.read(path)
        integrity.require_files(path, there)
    except Damage:
        return False
    return layout.is_committed(path) and there.arrays == record.arrays
