"""What to keep: which checkpoints may be deleted, as a pure function of those that are there. No I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from maxlite.checkpoint.custom import KeptStep, ask_steps_to_keep, load_preservation_policy
from maxlite.config import CheckpointConfig

__all__ = ["KeptStep", "Preservation"]


class Preservation:
    """Keeps whatever at least one rule keeps.

    - the newest `max_num_checkpoints_to_keep`;
    - steps that `keep_checkpoint_every_n_steps` divides;
    - of every `keep_checkpoint_every_n_seconds` the first: the oldest checkpoint, then each that was created
      at least so many seconds after the one before it that this rule keeps;
    - the `keep_best_n_checkpoints` with the lowest `keep_best_metric`. Of equals the older ones, so that a step
      once among the best leaves only for a better one; a metric that is missing or not finite is never among them;
    - what `checkpoint_preservation_policy` keeps;
    - the newest step, and the newest that is known to be good.

    No rule remembers anything: each keeps the same steps whether or not what it does not keep has been deleted, so
    steps kept for good stay so over restarts too. InputError if the person's own policy cannot be loaded.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        path = config.checkpoint_preservation_policy
        self._custom = None if path is None else load_preservation_policy(path)

    def to_delete(self, steps: Sequence[KeptStep]) -> list[int]:
        """The steps that no rule keeps, oldest first, of all those on storage, in any order.

        Raises InputError if the person's own policy fails.
        """
        steps = tuple(sorted(steps, key=lambda kept: kept.step))
        keep = {*self._newest(steps), *self._every_n_steps(steps), *self._every_n_seconds(steps), *self._best(steps)}
        if self._custom is not None:
            keep.update(ask_steps_to_keep(self._custom, steps))
        return [kept.step for kept in steps if kept.step not in keep]

    def _newest(self, steps: Sequence[KeptStep]) -> Collection[int]:
        verified = [kept.step for kept in steps if kept.verified]
        return [kept.step for kept in steps[-self._config.max_num_checkpoints_to_keep :]] + verified[-1:]

    def _every_n_steps(self, steps: Sequence[KeptStep]) -> Collection[int]:
        every = self._config.keep_checkpoint_every_n_steps
        return [kept.step for kept in steps if every and kept.step % every == 0]

    def _every_n_seconds(self, steps: Sequence[KeptStep]) -> Collection[int]:
        every = self._config.keep_checkpoint_every_n_seconds
        kept_ones: list[KeptStep] = []
        if every:
            for kept in steps:
                # In the order of steps, and by the absolute difference: a clock that was set back changes nothing
                # about what is kept already, and does not stop the rule until it has caught up.
                if not kept_ones or abs(kept.created - kept_ones[-1].created) >= every:
                    kept_ones.append(kept)
        return [kept.step for kept in kept_ones]

    def _best(self, steps: Sequence[KeptStep]) -> Collection[int]:
        metric = self._config.keep_best_metric
        ranked = sorted(
            (kept.metrics[metric], kept.step) for kept in steps if math.isfinite(kept.metrics.get(metric, math.nan))
        )
        return [step for _, step in ranked[: self._config.keep_best_n_checkpoints]]
