"""What differs between a local file system and an object store: durability, deletion, renaming.

A local rename is atomic and an object store's is not; an object store is durable once written and a local
file only after fsync. Every such difference is in this file.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from etils import epath

from maxlite.checkpoint import layout
from maxlite.config import InputError


def is_local(path: epath.Path) -> bool:
    """Whether the path is on a file system of this machine (and not `gs://` or its like)."""
    return "://" not in os.fspath(path)


def absolute(path: str | os.PathLike[str]) -> epath.Path:
    """The path with `~` expanded and made absolute; URLs as they are. Raises InputError for a URL nobody can open."""
    result = epath.Path(path)
    if not is_local(result):
        try:
            result.exists()
        except (ImportError, KeyError) as error:  # what reads it is not installed; there is no such scheme
            raise InputError(f"{path} cannot be opened: {error}") from error
    return epath.Path(Path(result).expanduser().absolute()) if is_local(result) else result


def writing_path(directory: epath.Path, step: int, attempt: int) -> epath.Path:
    """Where a save writes: under another name where a rename is atomic, else under its own until it has its marker."""
    local = is_local(directory)
    return layout.temporary_path(directory, step, attempt) if local else layout.step_path(directory, step)


def unfinished(directory: epath.Path) -> list[epath.Path]:
    """Saves that are being written or never were committed. Raises OSError.

    On an object store a step without a marker is one, unless it has its record, which comes last: that is damage.
    """
    found = [path for path in layout.leftovers(directory) if layout.TEMPORARY in path.name]
    if not is_local(directory):
        torn = [layout.step_path(directory, step) for step in layout.steps(directory)[1]]
        found += [path for path in torn if not (path / layout.RECORD_FILE).exists()]
    return found


def leftovers(directory: epath.Path) -> list[epath.Path]:
    """What a killed run left: saves never committed and deletions never finished. Raises OSError."""
    return list(dict.fromkeys([*layout.leftovers(directory), *unfinished(directory)]))


def make_directory(directory: epath.Path) -> None:
    """Makes a directory and its parents, such that they survive a power loss. Raises OSError."""
    missing = []
    if is_local(directory):
        path = Path(directory)
        missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _sync(path.parent)


def free_bytes(directory: epath.Path) -> int | None:
    """Bytes that can still be written; None where there is no limit to know. Raises OSError."""
    return shutil.disk_usage(directory).free if is_local(directory) else None


def sync_files(temporary: epath.Path) -> None:
    """Makes what a save wrote survive a power loss: every file and every directory. Raises OSError.

    Orbax syncs array data only. An object store's objects are durable once they are written.
    """
    if is_local(temporary):
        # Deepest first, so that a directory is synced after its entries.
        for path in [*sorted(Path(temporary).rglob("*"), reverse=True), Path(temporary)]:
            _sync(path)


def commit(temporary: epath.Path, step_dir: epath.Path) -> None:
    """Makes a save whose files are all written and synced a step, at once or not at all, and durable. Raises OSError.

    Locally the directory gets its name; on an object store, where a directory cannot be renamed, it has its name
    already, and the marker makes it a step.
    """
    marker = temporary / layout.COMMIT_MARKER
    marker.write_text("committed")
    if is_local(step_dir):
        _sync(Path(marker))
        _sync(Path(temporary))
        temporary.rename(step_dir)
        _sync(Path(step_dir).parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_step(step_dir: epath.Path) -> None:
    """Deletes a step such that at no moment half of it looks like a checkpoint. Raises OSError."""
    if is_local(step_dir):
        doomed = step_dir.with_name(step_dir.name + layout.DELETING)
        if doomed.exists():
            remove(doomed)
        remove(step_dir.rename(doomed))
    else:
        (step_dir / layout.COMMIT_MARKER).unlink(missing_ok=True)
        step_dir.rmtree()


def remove(path: epath.Path) -> None:
    """Deletes a directory with all that is in it; of a link, which somebody put in its place, the link. OSError."""
    if is_local(path) and Path(path).is_symlink():
        path.unlink()
    else:
        path.rmtree(missing_ok=True)


def set_aside(step_dir: epath.Path) -> epath.Path:
    """Renames a step directory that is in the way and returns its new path; nothing is lost. Raises OSError."""
    count = 1
    while (aside := step_dir.with_name(f"{step_dir.name}.set-aside-{count}")).exists():
        count += 1
    return step_dir.rename(aside)
