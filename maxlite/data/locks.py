"""A lock between the processes of one machine, and directories that appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

# A directory of another machine that shares the file system is taken for abandoned after this.
ABANDONED_SECONDS = 7 * 24 * 3600.0


@contextmanager
def exclusive(lock_file: Path, waiting: str = "") -> Generator[None]:
    """Hold a lock file, waiting for it; `waiting` is told to the user if it takes a wait.

    The system frees it when its process ends in any way. On a file system without locks it does nothing: the
    work is then done more than once, and published once.
    """
    with lock_file.open("ab") as file:
        if not _try_lock(file.fileno()):
            print(waiting, file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        return True
    return True


@contextmanager
def published_directory(target: Path) -> Generator[Path]:
    """A temporary directory that becomes `target` at the end of the block, whole; on an error it is removed.

    Hold the lock `target`.lock around it. If another process made `target` meanwhile, the one that is there stays.
    """
    prefix = f"{target.name}.{socket.gethostname()}."
    temporary = Path(tempfile.mkdtemp(suffix=".tmp", prefix=prefix, dir=target.parent))
    try:
        yield temporary
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a directory so that no one sees it half removed."""
    doomed = Path(tempfile.mkdtemp(suffix=".tmp", prefix=f"{path.name}.{socket.gethostname()}.", dir=path.parent))
    path.rename(doomed / path.name)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(parent: Path, held: str) -> None:
    """Remove the temporary directories of builders that died. `held` names the target whose lock we hold."""
    for temporary in parent.glob("*.tmp"):
        name = temporary.name.split(".")[0]
        if not temporary.name.startswith(f"{name}.{socket.gethostname()}."):
            # Locks may not reach other machines, so only age tells.
            if time.time() - _last_change(temporary) > ABANDONED_SECONDS:
                shutil.rmtree(temporary, ignore_errors=True)
        elif name == held:
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with (parent / f"{name}.lock").open("ab") as lock:
                if _try_lock(lock.fileno()):
                    shutil.rmtree(temporary, ignore_errors=True)


def _last_change(directory: Path) -> float:
    try:
        return max(path.stat().st_mtime for path in [directory, *directory.iterdir()])
    except FileNotFoundError:  # its builder is at work
        return time.time()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
