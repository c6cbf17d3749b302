"""The processes of a run: how they meet, and how each leaves when it leaves alone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import jax
from jax.experimental.multihost_utils import broadcast_one_to_all

from maxlite.config import Exit, InputError, ParallelConfig
from maxlite.parallel.cluster import find_place
from maxlite.parallel.meeting import meet

# How the transports of collectives (Gloo on CPUs, NCCL on GPUs) and jax's coordination service name themselves.
TRANSPORTS = ("gloo", "nccl", "coordination service", "coordination_service", "coordinationservice")


class ProcessLost(Exception):
    """Another process of the run died or left, so this one cannot go on."""


class Processes:
    """Context manager around everything a process computes; enter it before any other use of jax.

    index, count: which of how many processes this is: by the config's keys, or as the environment tells (`cluster`).
    primary: whether it is the one that writes for all: the run directory, metrics, standard output.

    An error that passes through ends the process here, if there are several: jax's own end, at interpreter exit too,
    waits for the other processes, while they wait in a collective for this one. `report` is given the error (a
    `ProcessLost` where it means that) and the name of this process, says it, and returns the exit status.
    """

    def __init__(
        self,
        config: ParallelConfig,
        report: Callable[[BaseException, str], int],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Raises InputError if the environment tells of other processes in a way that makes no sense."""
        self._config = config
        self._report = report
        self._place = find_place(config, environ)
        self.count = 1 if self._place is None else self._place.count
        self._be(0 if self._place is None else self._place.index)

    def _be(self, index: int) -> None:
        self.index = index
        self.primary = index == 0
        self._name = f"process {index}: "

    def __enter__(self) -> Self:
        """Waits for all processes.

        Raises:
            InputError: not all came in time; which, it says. Or they do not fit together; see `meeting`.
        """
        place, config = self._place, self._config
        if place is None:
            return self
        meet(place, config.jax_distributed_initialization_timeout, self._say)
        # A signal is the run's to answer (maxlite.signals); jax's preemption service would take SIGTERM from it.
        jax.config.update("jax_enable_preemption_service", False)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        on_abort = _OnAbort(
            f"{self._name}error: {place.address}: all {self.count} processes came, but not all could be connected by "
            f"jax within jax_distributed_initialization_timeout={config.jax_distributed_initialization_timeout} s; "
            "start all again",
            Exit.SAVE_FAILED,
        )
        jax.distributed.initialize(
            place.address,
            place.count,
            place.index,
            place.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=config.jax_distributed_initialization_timeout,
            heartbeat_timeout_seconds=config.jax_distributed_heartbeat_timeout_seconds,
        )
        on_abort.say(f"{self._name}error: {self._lost()}", Exit.SAVE_FAILED)
        try:
            misfit = self._misfit()
        except BaseException as error:  # of this process alone: it has no devices, say
            self.__exit__(type(error), error, error.__traceback__)
            raise
        if misfit:
            jax.distributed.shutdown()  # waits for all, which say the same
            raise InputError(misfit)
        self._be(jax.process_index())  # on TPUs the pod's own order, if that should be another one
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._place is None:
            return
        if error is None:
            jax.distributed.shutdown()  # waits for all
            return
        lost = isinstance(error, (RuntimeError, ValueError)) and any(name in str(error).lower() for name in TRANSPORTS)
        status = self._report(ProcessLost(self._lost()) if lost else error, self._name)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def same(self, value: bool) -> bool:
        """The primary's value, on every process. All must call it; for the start, not for every step."""
        return value if self.count == 1 else bool(broadcast_one_to_all(value))

    def describe(self) -> list[str]:
        """One line where there are several: `2 processes of 4 devices each, met at 10.0.0.1:1234 (Slurm step 7.0)`."""
        if self._place is None:
            return []
        each = jax.local_device_count()
        return [
            f"{self.count} processes of {each} device{'s' if each > 1 else ''} each, met at {self._place.address} "
            f"({self._place.source})"
        ]

    def _misfit(self) -> str:
        """What is wrong with the devices of all processes. All see all, so all come to the same answer."""
        counts = Counter(device.process_index for device in jax.devices())
        if len(counts) != self.count:
            return (
                f"{self.count} processes were started, but the devices belong to {len(counts)}; start one for each "
                "machine, or for each share of a machine's devices"
            )
        numbers = sorted(set(counts.values()))
        if len(numbers) == 1:
            return ""
        having = {number: [index for index in sorted(counts) if counts[index] == number] for number in numbers}
        shown = "; ".join(f"{number} on process {', '.join(map(str, having[number][:10]))}" for number in numbers)
        return f"all processes need the same number of devices, but there are: {shown}"

    def _say(self, line: str) -> None:
        print(f"{self._name}{line}", file=sys.stderr, flush=True)

    def _lost(self) -> str:
        who = f"process {1 - self.index}" if self.count == 2 else f"another of the {self.count} processes"
        return f"{who} died or left, so process {self.index} leaves too; restart all processes with the same command"


class _OnAbort:
    """What the process says, and its exit status, when jax aborts it.

    jax's coordination service answers a dead process, and one that never comes, by abort() from a thread of its own in
    every other process; it takes no callback that works (jax 0.12: std::bad_cast). A handler from `signal` would run
    too late, when abort() has come back to the interpreter; so this one is the C handler itself.
    """

    def __init__(self, words: str, status: int) -> None:
        self.say(words, status)
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._leave)
        _handlers.append(self)  # never freed: an abort may come until the very end
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))

    def say(self, words: str, status: int) -> None:
        """Sets both."""
        self._words, self._status = f"{words}\n".encode(), status

    def _leave(self, number: int) -> None:
        os.write(2, self._words)
        os._exit(self._status)


_handlers: list[_OnAbort] = []
