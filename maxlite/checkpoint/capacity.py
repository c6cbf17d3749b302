"""What a run's checkpoints need of their storage: room, and time. No I/O."""

from __future__ import annotations

from maxlite.checkpoint.saving import METADATA_ROOM_BYTES
from maxlite.config import CheckpointConfig


def most_kept(config: CheckpointConfig, steps: int) -> int:
    """The most checkpoints that a run of `steps` steps holds on to at once, by the keys that bound their number.

    (`keep_checkpoint_every_n_seconds` and a person's own policy do not.)
    """
    bounded = not (
        config.enable_continuous_checkpointing or config.checkpoint_period_seconds or config.checkpoint_save_policy
    )
    saves = steps // config.checkpoint_period + 2 if bounded else steps + 1  # the first and the last state too
    every = config.keep_checkpoint_every_n_steps
    kept = config.max_num_checkpoints_to_keep + config.keep_best_n_checkpoints + (steps // every + 1 if every else 0)
    return min(saves, kept)


def room_bytes(config: CheckpointConfig, steps: int, state_bytes: int) -> int:
    """Bytes for the checkpoints kept, and for the one that is written before an old one is deleted."""
    return (most_kept(config, steps) + 1) * (state_bytes + METADATA_ROOM_BYTES)


def most_that_fit(config: CheckpointConfig, steps: int, state_bytes: int, free_bytes: int) -> int:
    """The largest max_num_checkpoints_to_keep for which the room is there; 0: there is none."""
    for count in range(config.max_num_checkpoints_to_keep, 0, -1):
        fewer = config.model_copy(update={"max_num_checkpoints_to_keep": count})
        if room_bytes(fewer, steps, state_bytes) <= free_bytes:
            return count
    return 0
