"""SIGINT, SIGTERM and SIGHUP: the first asks for a save and an end, the second leaves at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PREEMPTED = 5  # the exit status; see maxlite.config.Exit, which may not be loaded yet


class StopRequest:
    """Installs the handlers while entered; `requested` is the name of the signal that came, empty before.

    Outside `deferred()`, before there is a state, there is nothing to save: the process leaves at once. (It does not
    raise: an exception from a handler may surface inside any library's code, and not all of it can stand that.)
    Inside, the signal is only remembered, and the loop ends itself at the next step.
    """

    def __init__(self) -> None:
        self.requested = ""
        self._deferred = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        wanted = [number for number in SIGNALS if not self._is_nohup(number)]
        self._previous = {number: signal.signal(number, self._on_signal) for number in wanted}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Generator[None]:
        """Signals wait for the code inside to look at `requested`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @staticmethod
    def _is_nohup(number: signal.Signals) -> bool:
        return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._deferred:
            self.requested = name
            _say(f"{name}: saving after this step, then leaving; once more leaves at once")
        else:
            _say(f"{name}: stopped before the first step: nothing to save, nothing lost")
            os._exit(PREEMPTED)


def _say(text: str) -> None:
    # os.write, not print: a handler may run in the middle of another write to the same stream.
    with suppress(OSError):  # the terminal may be what is gone
        os.write(2, f"\n{text}\n".encode())
