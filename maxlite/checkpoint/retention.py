"""Deletes the steps of a run that no rule keeps; what the rules are is in `keep.py`."""

from __future__ import annotations

import threading

from etils import epath

from maxlite.checkpoint import layout, storage
from maxlite.checkpoint.errors import in_words
from maxlite.checkpoint.keep import KeptStep, Preservation
from maxlite.config import CheckpointConfig, InputError


class Retention:
    """What is known of the steps in one directory. For the primary process; from any thread."""

    def __init__(self, directory: epath.Path, config: CheckpointConfig) -> None:
        self._directory = directory
        self._preservation = Preservation(config)
        self._known: dict[int, KeptStep] = {}
        self._lock = threading.Lock()

    def committed(self, newest: layout.StepMetadata) -> None:
        """A step was committed."""
        with self._lock:
            self._known[newest.step] = KeptStep(newest.step, newest.created, newest.metrics, verified=False)

    def verified(self, step: int) -> None:
        """The arrays of a step on storage are known to be what was saved: it stays until a newer one is verified."""
        there = self._look_at(step)
        with self._lock:
            self._known[step] = self._known.get(step, there)._replace(verified=True)

    def delete_old(self) -> list[str]:
        """Deletes the steps that are not to be kept; returns what could not be done, in words."""
        try:
            steps = layout.steps(self._directory)[0]
            new = {step: self._look_at(step) for step in steps if step not in self._known}
            with self._lock:
                self._known = new | self._known
                old = self._preservation.to_delete([self._known[step] for step in steps])
        except Exception as error:  # storage libraries raise all kinds, and so may a person's own policy
            return [f"no old checkpoint in {self._directory} was deleted: {in_words(error)}"]
        warnings = []
        for step in old:
            try:
                storage.delete_step(layout.step_path(self._directory, step))
                with self._lock:
                    del self._known[step]
            except Exception as error:
                warnings.append(f"checkpoint {step} could not be deleted: {in_words(error)}")
        return warnings

    def _look_at(self, step: int) -> KeptStep:
        try:
            metadata = layout.read_metadata(layout.step_path(self._directory, step))
        except (ValueError, InputError, FileNotFoundError):  # damaged or too new: nothing to keep it by
            return KeptStep(step, 0.0, {}, verified=False)
        return KeptStep(step, metadata.created, metadata.metrics, verified=False)
