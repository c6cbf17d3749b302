"""What is in a directory of checkpoints, for a person or a script to look at; nothing is changed, no array is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import NamedTuple

from etils import epath

from maxlite.checkpoint import integrity, layout, storage
from maxlite.checkpoint.errors import in_words
from maxlite.config import InputError

_SET_ASIDE = re.compile(r"(0|[1-9]\d*)\.set-aside-\d+")
_THREADS = 8  # directories looked at at once: an object store takes its time for each small file


class State(StrEnum):
    """What a directory is, by its name and its commit marker."""

    COMMITTED = "committed"
    TORN = "torn"  # the name of a step, and no commit marker
    UNFINISHED = "unfinished"  # a save being written, or left by a killed run
    DELETING = "being deleted"  # or left by a killed run
    SET_ASIDE = "set aside"  # damaged or in the way; kept for a person to look at


class Entry(NamedTuple):
    """One directory of a step."""

    step: int
    path: epath.Path
    state: State
    verified: bool  # committed, with its integrity record, and its files are what the record says
    problem: str  # why a committed step is not verified, in words
    bytes: int  # of all its files
    created: float  # seconds since 1970; of a directory that does not say, when it was last changed
    metadata: layout.StepMetadata | None  # of a committed step, if it can be read

    @property
    def parent_step(self) -> int | None:
        """The committed step that the run restored or saved before."""
        return self.metadata.parent_step if self.metadata else None

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the step, as far as known when it was saved."""
        return self.metadata.metrics if self.metadata else {}


def find(path: str) -> tuple[epath.Path, int | None]:
    """The directory of steps, and the step if `path` is one.

    Raises InputError if there is no such directory, OSError if storage does not tell.
    """
    try:
        where = storage.absolute(path)
        exists = where.exists()
    except ImportError as error:  # the file system of a URL is an optional package
        raise InputError(f"{path}: {error}") from error
    except KeyError as error:  # how etils.epath says it
        raise InputError(f"{path}: no such kind of storage; use a local path, gs:// or s3://") from error
    if not exists:
        there = layout.steps(where.parent)[0] if where.name.isdecimal() else []
        has = f"; steps there: {shown(there)}" if there else ""
        raise InputError(f"{path}: no such directory{has}")
    if not where.is_dir():
        raise InputError(f"{path}: a file; name a run directory, its checkpoints/, or one step")
    return layout.locate(where)


def find_step(path: str) -> epath.Path:
    """The step that `path` names, or the newest committed one there. Raises as `find` does."""
    directory, step = find(path)
    if step is None:
        committed = layout.steps(directory)[0]
        if not committed:
            raise nothing_in(path)
        step = committed[0]
    return layout.step_path(directory, step)


def nothing_in(path: str) -> InputError:
    """There is no checkpoint in the directory."""
    return InputError(f"{path}: no checkpoint there; name a run directory, its checkpoints/, or one step")


def shown(steps: list[int], most: int = 10) -> str:
    """The first few steps of a list, and how many more there are."""
    more = f" and {len(steps) - most} more" if len(steps) > most else ""
    return ", ".join(map(str, steps[:most])) + more


def survey(directory: epath.Path) -> list[Entry]:
    """All directories of steps, newest step first; of one step, what is no checkpoint first. Raises OSError.

    What a run that is training deletes or renames meanwhile is left out.
    """
    committed, torn = layout.steps(directory)
    found = [(step, layout.step_path(directory, step), State.COMMITTED) for step in committed]
    # On an object store a save is written under its own name, and lacks the marker until it is committed.
    unmarked = State.TORN if storage.is_local(directory) else State.UNFINISHED
    found += [(step, layout.step_path(directory, step), unmarked) for step in torn]
    for path in layout.leftovers(directory):
        state = State.DELETING if path.name.endswith(layout.DELETING) else State.UNFINISHED
        found.append((int(path.name.split(".")[0]), path, state))
    for path in directory.iterdir():
        if (match := _SET_ASIDE.fullmatch(path.name)) and path.is_dir():
            found.append((int(match[1]), path, State.SET_ASIDE))
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = [entry for entry in pool.map(lambda each: inspect(*each), found) if entry is not None]
    return sorted(entries, key=lambda entry: (-entry.step, entry.state is State.COMMITTED, entry.path.name))


def inspect(step: int, path: epath.Path, state: State) -> Entry | None:
    """Looks at one directory; None if it is gone. Raises OSError if storage does not tell what it is."""
    try:
        if state is State.COMMITTED:
            return _inspect_committed(step, path)
        return Entry(step, path, state, False, "", _size(path), path.stat().mtime, None)
    except FileNotFoundError:
        if path.exists():
            raise
        return None


def _inspect_committed(step: int, path: epath.Path) -> Entry | None:
    metadata, problem, size = None, "", 0
    try:
        record = integrity.read(path)
        size = record.bytes + sum((path / name).stat().length for name in (layout.RECORD_FILE, layout.COMMIT_MARKER))
        integrity.require_files(path, record)
    except (OSError, ValueError) as error:  # an I/O error of one step must not hide the others
        problem = in_words(error)
    try:
        metadata = layout.read_metadata(path)
        if metadata.step != step:
            problem = problem or f"it is a copy of step {metadata.step} under another name"
    except (OSError, ValueError, InputError) as error:
        problem = problem or (str(error) if isinstance(error, InputError) else in_words(error))
    if problem:
        size = _size(path)
    created = metadata.created if metadata else path.stat().mtime
    if problem and not path.exists():
        return None
    return Entry(step, path, State.COMMITTED, not problem, problem, size, created, metadata)


def _size(path: epath.Path) -> int:
    """Bytes of all files below; about, if they are being written or deleted."""
    total, folders = 0, [path]
    while folders:
        try:
            for child in folders.pop().iterdir():
                if child.is_dir():
                    folders.append(child)
                else:
                    total += child.stat().length
        except FileNotFoundError:
            continue
    return total
