"""Tries a directory of checkpoints before a run does: whether all processes share it and may write to it."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from maxlite.checkpoint import layout, storage
from maxlite.checkpoint.errors import in_words
from maxlite.checkpoint.peers import Peers
from maxlite.checkpoint.start import unseen

SCRATCH = ".preflight-"  # begins the name of the directory of what is written

# Gives what this process found to all (an `error` in words, if something is wrong), and returns what each did.
Ask = Callable[[str, Mapping[str, Any]], list[Mapping[str, Any]]]


@contextmanager
def scratch_directory(directory: Path, peers: Peers, ask: Ask) -> Generator[tuple[Path, list[Mapping[str, Any]]]]:
    """A directory of its own in `directory`, seen and written by all processes, and what each found while trying.

    At the end it is gone, as are the parents that it was given; so is what a killed one left.
    """
    made, path = [], directory / f"{SCRATCH}{secrets.token_hex(8)}"
    try:
        finding: dict[str, Any] = {}
        if peers.primary:
            made = [parent for parent in (directory, *directory.parents) if not parent.exists()]
            finding = _in_words(lambda: _make(path), f"{directory} cannot be used")
        found = ask("made", finding | {"name": path.name})
        path = directory / found[0]["name"]
        if not _failed(found):
            found = ask("written", _write(path, peers))
        if not _failed(found):
            found = ask("seen", _see(path, peers) if peers.primary else {})
        yield path, found
        ask("left", {})  # what the others have there they remove themselves
    finally:
        if peers.primary and path.exists():
            shutil.rmtree(path)
        for parent in made:
            with suppress(OSError):  # it was not made, or somebody uses it already
                parent.rmdir()


class Room(NamedTuple):
    """Bytes: free on storage (None: without limit), and of the checkpoints that are there."""

    free: int | None
    own: int


def look_for_room(directory: Path) -> Room:
    """The room that a directory of checkpoints has. Raises OSError."""
    steps, _ = layout.steps(epath.Path(directory))
    files = (file for step in steps for file in (directory / str(step)).rglob("*") if file.is_file())
    return Room(storage.free_bytes(epath.Path(directory)), sum(file.stat().st_size for file in files))


def _make(path: Path) -> None:
    storage.make_directory(epath.Path(path.parent))
    for left in path.parent.glob(f"{SCRATCH}*"):
        shutil.rmtree(left)
    path.mkdir()


def _write(path: Path, peers: Peers) -> dict[str, str]:
    if unseen([epath.Path(path)]):
        return {"error": f"{path.parent} is not shared: this process does not see what process 0 wrote there"}
    return _in_words(lambda: (path / f"seen-{peers.index}").touch(), f"{path.parent} cannot be written")


def _see(path: Path, peers: Peers) -> dict[str, str]:
    missing = unseen([epath.Path(path / f"seen-{index}") for index in range(peers.count)])
    if not missing:
        return {}
    indices = ", ".join(file.name.removeprefix("seen-") for file in missing)
    return {"error": f"{path.parent} is not shared: process 0 does not see what process {indices} wrote there"}


def _in_words(job: Callable[[], object], what: str) -> dict[str, str]:
    try:
        job()
    except OSError as error:
        return {"error": f"{what}: {in_words(error)}"}
    return {}


def _failed(found: list[Mapping[str, Any]]) -> bool:
    return any(finding.get("error") for finding in found)
