"""Hashes of files, so that tokenised text is used only for the very bytes it was made from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

# Up to this size a file is read and hashed at every start: under a second, and nothing to be wrong about.
ALWAYS_HASHED_BYTES = 256 * 2**20
# A file changed less than this before it was hashed may change again within the same tick of the file system's
# clock (or while a server's clock differs from ours), so its hash is not remembered.
SETTLED_SECONDS = 60.0
_BLOCK = 2**20


def file_state(path: Path) -> list[int]:
    """Size, times and identity of a file; any write to it changes them, save within one clock tick."""
    stat = path.stat()
    # ctime too: tools that copy or unpack set mtime as they like, but nothing sets ctime.
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def content_hash(path: Path, memory: Path) -> str:
    """SHA-256 of a file's bytes.

    Of a file over ALWAYS_HASHED_BYTES the hash is remembered in the directory `memory` and used again while the
    file's state is the same, as hashing 100 GB at every start would take minutes.
    """
    state = file_state(path)
    if state[0] <= ALWAYS_HASHED_BYTES:
        return _hash(path)
    note = memory / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(note.read_bytes())
        if known["state"] == state:
            return str(known["sha256"])
    started = time.time()
    sha256 = _hash(path)
    settled = max(state[1], state[2]) / 1e9 < started - SETTLED_SECONDS
    if settled and file_state(path) == state:
        with contextlib.suppress(OSError):  # it only saves time
            memory.mkdir(parents=True, exist_ok=True)
            temporary = note.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps({"path": str(path), "state": state, "sha256": sha256}))
            temporary.replace(note)
    return sha256


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sampled_hash(path: Path) -> str:
    """SHA-256 of a file's size and of 256 MiB spread over it: all of it, where it is no longer than that.

    Finds a file cut short or damaged at large without reading all of 100 GB at every start.
    """
    size = path.stat().st_size
    blocks = -(-size // _BLOCK)
    most = ALWAYS_HASHED_BYTES // _BLOCK
    picked = range(blocks) if blocks <= most else sorted({i * (blocks - 1) // (most - 1) for i in range(most)})
    sha256 = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for block in picked:
            file.seek(block * _BLOCK)
            sha256.update(file.read(_BLOCK))
    return sha256.hexdigest()
