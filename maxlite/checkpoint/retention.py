"""Deletes the steps of a run that no rule keeps; what the rules are is in `keep.py`."""

from __future__ import annotations

from etils import epath

from maxlite.checkpoint import layout, storage
from maxlite.checkpoint.errors import in_words
from maxlite.checkpoint.keep import KeptStep, Preservation
from maxlite.config import CheckpointConfig, InputError


class Retention:
    """What is known of the steps in one directory. For the primary process."""

    def __init__(self, directory: epath.Path, config: CheckpointConfig) -> None:
        self._directory = directory
        self._preservation = Preservation(config)
        self._known: dict[int, KeptStep] = {}

    def verified(self, step: int) -> None:
        """The arrays of a step on storage are known to be what was saved: it stays until a newer one is verified."""
        self._known[step] = (self._known.get(step) or self._look_at(step))._replace(verified=True)

    def committed(self, newest: layout.StepMetadata) -> list[str]:
        """After a commit: deletes the steps that are not to be kept; returns what could not be done, in words."""
        self._known[newest.step] = KeptStep(newest.step, newest.created, newest.metrics, verified=False)
        try:
            for path in storage.leftovers(self._directory):  # of saves that failed or were given up
                path.rmtree(missing_ok=True)
            steps = layout.steps(self._directory)[0]
            self._known = {step: self._known.get(step) or self._look_at(step) for step in steps}
            old = self._preservation.to_delete(list(self._known.values()))
        except Exception as error:  # storage libraries raise all kinds, and so may a person's own policy
            return [f"no old checkpoint in {self._directory} was deleted: {in_words(error)}"]
        warnings = []
        for step in old:
            try:
                storage.delete_step(layout.step_path(self._directory, step))
                del self._known[step]
            except Exception as error:
                warnings.append(f"checkpoint {step} could not be deleted: {in_words(error)}")
        return warnings

    def _look_at(self, step: int) -> KeptStep:
        path = layout.step_path(self._directory, step)
        try:
            metadata = layout.read_metadata(path)
        except (ValueError, InputError):  # damaged or too new: no time and no metrics to keep it by
            return KeptStep(step, path.stat().mtime, {}, verified=False)
        return KeptStep(step, metadata.created, metadata.metrics, verified=False)
