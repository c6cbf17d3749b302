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

METADATA_ROOM_BYTES = 4 << 20  # what a step takes besides its arrays, generously


class Pending(NamedTuple):
    """A save being written."""

    step: int
    started: float
    device_to_host_seconds: float
    bytes: int  # of all arrays, on all processes
    result: Job[Committed]
    abandoned: threading.Event  # set: its thread hangs, and must touch nothing when it wakes up


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
            retention=self._retention,
            clock=self._clock,
        )
        result = Job("checkpoint-commit", commit.run)
        return Pending(metadata.step, started, commit.began - begun, size, result, abandoned)

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
        if self._peers.primary:
            self._require_space(size)
        if self._writer is None:
            self._quiet.enter_context(orbax_io.quiet)
            self._writer = orbax_io.Writer(self._config, local=storage.is_local(self._directory))
        (target / layout.STATE).mkdir(parents=True, exist_ok=True)
        self._writer.start(target / layout.STATE, arrays)

    def _require_space(self, size: int) -> None:
        free = storage.free_bytes(self._directory) if self._directory.exists() else None
        if free is not None and free < size + METADATA_ROOM_BYTES and not self._config.checkpoint_storage_compression:
            raise SaveError(
                f"No space left: {self._directory} has {in_bytes(free)} and a save takes "
                f"{in_bytes(size + METADATA_ROOM_BYTES)}; free some, or keep fewer with max_num_checkpoints_to_keep"
            )
