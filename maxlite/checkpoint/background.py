"""Work beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(name: str, job: Callable[[], T]) -> Future[T]:
    """Runs the job in a thread of its own; a daemon, so that storage that hangs cannot keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
