"""What a checkpoint directory looks like, and who counts as a checkpoint.

    <directory>/
      120/                          the state after 120 updates
        commit_success.txt          written last; without it the step does not exist for a reader
        state/                      arrays, as Orbax lays them out
        metadata/metadata.json      step, time, parent step, arrays, and what the run says about itself
        integrity.json              sizes and digests of the files, fingerprints of the arrays
      130.orbax-checkpoint-tmp-4/   a save being written; a leftover if no run is alive
      100.deleting/                 a step being deleted
      110.set-aside-1/              damaged or in the way; kept for a person to look at

Anything else in the directory belongs to someone else and is never touched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from maxlite.checkpoint.tree import ArrayInfo
from maxlite.config import InputError

FORMAT = 2
COMMIT_MARKER = "commit_success.txt"
CHECKPOINTS = "checkpoints"  # in a run directory
STATE = "state"
METADATA_FILE = "metadata/metadata.json"
RECORD_FILE = "integrity.json"
DELETING = ".deleting"
TEMPORARY = ".orbax-checkpoint-tmp"

_LEFTOVER = re.compile(rf"(0|[1-9]\d*)({re.escape(DELETING)}|{re.escape(TEMPORARY)}(-\d+)?)")
_STEP = re.compile(r"0|[1-9]\d*")


class StepMetadata(NamedTuple):
    """What a checkpoint says about itself."""

    step: int
    created: float  # seconds since 1970
    parent_step: int | None  # the committed step that this process restored or saved before
    arrays: dict[str, ArrayInfo]
    metrics: dict[str, float]  # of the step, as far as known when it was saved
    run: dict[str, Any]  # what the trainer recorded: config, versions, data fingerprint, ...


def step_path(directory: epath.Path, step: int) -> epath.Path:
    """Where step `step` is once committed."""
    return directory / str(step)


def temporary_path(directory: epath.Path, step: int, attempt: int) -> epath.Path:
    """Where step `step` is while it is being written; `attempt` counts the saves of this process."""
    return directory / f"{step}{TEMPORARY}-{attempt}"


def locate(path: epath.Path) -> tuple[epath.Path, int | None]:
    """The directory of steps, and the one step meant, from the path of a run, of its checkpoints, or of a step."""
    if _STEP.fullmatch(path.name) and ((path / STATE).exists() or (path / METADATA_FILE).exists()):
        return path.parent, int(path.name)
    if (path / CHECKPOINTS).is_dir():
        return path / CHECKPOINTS, None
    return path, None


def is_committed(path: epath.Path) -> bool:
    """Whether the step directory has its commit marker. Raises OSError if storage does not tell."""
    try:
        (path / COMMIT_MARKER).stat()  # `exists` takes every error for a no
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _names(directory: epath.Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []


def steps(directory: epath.Path) -> tuple[list[int], list[int]]:
    """Lists the directory: (committed steps, steps without a commit marker), newest first. Raises OSError."""
    committed, torn = [], []
    for step in sorted((int(name) for name in _names(directory) if _STEP.fullmatch(name)), reverse=True):
        path = step_path(directory, step)
        if is_committed(path):
            committed.append(step)
        elif path.is_dir():
            torn.append(step)
    return committed, torn


def leftovers(directory: epath.Path) -> list[epath.Path]:
    """Directories that are named as saves being written or steps being deleted."""
    paths = [directory / name for name in sorted(_names(directory)) if _LEFTOVER.fullmatch(name)]
    return [path for path in paths if path.is_dir()]


def write_metadata(path: epath.Path, metadata: StepMetadata) -> None:
    """Writes `metadata.json` into the directory of a save. Raises OSError."""
    arrays = {name: {"shape": list(info.shape), "dtype": info.dtype} for name, info in metadata.arrays.items()}
    file = path / METADATA_FILE
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"format": FORMAT, **metadata._asdict(), "arrays": arrays}))


def read_metadata(path: epath.Path) -> StepMetadata:
    """Reads the metadata of the step directory `path`.

    Raises OSError if it cannot be read, ValueError if it is damaged, InputError if a newer maxlite wrote it.
    """
    file = path / METADATA_FILE
    try:
        raw = json.loads(file.read_text())
        if isinstance(raw["format"], int) and raw["format"] > FORMAT:
            raise InputError(
                f"checkpoint {path} has format {raw['format']}, and this version of maxlite reads format {FORMAT}: "
                "use a newer maxlite, or another run_name"
            )
        return _decode(raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not checkpoint metadata: {error!r}") from error


def _decode(raw: Mapping[str, Any]) -> StepMetadata:
    if raw["format"] != FORMAT:
        raise ValueError(f"there is no checkpoint format {raw['format']!r}")
    arrays = {name: ArrayInfo(tuple(a["shape"]), a["dtype"]) for name, a in raw["arrays"].items()}
    return StepMetadata(
        int(raw["step"]), float(raw["created"]), raw["parent_step"], arrays, dict(raw["metrics"]), dict(raw["run"])
    )
