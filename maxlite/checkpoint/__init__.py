"""Saves that never lose a committed step: when to save, what to keep, whether it is good, what to tell the user."""

from maxlite.checkpoint.checkpointer import Checkpointer
from maxlite.checkpoint.errors import CheckpointError, RestoreError, SaveError
from maxlite.checkpoint.loading import load_arrays
from maxlite.checkpoint.peers import Peers
from maxlite.checkpoint.reading import Restored, check_step, restore_newest
from maxlite.checkpoint.stats import Interval, SaveRecord, SaveStats

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Interval",
    "Peers",
    "RestoreError",
    "Restored",
    "SaveError",
    "SaveRecord",
    "SaveStats",
    "check_step",
    "load_arrays",
    "restore_newest",
]
