"""When to save: pure decisions from the step, the clock and what became of earlier saves. No I/O."""

from __future__ import annotations

import math

from maxlite.config import CheckpointConfig

LONGEST_RETRY_SECONDS = 60.0


class SavePolicy:
    """Decides at every step whether a save starts now.

    Continuous: as soon as no save is being written and the minimum interval has passed since the last one
    started. Fixed: at multiples of `checkpoint_period`; one that comes due while another save is being
    written never blocks training, it starts at the first step after that save has ended. Either way a
    failed save is owed, and is retried with a delay that doubles from 1 second to a minute (even within
    the minimum interval: work is at risk).
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._owed = False
        self._last_start: float | None = None
        self._failures = 0
        self._retry_at = -math.inf

    def due(self, step: int, now: float, *, saving: bool) -> bool:
        """Whether the state after `step` updates should be saved now (`now` in seconds)."""
        config = self._config
        if step == 0:
            self._owed = self._owed or config.save_checkpoint_on_start
        elif config.enable_continuous_checkpointing:
            interval = config.continuous_checkpointing_minimum_interval_secs
            self._owed = self._owed or self._last_start is None or now - self._last_start >= interval
        elif step % config.checkpoint_period == 0:
            self._owed = True
        return self._owed and not saving and now >= self._retry_at

    def started(self, now: float) -> None:
        """A save started, or a run resumed from one, at `now`."""
        self._owed = False
        self._last_start = now

    def committed(self) -> None:
        """The save that was being written is on storage."""
        self._failures = 0
        self._retry_at = -math.inf

    def failed(self, now: float) -> float:
        """The save that was being written failed; returns the seconds until it is retried."""
        delay = min(2.0**self._failures, LONGEST_RETRY_SECONDS)
        self._failures = min(self._failures + 1, 10)
        self._owed = True
        self._retry_at = now + delay
        return delay
