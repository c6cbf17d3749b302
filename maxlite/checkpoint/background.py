"""Work beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Job(Future[T]):
    """What becomes of a job in a thread of its own.

    The thread is a daemon, so that storage that hangs cannot keep the process alive.
    """

    def __init__(self, name: str, job: Callable[[], T]) -> None:
        super().__init__()
        self._jobs = [job]
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, timeout_seconds: float) -> bool:
        """Blocks until it has ended, for so long at most; whether it has, and its thread is gone."""
        futures.wait([self], timeout=max(0.0, timeout_seconds))
        if self.done():
            self.join()
        return self.done()

    def join(self) -> None:
        """Blocks until the thread is gone. One that still cleans up when the interpreter ends would abort it."""
        self._thread.join()

    def _run(self) -> None:
        try:
            result = self._jobs.pop()()  # what it holds (arrays, Orbax's futures) is freed before anyone is told
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)
