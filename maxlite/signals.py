"""SIGINT and SIGTERM: the first asks for a save and an end, the second leaves at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Installs the handlers while entered; `requested` turns true with the first signal.

    Outside `deferred()`, before the first step, there is nothing to save, and a signal raises KeyboardInterrupt.
    Inside, it only sets `requested`, and the loop ends itself at the next step.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
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

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True
        name = signal.Signals(number).name
        if not self._deferred:
            raise KeyboardInterrupt(name)
        # os.write, not print: a handler may run in the middle of another write to the same stream.
        os.write(2, f"\n{name}: saving, then leaving; once more leaves at once\n".encode())
