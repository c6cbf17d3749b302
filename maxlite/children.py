"""Processes on this machine whose output is passed on line by line, and of which none is left behind."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, NamedTuple, Self

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
CHUNK = 65_536


class Child(NamedTuple):
    """What is to be started: the words of its command, and its whole environment."""

    command: Sequence[str]
    environ: Mapping[str, str]


class Children:
    """Context manager that starts the processes and, at the end, kills those that still run.

    Each line that one prints comes out whole, behind `[index] `, on the same stream. On Linux the children die with
    this process, however it dies. They are in process groups of their own, so a Ctrl-C reaches them only through here.

    To be used from the main thread, in a process without others: code runs between fork and exec.
    """

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._processes: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        try:
            for index, child in enumerate(self._children):
                self._start(index, child)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        for process in self._processes:
            process.wait()
        while self._pass_on(0.0):
            pass
        for key in list(self._selector.get_map().values()):  # held open by a process of theirs
            key.data.close()
        self._selector.close()

    @property
    def pids(self) -> list[int]:
        """By index."""
        return [process.pid for process in self._processes]

    def statuses(self) -> list[int | None]:
        """Exit status of each, that of a signal below 0; None: it runs."""
        return [process.poll() for process in self._processes]

    def pump(self, seconds: float) -> None:
        """Passes output on; returns after so long, or sooner."""
        self._pass_on(seconds)

    def send(self, number: int) -> None:
        """Sends a signal to all that run."""
        for process in self._processes:
            process.send_signal(number)

    def kill(self) -> None:
        """Kills all that run, and what they started, also where only that is left."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _start(self, index: int, child: Child) -> None:
        process = subprocess.Popen(
            child.command,
            env=child.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=_die_with_parent(),
        )
        self._processes.append(process)
        for pipe, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert pipe is not None, "asked for"
            os.set_blocking(pipe.fileno(), False)
            lines = _Lines(pipe, target.fileno(), f"[{index}] ".encode())
            self._selector.register(pipe, selectors.EVENT_READ, lines)

    def _pass_on(self, seconds: float) -> bool:
        """Whether there was something."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if not key.data.pass_on():
                self._selector.unregister(key.fileobj)
                key.data.close()
        return bool(ready)


class _Lines:
    """One pipe, whose lines go to the file descriptor `target`."""

    def __init__(self, pipe: IO[bytes], target: int, prefix: bytes) -> None:
        self._pipe, self._target, self._prefix = pipe, target, prefix
        self._rest = b""  # of a line that is not whole yet

    def pass_on(self) -> bool:
        """Passes on what is there; false at the end of the pipe."""
        data = os.read(self._pipe.fileno(), CHUNK)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._write(lines)
        return bool(data)

    def close(self) -> None:
        if self._rest:
            self._write([self._rest])
        self._pipe.close()

    def _write(self, lines: Sequence[bytes]) -> None:
        left = memoryview(b"".join(b"%s%s\n" % (self._prefix, line) for line in lines))
        try:
            while left:
                left = left[os.write(self._target, left) :]
        except OSError:
            # There is nobody left to tell (`| head`), which is no reason to end the run.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._target)
            os.close(nowhere)


def _die_with_parent() -> Callable[[], None] | None:
    """What a child does before its program starts, so that it is killed when this process dies."""
    if sys.platform != "linux":
        return None
    return partial(_ask_to_die, ctypes.CDLL(None).prctl, os.getpid())


def _ask_to_die(prctl: Callable[[int, int], int], parent: int) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)
