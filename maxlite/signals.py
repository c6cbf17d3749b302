"""SIGINT, SIGTERM and SIGHUP: the first asks for a save and an end, the second leaves at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.05
ECHO_SECONDS = 1.0  # the same signal so soon is the same wish: srun passes on what the process got already
PREEMPTED = 5  # the exit status; see maxlite.config.Exit, which may not be loaded yet


class StopRequest:
    """Installs the handlers while entered; `requested` is the name of the signal that came, empty before.

    Before `defer()` there is no state and nothing to save: the process leaves at once. (It does not raise: an
    exception from a handler may surface inside any library's code, and not all of it can stand that.) After it the
    signal is only remembered, and the loop ends itself at the next step.
    """

    def __init__(self) -> None:
        self.requested = ""
        self._requested_at = 0.0
        self._left_running = False
        self._deferred = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        wanted = [number for number in SIGNALS if not self._is_nohup(number)]
        self._previous = {number: signal.signal(number, self._on_signal) for number in wanted}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """From now on signals wait for the code to look at `requested`: there is something to save, or to end well."""
        self._deferred = True

    def finishes(self, job: Callable[[], object], *, wait: bool = False) -> bool:
        """Runs a job that no signal can interrupt; false if a signal came before its end.

        The job then goes on in its thread, and the process ends by `leave`. With `wait`, its end is waited for. Raises
        what the job raises.
        """
        running = ThreadPoolExecutor(1)
        future = running.submit(job)
        while not future.done() and (wait or not self.requested):
            futures.wait([future], timeout=POLL_SECONDS)
        self._left_running = not future.done()
        running.shutdown(wait=False)
        if future.done():
            future.result()
        return future.done()

    def leave(self, status: int) -> int:
        """The exit status; but leaves at once, with it, if a job still runs: the interpreter would wait for it."""
        if self._left_running:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        return status

    def seconds_left(self, grace: float) -> float:
        """What is left of a grace of so many seconds since the signal came; all of it if none came to this process."""
        return grace if not self.requested else max(0.0, grace - (time.monotonic() - self._requested_at))

    @staticmethod
    def _is_nohup(number: signal.Signals) -> bool:
        return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested == name and time.monotonic() - self._requested_at < ECHO_SECONDS:
            return
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._deferred:
            self.requested, self._requested_at = name, time.monotonic()
            _say(f"{name}: saving after this step, then leaving; once more leaves at once")
        else:
            _say(f"{name}: stopped before the first step: nothing to save, nothing lost")
            os._exit(PREEMPTED)


def _say(text: str) -> None:
    # os.write, not print: a handler may run in the middle of another write to the same stream.
    with suppress(OSError):  # the terminal may be what is gone
        os.write(2, f"\n{text}\n".encode())
