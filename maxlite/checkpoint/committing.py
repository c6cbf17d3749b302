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
from maxlite.checkpoint.errors import PeerError, SaveError, in_words
from maxlite.checkpoint.peers import Peers
from maxlite.checkpoint.retention import Retention
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
    warnings: list[str]  # what to tell the user besides


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
    retention: Retention
    clock: Callable[[], float]

    def run(self) -> Committed:
        """Blocks until the step is committed, then deletes what is no longer kept. Raises what went wrong."""
        try:
            self._together("written", self._finish)
            written = digested = self.clock()
            warnings: list[str] = []
            if self.peers.primary:
                digested, warnings = self._together("committed", lambda: self._commit(written))
            else:
                self._together("committed", lambda: None)
        except Exception as error:
            self._reclaim(error)
            raise
        at = self.clock()
        if self.peers.primary and not self.abandoned.is_set():
            warnings += self.retention.committed(self.metadata)
        return Committed(at, written - self.began, digested - written, at - digested, warnings)

    def _finish(self) -> None:
        """This process's part is on storage, and the fingerprints are computed."""
        if self.error is not None:
            raise self.error
        assert self.writer is not None
        self.writer.finish()
        np.asarray(self.fingerprints)

    def _commit(self, written: float) -> tuple[float, list[str]]:
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
        step_path = layout.step_path(self.directory, self.metadata.step)
        warnings = []
        if step_path != self.target and step_path.exists():
            warnings = [f"{step_path} was in the way of a save and is now {storage.set_aside(step_path).name}"]
        storage.commit(self.target, step_path)
        return digested, warnings

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

        Every process does, when its own writes have ended: the last of them leaves nothing. Looks again until nothing
        is left, as other parts of a write whose first part failed may still make files, and others remove them too.
        """
        problem: OSError | None = None
        for look in range(RECLAIM_LOOKS):
            try:
                everything = self.peers.primary and not self.abandoned.is_set()
                found = storage.leftovers(self.directory) if everything else [self.target]
                found = [path for path in found if path.exists()]
                for path in found:
                    path.rmtree(missing_ok=True)
                if look and not found:
                    return
                problem = None
            except OSError as raised:
                problem = raised
            time.sleep(RECLAIM_PAUSE_SECONDS)
        if problem is not None:  # the failure itself is what matters; the next save, or start, cleans up
            error.add_note(f"its leftovers could not be removed: {in_words(problem)}")
