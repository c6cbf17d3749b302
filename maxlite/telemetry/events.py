"""`events.jsonl`: what happened to a run besides its steps (saves, failures, changes of config), one object a line."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from maxlite.telemetry.json_lines import encode, whole_lines

BLOCK_BYTES = 64 * 2**10


class EventsFile:
    """Appends to a run's events, from any thread. A context manager.

    Every start of a run adds to the same file, which is the history of the run: nothing in it is cut off, but for a
    line that a killed process left half written. Writing never stops training: that it fails is said once to
    `report`, and each event is tried anew.
    """

    def __init__(
        self, path: Path | None, report: Callable[[str], None] = print, clock: Callable[[], float] = time.time
    ) -> None:
        """Opens `path` (None: nothing is written); `clock` gives seconds since 1970."""
        self._path = path
        self._report = report
        self._clock = clock
        self._lock = threading.Lock()
        self._file: int | None = None
        self._end = 0  # of the last whole line
        self._failed = False
        if path is None:
            return
        try:
            self._file, self._end = _open(path)
        except OSError as error:
            self._say(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def record(self, kind: str, **fields: Any) -> None:
        """Adds one event: its time in seconds since 1970, its kind, and fields that JSON can hold."""
        line = (encode({"time": self._clock(), "event": kind, **fields}) + "\n").encode()
        failure = None
        with self._lock:
            if self._file is not None:
                try:
                    self._append(self._file, line)
                except OSError as error:
                    failure = error
        if failure is not None:
            self._say(failure)

    def close(self) -> None:
        """Closes the file; events that come later (from a thread that hangs, say) are lost. May be called twice."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _append(self, file: int, data: bytes) -> None:
        at = self._end
        try:
            while data:  # a disk that fills up takes a part first, and says so at the next write
                written = os.pwrite(file, data, at)
                data, at = data[written:], at + written
        except OSError:
            os.ftruncate(file, self._end)
            raise
        self._end = at

    def _say(self, error: OSError) -> None:
        with self._lock:
            said, self._failed = self._failed, True
        if not said:
            self._report(f"events.jsonl cannot be written ({error.strerror}); training goes on without it")


def _open(path: Path) -> tuple[int, int]:
    """The file, and where its last whole line ends; what follows that is torn, and is cut off. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        end = os.fstat(file).st_size
        while end:  # from the end, as the file of a long run is long
            start = max(0, end - BLOCK_BYTES)
            newline = os.pread(file, end - start, start).rfind(b"\n")
            end = start + newline + 1
            if newline >= 0:
                break
        os.ftruncate(file, end)
    except OSError:
        os.close(file)
        raise
    return file, end


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every event, oldest first; what a kill or a bad disk left of others is passed over.

    Raises:
        OSError: the file cannot be read.
    """
    return [record for _, record in whole_lines(path.read_bytes()) if "event" in record]
