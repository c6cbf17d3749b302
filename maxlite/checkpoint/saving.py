"""One save from its start to its commit: the part that runs in the background.

Every process writes its part; when all have, one process makes the step whole, records what it must hold, and commits
it. What one process cannot do fails the save on all of them at once, in that process's words.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from etils import epath

from maxlite.checkpoint import fingerprint, integrity, layout, orbax_io, storage
from maxlite.checkpoint.background import in_thread
from maxlite.checkpoint.errors import PeerError, SaveError, in_words
from maxlite.checkpoint.keep import KeptStep, Preservation
from maxlite.checkpoint.peers import Peers
from maxlite.config import CheckpointConfig, InputError

METADATA_ROOM_BYTES = 4 << 20  # what a step takes besides its arrays, generously


class Committed(NamedTuple):
    """A save that worked, and where its time went. Times are of the clock, in seconds."""

    at: float  # when it was durable
    write_seconds: float  # from the snapshot until this process's part was on storage
    digest_seconds: float  # waiting for the fingerprints, and recording them and the files
    commit_seconds: float  # waiting for the other processes, making the step whole, syncing and naming it
    warnings: list[str]  # what to tell the user besides


class Pending(NamedTuple):
    """A save being written."""

    step: int
    started: float
    device_to_host_seconds: float
    bytes: int  # of all arrays, on all processes
    result: concurrent.futures.Future[Committed]
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
        self._preservation = Preservation(config)
        self._kept: dict[int, KeptStep] = {}  # what is known of the steps on storage
        self._attempts = 0
        self._writer: orbax_io.Writer | None = None
        self._quiet = contextlib.ExitStack()  # from the first writer on

    def prepare(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Starts to compile what a save computes, in the background."""
        fingerprint.compiled(abstract)

    def start(self, arrays: Mapping[str, jax.Array], metadata: layout.StepMetadata) -> Pending:
        """Starts a save; returns once the arrays may be donated. Whatever goes wrong is the result's exception."""
        self._attempts += 1
        started, abandoned = self._clock(), threading.Event()
        # First, and whatever happens to this process's storage: the others compute their part of it too.
        rows = fingerprint.compiled(arrays).result()(tuple(arrays.values()))
        size = sum(x.nbytes for x in arrays.values())
        target = storage.writing_path(self._directory, metadata.step, self._attempts)
        begun, error = self._clock(), None
        try:
            if self._peers.primary:
                self._require_space(size)
            if self._writer is None:
                self._quiet.enter_context(orbax_io.quiet)
                self._writer = orbax_io.Writer(self._config, local=storage.is_local(self._directory))
            (target / layout.STATE).mkdir(parents=True, exist_ok=True)
            self._writer.start(target / layout.STATE, arrays)
        except Exception as raised:  # storage libraries raise all kinds
            error = raised
        written_from, writer, attempt = self._clock(), self._writer, self._attempts

        def see_through() -> Committed:
            write = _Write(writer, error, rows, written_from)
            return self._see_through(target, attempt, metadata, size, write, abandoned)

        return Pending(
            metadata.step, started, written_from - begun, size, in_thread("checkpoint-commit", see_through), abandoned
        )

    def verified(self, step: int) -> None:
        """The arrays of a step on storage are known to be what was saved: it stays until a newer one is verified."""
        if self._peers.primary:
            self._kept[step] = self._look_at(step)._replace(verified=True)

    def forget_writer(self) -> None:
        """The next save gets a writer of its own: the old one may hold a thread that hangs, or an old error."""
        orbax_io.quiet.failed()
        self._writer = None

    def close(self) -> None:
        """Releases everything; no save may be being written."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._quiet.close()

    def _require_space(self, size: int) -> None:
        free = storage.free_bytes(self._directory) if self._directory.exists() else None
        if free is not None and free < size + METADATA_ROOM_BYTES and not self._config.checkpoint_storage_compression:
            raise SaveError(
                f"{self._directory} has {free / 1e9:.2f} GB left and a save takes {size / 1e9:.2f} GB: free some "
                "space, or keep fewer with max_num_checkpoints_to_keep"
            )

    def _see_through(
        self,
        target: epath.Path,
        attempt: int,
        metadata: layout.StepMetadata,
        size: int,
        write: _Write,
        abandoned: threading.Event,
    ) -> Committed:
        """Sees a save through to its commit, then deletes what is no longer kept."""
        try:
            self._together(f"save/{attempt}/written", write.finish, abandoned)
            written_at, digested_at = self._clock(), self._clock()
            warnings: list[str] = []

            def commit() -> None:
                nonlocal digested_at, warnings
                if self._peers.primary:
                    write.merge(target / layout.STATE)
                    layout.write_metadata(target, metadata)
                    merged_at = self._clock()
                    record = integrity.write(target, fingerprint.named(metadata.arrays, write.rows))
                    if record.bytes < size and not self._config.checkpoint_storage_compression:
                        # Orbax does not notice when the directory is removed under it.
                        raise SaveError(f"{target} has {record.bytes} bytes, and the arrays alone are {size}")
                    digested_at = written_at + self._clock() - merged_at
                    warnings = self._make_way(metadata.step, target)
                    if abandoned.is_set():
                        raise SaveError("given up")
                    storage.commit(target, layout.step_path(self._directory, metadata.step))

            self._together(f"save/{attempt}/committed", commit, abandoned)
        except Exception as error:
            if self._peers.primary:
                self._reclaim(target if abandoned.is_set() else None, error)
            raise
        committed_at = self._clock()
        if self._peers.primary and not abandoned.is_set():
            warnings += self._delete_old(metadata)
        return Committed(
            committed_at,
            write_seconds=written_at - write.began,
            digest_seconds=digested_at - written_at,
            commit_seconds=committed_at - digested_at,
            warnings=warnings,
        )

    def _together(self, topic: str, part: Callable[[], None], abandoned: threading.Event) -> None:
        """Does this process's part; raises if any process could not do its own."""
        failed: Exception | None = None
        try:
            part()
        except Exception as error:  # of all kinds
            failed = error
        try:
            self._peers.exchange(
                topic,
                error="" if failed is None else in_words(failed),
                timeout_seconds=self._config.checkpoint_timeout_seconds,
                abandoned=abandoned,
            )
        except PeerError:
            if failed is not None:
                raise failed from None
            raise

    def _make_way(self, step: int, target: epath.Path) -> list[str]:
        """Sets aside what has the name of the step that is to be committed; in words, if there was anything."""
        path = layout.step_path(self._directory, step)
        if target == path or not path.exists():
            return []
        return [f"{path} is in the way of a save and was renamed to {storage.set_aside(path)}"]

    def _reclaim(self, only: epath.Path | None, error: Exception) -> None:
        """Removes what failed saves left; `only` one, if it was given up and may end while the next is written."""
        try:
            for path in storage.leftovers(self._directory) if only is None else [only]:
                path.rmtree(missing_ok=True)
        except OSError as second:  # the failure itself is what matters; the next start cleans up
            error.add_note(f"its leftovers could not be removed: {in_words(second)}")

    def _delete_old(self, newest: layout.StepMetadata) -> list[str]:
        """Deletes the steps that are not to be kept; returns what could not be done, in words."""
        self._kept[newest.step] = KeptStep(newest.step, newest.created, newest.metrics, verified=False)
        try:
            steps = layout.steps(self._directory)[0]
            self._kept = {step: self._kept.get(step) or self._look_at(step) for step in steps}
            old = self._preservation.to_delete(list(self._kept.values()))
        except Exception as error:  # storage libraries raise all kinds
            return [f"{self._directory} could not be listed, so no old checkpoint was deleted: {in_words(error)}"]
        warnings = []
        for step in old:
            try:
                storage.delete_step(layout.step_path(self._directory, step))
                del self._kept[step]
            except Exception as error:
                warnings.append(f"checkpoint {step} could not be deleted: {in_words(error)}")
        return warnings

    def _look_at(self, step: int) -> KeptStep:
        path = layout.step_path(self._directory, step)
        try:
            metadata = layout.read_metadata(path)
        except (ValueError, InputError):  # damaged or too new: no time and no metrics to keep it by
            return KeptStep(step, path.stat().mtime, {}, verified=False)
        return KeptStep(step, metadata.created, metadata.metrics, verified=False)


class _Write(NamedTuple):
    """What one process does of a save: its writer, or why there is none."""

    writer: orbax_io.Writer | None
    error: Exception | None
    rows: jax.Array  # the fingerprints being computed
    began: float

    def finish(self) -> None:
        """Blocks until this process's part is on storage and the fingerprints are computed."""
        if self.error is not None:
            raise self.error
        assert self.writer is not None
        self.writer.finish()
        np.asarray(self.rows)

    def merge(self, state: epath.Path) -> None:
        assert self.writer is not None
        self.writer.merge(state)
