"""The integrity record of a step: what its files must be, and the fingerprint of every array.

`integrity.json` is written last into the directory of a save, before the commit. It lists every file with its size
and, but for the large files of arrays, its digest; and every array with the fingerprint that its devices computed
before the save. So no large file has to be read back at a save: what it holds is proved by the arrays. The record
carries a digest of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from maxlite.checkpoint import fingerprint, layout
from maxlite.checkpoint.errors import Damage

SMALL_BYTES = 64 << 10  # a file of arrays up to this size has a digest, as all others have
SHOWN_PROBLEMS = 3


class FileEntry(NamedTuple):
    """A file of the step: its size, and its SHA-256 unless it is a large one that holds arrays."""

    bytes: int
    sha256: str | None


class Record(NamedTuple):
    """What a step must hold: files by path relative to the step, arrays by name."""

    files: dict[str, FileEntry]
    arrays: dict[str, fingerprint.Fingerprint]

    @property
    def bytes(self) -> int:
        """Size of the step on storage, the record itself left out."""
        return sum(entry.bytes for entry in self.files.values())


def write(directory: epath.Path, arrays: Mapping[str, fingerprint.Fingerprint]) -> Record:
    """Records what is in the directory of a save, and the arrays' fingerprints. Raises OSError."""
    record = Record(
        {
            name: FileEntry(size, None if _is_large(name, size) else _sha256(directory / name))
            for name, size in _files(directory).items()
        },
        dict(arrays),
    )
    content = {
        "algorithm": fingerprint.ALGORITHM,
        "files": {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in record.files.items()},
        "arrays": {name: list(sums) for name, sums in record.arrays.items()},
    }
    (directory / layout.RECORD_FILE).write_text(json.dumps({**content, "sha256": _digest(content)}, indent=1))
    return record


def read(step_dir: epath.Path) -> Record:
    """The record of a step. Raises Damage if it is missing or damaged, OSError if storage does not tell."""
    try:
        content = json.loads((step_dir / layout.RECORD_FILE).read_text())
        digest = content.pop("sha256")
        if digest != _digest(content) or content["algorithm"] != fingerprint.ALGORITHM:
            raise Damage(f"its integrity record {layout.RECORD_FILE} is damaged")
        files = {name: FileEntry(entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()}
        return Record(files, {name: (sums[0], sums[1]) for name, sums in content["arrays"].items()})
    except (FileNotFoundError, NotADirectoryError):
        raise Damage(f"it has no integrity record, {layout.RECORD_FILE}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, Damage):
            raise
        raise Damage(f"its integrity record {layout.RECORD_FILE} is damaged") from error


def require_files(step_dir: epath.Path, record: Record, only: str | None = None) -> None:
    """Raises Damage if a file is missing, has another size, or differs from its digest. Reads no large file.

    `only`: this file alone is looked at.
    """
    problems = []
    for name, entry in record.files.items():
        if only not in (None, name):
            continue
        path = step_dir / name
        try:
            size = path.stat().length
        except (FileNotFoundError, NotADirectoryError):
            problems.append(f"{name} is missing")
            continue
        if size != entry.bytes:
            problems.append(f"{name} has {size} bytes instead of {entry.bytes}")
        elif entry.sha256 is not None and _sha256(path) != entry.sha256:
            problems.append(f"{name} differs from what was saved")
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        raise Damage("; ".join(problems[:SHOWN_PROBLEMS]) + (f"; and {more} more files" if more > 0 else ""))


def require_arrays(record: Record, found: Mapping[str, fingerprint.Fingerprint]) -> None:
    """Raises Damage if an array's fingerprint is not the recorded one."""
    wrong = [name for name, sums in found.items() if record.arrays.get(name) != sums]
    if wrong:
        more = f" and {len(wrong) - 1} more arrays" if len(wrong) > 1 else ""
        raise Damage(f"{wrong[0]}{more}: not the values that were saved (fingerprints differ)")


def _files(directory: epath.Path) -> dict[str, int]:
    """Size in bytes of every file below the directory, by relative path with `/`, sorted."""
    sizes: dict[str, int] = {}
    folders = [(directory, "")]
    while folders:
        folder, prefix = folders.pop()
        for path in folder.iterdir():
            if path.is_dir():
                folders.append((path, f"{prefix}{path.name}/"))
            else:
                sizes[prefix + path.name] = path.stat().length
    return dict(sorted(sizes.items()))


def _is_large(name: str, size: int) -> bool:
    return size > SMALL_BYTES and name.startswith(f"{layout.STATE}/")


def _sha256(path: epath.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
