"""Trains with several processes on this machine: `python -m maxlite.launch --processes N config.yml key=value ...`.

When one dies the others are stopped, and the run is started again from its last commit. Not a cluster manager: for
several machines, see `scripts/`.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Self

from maxlite.children import Child, Children
from maxlite.config import Config, Exit, InputError, RunDirectory, read_command, report_input_error

USAGE = """usage: python -m maxlite.launch --processes N [--devices-per-process M] [--max-restarts R]
           [config.yml] [key=value ...] [--print_config] [--help]
  --processes N           processes of the run, on this machine
  --devices-per-process M simulated devices of each on CPUs; on GPUs so many of its own (default: 1; with one
                          process: all)
  --max-restarts R        start it again so often at most, when a process died (default: as long as steps are gained)
exit status: the run's; 128 + the signal that killed a process of it"""
HUNG = 6  # a watchdog's exit status
FINAL = {
    Exit.BAD_INPUT: "bad config or input",
    Exit.DIVERGED: "not finite",
    Exit.PREEMPTED: "stopped by a signal after a clean save",
}
OTHERS = {
    1: "an error",
    Exit.SAVE_FAILED: "a state could not be saved or restored, or another process was lost",
    HUNG: "hung",
}
TICK_SECONDS = 0.05
STOP_SECONDS = 10.0  # for the others to leave after one died, and for all beyond preemption_grace_seconds
LONGEST_PAUSE = 60.0  # between an end and the next start
COMMIT_MARKER = "commit_success.txt"  # maxlite.checkpoint.layout's, which would load jax


class Ended(NamedTuple):
    """How an attempt ended: the process that ended first with another status than 0, if any did, and its status."""

    index: int
    status: int

    def words(self) -> str:
        if self.status < 0:
            return f"process {self.index} was killed by {signal.Signals(-self.status).name}"
        known = {**FINAL, **OTHERS}.get(self.status)
        return f"process {self.index} ended with exit status {self.status}" + (f" ({known})" if known else "")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see python -m maxlite.launch --help)")


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in ("--processes", "--devices-per-process", "--max-restarts"):
        parser.add_argument(name, type=_count)
    try:
        options, rest = parser.parse_known_args(arguments)
        config = read_command(Config, rest, USAGE).config
        if not options.processes or options.devices_per_process == 0:
            raise InputError("--processes and --devices-per-process: expected 1 or more")
        if config.parallel.coordinator_address is not None:
            raise InputError("coordinator_address, num_processes and process_id are the launcher's to give; omit them")
    except InputError as error:
        report_input_error(error)
        return Exit.BAD_INPUT
    given = [f"--{name.replace('_', '-')} {value}" for name, value in vars(options).items() if value is not None]
    typed = " ".join(["python -m maxlite.launch", *given])  # the run shows it as the way to resume
    devices = options.devices_per_process or (1 if options.processes > 1 else None)
    run = RunDirectory(config, primary=False).path
    with _Signals() as signals:

        def attempt() -> Ended:
            with _reserved_port() as port:
                places = [(index, options.processes, port) for index in range(options.processes)]
                command = [sys.executable, "-m", "maxlite.train", *rest]
                environs = [environment(*place, devices) | {"MAXLITE_STARTED_AS": typed} for place in places]
                with Children([Child(command, environ) for environ in environs]) as children:
                    say(f"{options.processes} processes with pids {', '.join(map(str, children.pids))}")
                    return attend(children, signals.received, config.checkpoint.preemption_grace_seconds)

        return supervise(
            attempt, lambda: newest_step(run / "checkpoints"), signals.received, options.max_restarts, _pause
        )


def supervise(
    attempt: Callable[[], Ended],
    newest: Callable[[], int | None],
    received: Sequence[int],
    max_restarts: int | None,
    pause: Callable[[float, Sequence[int]], None],
) -> int:
    """Attempts the run until it is done, or there is no use in going on; returns its exit status.

    Args:
        attempt: runs all processes to their end.
        newest: the newest committed step.
        received: signals to end that came so far.
        max_restarts: None for no limit.
        pause: waits for so many seconds, or until a signal comes.
    """
    restarts = 0
    while True:
        before = newest()
        ended = attempt()
        status = ended.status if ended.status >= 0 else 128 - ended.status
        if status == Exit.DONE:
            return status
        step = newest()
        gained = step is not None and (before is None or step > before)
        where = "no step is committed" if step is None else f"step {step} is committed"
        seconds = min(2.0 ** min(restarts, 10), LONGEST_PAUSE)  # bounded first: a power over 1023 is no float
        if received:
            why = f"{signal.Signals(received[0]).name} was passed on"
        elif ended.status in FINAL:
            why = ""
        elif restarts and not gained:
            why = f"no step was gained since restart {restarts}, giving up"
        elif max_restarts is not None and restarts >= max_restarts:
            why = f"--max-restarts {max_restarts} reached, giving up"
        else:
            restarts += 1
            say(f"{ended.words()}; {where}; restart {restarts} in {seconds:g} s")
            pause(seconds, received)
            if not received:
                continue
            why = f"{signal.Signals(received[0]).name} came, so there is no restart"
        say("; ".join(part for part in (ended.words(), where, why) if part))
        return status


def attend(
    children: Children, received: Sequence[int], grace: float, clock: Callable[[], float] = time.monotonic
) -> Ended:
    """Until all have ended: passes output and signals on, and stops the rest when one has failed.

    Args:
        children: the processes.
        received: signals to end that came so far; grows meanwhile.
        grace: seconds in which a process has saved and left after a signal.
        clock: seconds.
    """
    first: Ended | None = None
    passed_on = 0
    deadline = float("inf")
    while True:
        statuses = children.statuses()
        running = None in statuses
        failed = {index: status for index, status in enumerate(statuses) if status}
        if failed and first is None:
            # Of several that ended at once, one that says that it lost another is not the cause.
            first = Ended(*min(failed.items(), key=lambda item: item[1] == Exit.SAVE_FAILED))
            if first.status == Exit.PREEMPTED or passed_on:
                # They agreed to leave at one step. A signal more would make them leave at once.
                deadline = min(deadline, clock() + grace + STOP_SECONDS)
            else:
                deadline = clock() + STOP_SECONDS
                children.send(signal.SIGTERM)
        if not running:
            return first or Ended(0, Exit.DONE)
        while len(received) > passed_on:
            children.send(received[passed_on])
            passed_on += 1
            deadline = min(deadline, clock() + (grace if passed_on == 1 else 0.0) + STOP_SECONDS)
        if clock() > deadline:
            late = [index for index, status in enumerate(statuses) if status is None]
            say(f"process {', '.join(map(str, late))} did not leave in time and is killed")
            children.kill()
            deadline = float("inf")
        children.pump(TICK_SECONDS)


def environment(index: int, count: int, port: int, devices: int | None) -> dict[str, str]:
    """The environment of one of `count` processes. `devices`: how many it has, CPUs simulated; None: what is there."""
    environ = os.environ | {"PYTHONUNBUFFERED": "1"}
    if count > 1:
        environ |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(index),
        }
    if devices is not None:
        # The first means something on CPUs only, the second, which jax reads where there are several, on GPUs.
        flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", environ.get("XLA_FLAGS", ""))
        own = ",".join(str(device) for device in range(index * devices, (index + 1) * devices))
        environ |= {
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip(),
            "JAX_LOCAL_DEVICE_IDS": own,
        }
    return environ


def newest_step(checkpoints: Path) -> int | None:
    """The newest committed step, as far as names tell; None: there is none."""
    try:
        names = [path.name for path in checkpoints.iterdir() if (path / COMMIT_MARKER).exists()]
    except FileNotFoundError:
        return None
    return max((int(name) for name in names if re.fullmatch(r"\d+", name)), default=None)


def say(line: str) -> None:
    """On standard error, where it does not mix with what the run prints for other programs."""
    print(f"launch: {line}", file=sys.stderr, flush=True)


@contextmanager
def _reserved_port() -> Generator[int]:
    """A port on which process 0 can listen, and which no other program is given meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as process 0 does: bound, it can listen there
        holder.bind(("", 0))
        yield holder.getsockname()[1]


class _Signals:
    """Collects the signals to end while entered: `received` is those that came."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


def _pause(seconds: float, received: Sequence[int]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not received:
        time.sleep(TICK_SECONDS)


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
