"""What differs between a local file system and an object store: durability, deletion, renaming.

A local rename is atomic and an object store's is not; an object store is durable once written and a local
file only after fsync. Every such difference is in this file.
"""

from __future__ import annotations

import os
from pathlib import Path

from etils import epath

from maxlite.checkpoint import layout


def is_local(path: epath.Path) -> bool:
    """Whether the path is on a file system of this machine (and not `gs://` or its like)."""
    return "://" not in os.fspath(path)


def absolute(path: str | os.PathLike[str]) -> epath.Path:
    """The path with `~` expanded and made absolute; URLs as they are."""
    result = epath.Path(path)
    return epath.Path(Path(result).expanduser().absolute()) if is_local(result) else result


def make_durable(step_dir: epath.Path) -> None:
    """Makes a committed step survive a power loss: every file, every directory, and its entry in the parent.

    Orbax syncs array data but neither its metadata, the commit marker nor the rename; syncing again what
    is already on disk costs nothing. Raises OSError.
    """
    if not is_local(step_dir):
        return
    top = Path(step_dir)
    paths = sorted(top.rglob("*"))
    # Deepest first, so that a directory is synced after its entries.
    for path in [*reversed(paths), top, top.parent]:
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
            doomed.rmtree()
        step_dir.rename(doomed).rmtree()
    else:
        (step_dir / layout.COMMIT_MARKER).unlink(missing_ok=True)
        step_dir.rmtree()


def set_aside(step_dir: epath.Path) -> epath.Path:
    """Renames a step directory that is in the way and returns its new path; nothing is lost. Raises OSError."""
    count = 1
    while (aside := step_dir.with_name(f"{step_dir.name}.set-aside-{count}")).exists():
        count += 1
    return step_dir.rename(aside)
