"""How fast a directory takes and gives bytes: files of a bounded size, written, synced, read back, and removed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

STREAMS = 4  # files at once: one stream does not fill a network or a striped file system, and Orbax has several too
CHUNK_BYTES = 8 << 20
CHUNKS_PER_SYNC = 8  # what a slow storage has yet to take stays small, so that stopping does not take long
LONGEST_SECONDS = 60.0  # a storage that needs longer is judged by what it did until then


class Transfer(NamedTuple):
    """What was written or read, and the time that it took."""

    bytes: int
    seconds: float


class ScratchFiles:
    """Context manager of a process's own files in an existing directory; they are gone when it ends, however it does.

    Args:
        directory: where.
        name: begins the names of the files, so that processes do not meet.
        size: of all of them together, in bytes.
        progress: told what is done to them, how many bytes of it are done, and for how many seconds, as it goes.
        clock: gives seconds.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        size: int,
        progress: Callable[[str, int, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = [directory / f"{name}-{stream}" for stream in range(STREAMS)]
        self._sizes = [size // STREAMS + (stream < size % STREAMS) for stream in range(STREAMS)]
        self._pattern = os.urandom(CHUNK_BYTES)  # nothing that storage could compress, or tell from zeros
        self._progress = progress
        self._clock = clock
        self._stop = threading.Event()
        self._done = [0] * STREAMS

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)

    def write(self) -> Transfer:
        """Writes the files until they are on storage. Raises OSError."""
        return self._all("writing", self._write)

    def read(self) -> Transfer:
        """Reads what was written, from storage where the page cache can be emptied (Linux). Raises OSError."""
        return self._all("reading", self._read)

    def _all(self, what: str, job: Callable[[int, float], None]) -> Transfer:
        start = self._clock()
        self._stop.clear()
        self._done = [0] * STREAMS
        with ThreadPoolExecutor(STREAMS) as pool:
            jobs = [pool.submit(job, stream, start) for stream in range(STREAMS)]
            try:
                while wait(jobs, timeout=0.5).not_done:
                    self._progress(what, sum(self._done), self._clock() - start)
            finally:
                self._stop.set()
        for done in jobs:
            done.result()
        return Transfer(sum(self._done), self._clock() - start)

    def _over(self, start: float) -> bool:
        return self._stop.is_set() or self._clock() - start > LONGEST_SECONDS

    def _write(self, stream: int, start: float) -> None:
        try:
            with self._paths[stream].open("xb") as file:
                while self._done[stream] < self._sizes[stream] and not self._over(start):
                    written = 0
                    for _ in range(CHUNKS_PER_SYNC):
                        left = self._sizes[stream] - self._done[stream] - written
                        written += file.write(self._pattern[: min(left, CHUNK_BYTES)])
                    file.flush()
                    os.fsync(file.fileno())
                    self._done[stream] += written
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            self._stop.set()  # there is nothing to measure any more
            raise

    def _read(self, stream: int, start: float) -> None:
        try:
            with self._paths[stream].open("rb", buffering=0) as file:
                while not self._over(start):
                    place = self._done[stream] % CHUNK_BYTES
                    chunk = file.read(CHUNK_BYTES - place)
                    if not chunk:
                        break
                    if chunk != self._pattern[place : place + len(chunk)]:
                        raise OSError(f"{self._paths[stream]} is read back otherwise than it was written")
                    self._done[stream] += len(chunk)
        except OSError:
            self._stop.set()
            raise
