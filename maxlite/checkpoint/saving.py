"""One save from its start to its commit: the part that runs in the background."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from etils import epath

from maxlite.checkpoint import layout, orbax_io, storage
from maxlite.checkpoint.errors import SaveError, in_words


class Committed(NamedTuple):
    """A save that worked: when it was durable (seconds of the clock), and what to tell the user besides."""

    at: float
    warnings: list[str]


class Pending(NamedTuple):
    """A save being written."""

    step: int
    started: float
    result: concurrent.futures.Future[Committed]
    abandoned: threading.Event  # set: its thread hangs, and must touch nothing when it wakes up


class Saver:
    """Writes steps into one directory, one at a time, and deletes the steps that are no longer kept.

    `keep` is the number of newest good steps to keep. `damaged` steps count for nothing and are left for a
    person to look at.
    """

    def __init__(self, directory: epath.Path, keep: int, timeout_seconds: float, clock: Callable[[], float]) -> None:
        self.damaged: frozenset[int] = frozenset()
        self._directory = directory
        self._keep = keep
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._writer: orbax_io.Writer | None = None
        self._quiet = contextlib.ExitStack()  # from the first writer on

    def start(self, arrays: Mapping[str, jax.Array], metadata: layout.StepMetadata) -> Pending:
        """Starts a save; returns once the arrays may be donated. Raises whatever storage raises, cleaned up."""
        step, started = metadata.step, self._clock()
        try:
            if self._writer is None:
                self._quiet.enter_context(orbax_io.quiet)
                self._writer = orbax_io.Writer(self._timeout_seconds)
            path = layout.step_path(self._directory, step)
            self._writer.start(path, arrays, layout.encode_metadata(metadata))
        except Exception as error:
            self._reclaim(step, error)
            raise
        writer, abandoned = self._writer, threading.Event()
        return Pending(step, started, _in_thread(lambda: self._commit(writer, step, abandoned)), abandoned)

    def make_way(self, step: int) -> str:
        """Sets aside what has the name of a step that is to be saved; what was done in words, or nothing."""
        path = layout.step_path(self._directory, step)
        return f"{path} is in the way of a save and was renamed to {storage.set_aside(path)}" if path.exists() else ""

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

    def _commit(self, writer: orbax_io.Writer, step: int, abandoned: threading.Event) -> Committed:
        """Sees a save through, makes it durable, then deletes what is no longer kept."""
        path = layout.step_path(self._directory, step)
        try:
            writer.finish()
            if not layout.is_committed(path):
                raise SaveError(f"the save ended without an error, but {path} has no commit marker")
            storage.make_durable(path)
        except Exception as error:
            if not abandoned.is_set():
                self._reclaim(step, error)
            raise
        committed_at = self._clock()
        return Committed(committed_at, [] if abandoned.is_set() else self._delete_old(step))

    def _reclaim(self, step: int, error: Exception) -> None:
        """Removes what a failed save left."""
        try:
            for path in layout.leftovers_of(self._directory, step):
                path.rmtree()
        except OSError as second:  # the failure itself is what matters; the next start cleans up
            error.add_note(f"its leftovers could not be removed: {in_words(second)}")

    def _delete_old(self, newest: int) -> list[str]:
        """Deletes all but the newest good steps; returns what could not be done, in words."""
        damaged = self.damaged - {newest}
        try:
            good = [step for step in layout.steps(self._directory)[0] if step not in damaged]
        except Exception as error:  # storage libraries raise all kinds
            return [f"{self._directory} could not be listed, so no old checkpoint was deleted: {in_words(error)}"]
        warnings = []
        for step in reversed(good[self._keep :]):
            if step != newest:
                try:
                    storage.delete_step(layout.step_path(self._directory, step))
                except Exception as error:
                    warnings.append(f"checkpoint {step} could not be deleted: {in_words(error)}")
        return warnings


def _in_thread(job: Callable[[], Committed]) -> concurrent.futures.Future[Committed]:
    """Runs the job in a thread of its own; a daemon, so that storage that hangs cannot keep the process alive."""
    future: concurrent.futures.Future[Committed] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint-commit", daemon=True).start()
    return future
