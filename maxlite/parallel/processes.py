"""The processes of a run: how they meet, and how each leaves when it leaves alone."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import jax
from jax.experimental.multihost_utils import broadcast_one_to_all

from maxlite.config import Exit, InputError, ParallelConfig

RETRY_SECONDS = 0.2
# How the transports of collectives (Gloo on CPUs, NCCL on GPUs) and jax's coordination service name themselves.
TRANSPORTS = ("gloo", "nccl", "coordination service", "coordination_service", "coordinationservice")


class ProcessLost(Exception):
    """Another process of the run died or left, so this one cannot go on."""


class Processes:
    """Context manager around everything a process computes; enter it before any other use of jax.

    index, count: which of how many processes this is.
    primary: whether it is the one that writes for all: the run directory, metrics, standard output.

    An error that passes through ends the process here, if there are several: jax's own end, at interpreter exit too,
    waits for the other processes, while they wait in a collective for this one. `report` is given the error (a
    `ProcessLost` where it means that) and the name of this process, says it, and returns the exit status.
    """

    def __init__(self, config: ParallelConfig, report: Callable[[BaseException, str], int]) -> None:
        self._config = config
        self._report = report
        self.index = config.process_id
        self.count = config.num_processes
        self.primary = self.index == 0
        self._name = f"process {self.index}: "

    def __enter__(self) -> Self:
        """Waits for all processes.

        Raises:
            InputError: process 0 cannot be reached in time, or, in process 0, its port is taken. (If it can be reached
                and another process does not come, jax aborts; the process then leaves with the same status and words
                that say so.)
        """
        if self.count == 1:
            return self
        config, address = self._config, self._config.coordinator_address
        deadline = time.monotonic() + config.jax_distributed_initialization_timeout
        within = f"within jax_distributed_initialization_timeout={config.jax_distributed_initialization_timeout} s"
        if self.primary:
            self._require_port()
        else:
            self._await_coordinator(deadline, within)
        # A signal is the run's to answer (maxlite.signals); jax's preemption service would take SIGTERM from it.
        jax.config.update("jax_enable_preemption_service", False)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        on_abort = _OnAbort(
            f"{self._name}error: coordinator_address={address}: not all of num_processes={self.count} processes came "
            f"{within}; start each with the same command and its own process_id",
            Exit.BAD_INPUT,
        )
        jax.distributed.initialize(
            address,
            self.count,
            self.index,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, round(deadline - time.monotonic())),
            heartbeat_timeout_seconds=config.jax_distributed_heartbeat_timeout_seconds,
        )
        on_abort.say(f"{self._name}error: {self._lost()}", Exit.SAVE_FAILED)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.count == 1:
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

    def _address(self) -> tuple[str, int]:
        assert self._config.coordinator_address is not None, "several processes have one; see ParallelConfig"
        host, _, port = self._config.coordinator_address.rpartition(":")
        return host.strip("[]"), int(port)

    def _require_port(self) -> None:
        """Refuses a port that is taken, with which jax crashes."""
        try:
            socket.create_server(("", self._address()[1])).close()
        except OSError as error:
            raise InputError(
                f"coordinator_address={self._config.coordinator_address}: process 0 cannot listen there "
                f"({error.strerror}); is another run using the port?"
            ) from error

    def _await_coordinator(self, deadline: float, within: str) -> None:
        """Waits until process 0 listens. (jax waits too, but aborts the process when the time is over.)"""
        address = self._config.coordinator_address
        while True:
            left = deadline - time.monotonic()
            try:
                socket.create_connection(self._address(), timeout=max(left, RETRY_SECONDS)).close()
                return
            except OSError as error:
                if left < RETRY_SECONDS:
                    raise InputError(
                        f"coordinator_address={address}: process 0 was not reached {within} ({error}); is it started, "
                        "and is this its address?"
                    ) from error
            time.sleep(RETRY_SECONDS)

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
