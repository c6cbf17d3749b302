"""When steps are over: time is taken when a step's result is ready, not when it was dispatched."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import jax

State = TypeVar("State")


@dataclass(frozen=True)
class FinishedStep:
    """A step whose result is ready."""

    step: int
    metrics: dict[str, float]
    seconds: float  # from its dispatch, or from the end of the step before it if that was later
    ready_at: float  # seconds, by the timer's clock


class _InFlight(NamedTuple):
    step: int
    metrics: Mapping[str, Any]
    started: float
    ready_at: Future[float]


class StepTimer:
    """Keeps at most one step in flight: the host prepares step N+1 while the device computes step N.

    A thread waits for the result, so that a host that comes late (for data, say) does not make the step longer.
    A context manager.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step-timer")
        self._in_flight: _InFlight | None = None
        self._last_ready = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._watcher.shutdown()

    def run(
        self,
        step: int,
        train_step: Callable[..., tuple[State, Mapping[str, Any]]],
        state: State,
        *inputs: Any,
    ) -> tuple[State, FinishedStep | None]:
        """Dispatches `train_step(state, *inputs)`, then waits for the step before it.

        Returns the new state and that finished step.
        """
        started = self._clock()
        state, metrics = train_step(state, *inputs)
        before = self.drain()
        self._in_flight = _InFlight(step, metrics, started, self._watcher.submit(self._when_ready, metrics))
        return state, before

    def drain(self) -> FinishedStep | None:
        """Waits for the step in flight, if there is one, and returns it."""
        if self._in_flight is None:
            return None
        step, metrics, started, ready_at = self._in_flight
        self._in_flight = None
        ready = ready_at.result()
        seconds = ready - max(started, self._last_ready)
        self._last_ready = ready
        values = {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}
        return FinishedStep(step, values, seconds, ready)

    def _when_ready(self, metrics: Mapping[str, Any]) -> float:
        jax.block_until_ready(dict(metrics))
        return self._clock()
