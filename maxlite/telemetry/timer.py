"""When steps are over: time is taken when a step's result is ready, not when it was dispatched."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

State = TypeVar("State")
Batch = TypeVar("Batch")


@dataclass(frozen=True)
class FinishedStep:
    """A step whose result is ready."""

    step: int
    metrics: dict[str, float]
    seconds: float  # from its dispatch, or from the end of the step before it if that was later
    ready_at: float  # seconds, by the timer's clock


class StepTimer:
    """Keeps at most one step in flight: the host prepares step N+1 while the device computes step N."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._in_flight: tuple[int, Mapping[str, Any], float] | None = None
        self._last_ready = float("-inf")

    def run(
        self,
        step: int,
        train_step: Callable[[State, Batch], tuple[State, Mapping[str, Any]]],
        state: State,
        batch: Batch,
    ) -> tuple[State, FinishedStep | None]:
        """Dispatches a step, then waits for the one before it; the new state and that finished step."""
        started = self._clock()
        state, metrics = train_step(state, batch)
        before = self.drain()
        self._in_flight = (step, metrics, started)
        return state, before

    def drain(self) -> FinishedStep | None:
        """Waits for the step in flight, if there is one, and returns it."""
        if self._in_flight is None:
            return None
        step, metrics, started = self._in_flight
        self._in_flight = None
        values = {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}
        ready = self._clock()
        seconds = ready - max(started, self._last_ready)
        self._last_ready = ready
        return FinishedStep(step, values, seconds, ready)
