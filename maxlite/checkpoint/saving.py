"""Starts saves: the part that holds training."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from etils import epath

from maxlite.checkpoint import fingerprint, layout, orbax_io, storage
from maxlite.checkpoint.background import Job
from maxlite.checkpoint.committing import Commit, Committed
from maxlite.checkpoint.errors import SaveError
from maxlite.checkpoint.peers import Peers
from maxlite.checkpoint.retention import Retention
from maxlite.checkpoint.stats import in_bytes
from maxlite.config import CheckpointConfig

STORAGE_SECONDS = 10.0  # for storage to make a directory; training waits for that
METADATA_ROOM_BYTES = 4 << 20  # what a step takes besides its arrays, generously


class Pending(NamedTuple):
    """A save being written."""

    metadata: layout.StepMetadata
    started: float
    device_to_host_seconds: float
    bytes: int  # of all arrays, on all processes
    result: Job[Committed]
    abandoned: threading.Event  # set: its thread hangs, and must touch nothing when it wakes up

    @property
    def step(self) -> int:
        """The step that it saves."""
        return self.metadata.step


class Saver:
    """Writes steps into one directory, one at a time, and deletes the steps that are no longer kept."""

    def __init__(
        self, directory: epath.Path, config: CheckpointConfig, peers: Peers, clock: Callable[[], float]
    ) -> None:
        self._directory = directory
        self._config = config
        self._peers = peers
        self._clock = clock
        self._retention = Retention(directory, config)
        self._attempts = 0
        self._compiling: Job[jax.stages.Compiled] | None = None
        self._cleaning: Job[list[str]] | None = None
        self._clean_again = False
        self._unsaid: list[str] = []  # what could not be deleted
        self._usual_bytes: int | None = None  # of the newest step, on storage
        self._writer: orbax_io.Writer | None = None
        self._quiet = contextlib.ExitStack()  # from the first writer on

    def prepare(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Starts to compile what a save computes, in the background."""
        self._compiling = fingerprint.compiled(abstract)

    def start(self, arrays: Mapping[str, jax.Array], metadata: layout.StepMetadata) -> Pending:
        """Starts a save; returns once the arrays may be donated. Whatever goes wrong is the result's exception."""
        self._attempts += 1
        started, abandoned = self._clock(), threading.Event()
        size = sum(x.nbytes for x in arrays.values())
        target = storage.writing_path(self._directory, metadata.step, self._attempts)
        fingerprints, begun, error = None, started, None
        try:
            # First, and whatever happens to this process's storage: the others compute their part of it too.
            fingerprints = fingerprint.compiled(arrays).result()(tuple(arrays.values()))
            begun = self._clock()
            self._write(arrays, target, size)
        except Exception as raised:  # storage libraries raise all kinds
            error = raised
        commit = Commit(
            directory=self._directory,
            target=target,
            metadata=metadata,
            bytes=size,
            attempt=self._attempts,
            began=self._clock(),
            writer=self._writer,
            fingerprints=fingerprints,
            error=error,
            abandoned=abandoned,
            config=self._config,
            peers=self._peers,
            clock=self._clock,
        )
        result = Job("checkpoint-commit", commit.run)
        return Pending(metadata, started, commit.began - begun, size, result, abandoned)

    def committed(self, metadata: layout.StepMetadata, stored_bytes: int | None) -> None:
        """A save was committed: others may no longer be kept."""
        self._usual_bytes = stored_bytes
        if self._peers.primary:
            self._retention.committed(metadata)
        self.delete_old()

    def delete_old(self) -> None:
        """Starts to delete the steps that are no longer kept."""
        if not self._peers.primary:
            return
        self._unsaid += self.warnings()
        # One at a time: what comes up while storage is slow to delete is done by the next.
        self._clean_again = self._cleaning is not None
        if self._cleaning is None:
            self._cleaning = Job("checkpoint-retention", self._retention.delete_old)

    def warnings(self) -> list[str]:
        """What could not be deleted, in words; each said once."""
        said, self._unsaid = self._unsaid, []
        if self._cleaning is not None and self._cleaning.done():
            self._cleaning.join()
            said += self._cleaning.result()
            self._cleaning = None
            if self._clean_again:
                self.delete_old()
        return said

    def wait_for_deletions(self, timeout_seconds: float) -> list[str]:
        """Blocks until what is no longer kept is deleted; what could not be, in words."""
        warnings = []
        while self._cleaning is not None and self._cleaning.wait(timeout_seconds):
            warnings += self.warnings()
        return warnings

    def verified(self, step: int) -> None:
        """The arrays of a step on storage are known to be what was saved: it stays until a newer one is verified."""
        if self._peers.primary:
            self._retention.verified(step)

    def set_aside(self, step: int) -> str:
        """Renames a damaged step, so that nobody takes it for a checkpoint again; in words. Raises OSError."""
        path = layout.step_path(self._directory, step)
        return f"{path} is now {storage.set_aside(path).name}" if self._peers.primary and path.exists() else ""

    def forget_writer(self) -> None:
        """The next save gets a writer of its own: the old one may hold a thread that hangs, or an old error."""
        orbax_io.quiet.failed()
        self._writer = None

    def close(self) -> None:
        """Releases everything; no save may be being written."""
        if self._compiling is not None:
            self._compiling.join()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._quiet.close()

    def _write(self, arrays: Mapping[str, jax.Array], target: epath.Path, size: int) -> None:
        # What waits for storage waits beside training, within bounds: storage may hang.
        ready = Job("checkpoint-directory", lambda: self._make_room(target, size))
        if not ready.wait(STORAGE_SECONDS):
            raise SaveError(f"{self._directory} did not answer within {STORAGE_SECONDS:g} s")
        ready.result()
        if self._writer is None:
            self._quiet.enter_context(orbax_io.quiet)
            self._writer = orbax_io.Writer(self._config, local=storage.is_local(self._directory))
        self._writer.start(target / layout.STATE, arrays)

    def _make_room(self, target: epath.Path, size: int) -> None:
        if self._peers.primary and self._directory.exists():
            free, wanted = storage.free_bytes(self._directory), (self._usual_bytes or size) + METADATA_ROOM_BYTES
            if free is not None and free < wanted:
                raise SaveError(
                    f"No space left: {self._directory} has {in_bytes(free)} and a save takes {in_bytes(wanted)}; free "
                    "some, or keep fewer with max_num_checkpoints_to_keep"
                )
        (target / layout.STATE).mkdir(parents=True, exist_ok=True)
