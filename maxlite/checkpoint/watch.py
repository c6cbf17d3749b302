"""Notices between two saves that the directory of checkpoints has gone."""

from __future__ import annotations

import threading

from etils import epath

from maxlite.checkpoint import layout

PERIOD_SECONDS = 2.0


class DirectoryWatch:
    """Looks at the newest committed step every few seconds, in a thread: storage that hangs must not hold training."""

    def __init__(self, directory: epath.Path) -> None:
        self._directory = directory
        self._expected: int | None = None
        self._problem: tuple[str, int | None] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def start(self) -> None:
        """Starts to look."""
        threading.Thread(target=self._look, name="checkpoint-watch", daemon=True).start()

    def expect(self, step: int) -> None:
        """From now on this step must be there."""
        with self._lock:
            self._expected, self._problem = step, None

    def problem(self) -> tuple[str, int | None] | None:
        """What is missing, in words, and the newest step that is there; said once."""
        with self._lock:
            said, self._problem = self._problem, None
            return said

    def close(self) -> None:
        """Stops to look."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(PERIOD_SECONDS):
            with self._lock:
                expected = self._expected
            if expected is None:
                continue
            path = layout.step_path(self._directory, expected)
            try:
                if layout.is_committed(path):
                    continue
                left = layout.steps(self._directory)[0]
            except OSError:  # trouble on the way to storage says nothing about what is on it
                continue
            with self._lock:
                if self._expected == expected:
                    self._expected = None
                    self._problem = f"checkpoint {path} has vanished", max(left, default=None)
