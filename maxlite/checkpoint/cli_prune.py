"""`python -m maxlite.checkpoint prune`."""

from __future__ import annotations

import argparse
import fcntl
import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from etils import epath

from maxlite.checkpoint import layout, storage
from maxlite.checkpoint.cli_text import count, duration, table
from maxlite.checkpoint.cli_verify import problem_of
from maxlite.checkpoint.devices import compute_on_cpu
from maxlite.checkpoint.errors import CheckpointError, in_words
from maxlite.checkpoint.inventory import Entry, State, find, nothing_in, shown, survey
from maxlite.checkpoint.keep import KeptStep, Preservation
from maxlite.checkpoint.stats import in_bytes
from maxlite.config import LOCK_NAME, CheckpointConfig, InputError


class Doomed(NamedTuple):
    """A directory that is to go, and why."""

    entry: Entry
    why: str


def run(options: argparse.Namespace, clock: Callable[[], float] = time.time) -> int:
    """Shows what would go, or deletes it; returns the exit status. Raises InputError, CheckpointError, OSError."""
    rules = options.keep is not None or options.keep_every is not None
    if rules and options.steps is not None:
        raise InputError("--steps names what goes, --keep and --keep-every what stays: give one or the other")
    if not (rules or options.steps or options.set_aside or options.leftovers):
        raise InputError("say what goes: --keep N, --keep-every N, --steps 10,20, --set-aside or --leftovers")
    directory, step = find(options.path)
    if step is not None:
        raise InputError(f"{options.path}: one step; name the run or its checkpoints/, and the step by --steps {step}")
    with no_run_in(directory, deletes=options.yes):
        entries = survey(directory)
        if not entries:
            raise nothing_in(options.path)
        doomed = [*_steps(options, entries), *_others(options, entries)]
        if not options.json:
            print(*_plan(doomed, entries, clock()), sep="\n", flush=True)
        if options.yes:
            for each in doomed:
                _delete(each.entry)
    freed = sum(each.entry.bytes for each in doomed)
    if options.json:
        gone = [
            {"step": each.entry.step, "path": str(each.entry.path), "bytes": each.entry.bytes, "why": each.why}
            for each in doomed
        ]
        print(json.dumps({"deleted": options.yes, "bytes": freed, "directories": gone}, indent=1))
    elif doomed:
        what = f"{count(len(doomed), 'directory', 'directories')}, {in_bytes(freed)}"
        print(f"deleted {what}" if options.yes else f"nothing was deleted; --yes deletes {what}")
    return 0


@contextmanager
def no_run_in(directory: epath.Path, *, deletes: bool) -> Generator[None]:
    """Holds the lock of the run directory that `directory` is in, if it is in one: no run starts there meanwhile.

    `deletes`: false if nothing is written, so that a read-only run can be looked at.

    Raises InputError if a run is training there, OSError.
    """
    with ExitStack() as stack:
        lock = directory.parent / LOCK_NAME
        if storage.is_local(directory) and directory.name == layout.CHECKPOINTS and lock.exists():
            file = stack.enter_context(Path(lock).open("r+" if deletes else "r"))  # NFS locks what can be written
            try:
                fcntl.flock(file, (fcntl.LOCK_EX if deletes else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"{directory.parent}: process {file.read() or 'unknown'} is training there, and deletes steps by "
                    "its own keep rules (max_num_checkpoints_to_keep and others); prune when it has ended"
                ) from None
        yield


def _steps(options: argparse.Namespace, entries: Sequence[Entry]) -> list[Doomed]:
    """The steps that are to go. Raises InputError if one must not."""
    committed = [entry for entry in entries if entry.state is State.COMMITTED]
    if options.steps is not None:
        named = {entry.step: entry for entry in entries if entry.state in (State.COMMITTED, State.TORN)}
        if missing := [step for step in options.steps if step not in named]:
            raise InputError(f"--steps: there is no step {shown(missing)}; steps there: {shown(list(named))}")
        good = _newest_good(committed) if any(entry.step in options.steps for entry in committed) else None
        if good in options.steps:
            raise InputError(f"--steps: {good} is the newest good step, which is never deleted")
        return [Doomed(named[step], "named by --steps") for step in options.steps]
    if options.keep is None and options.keep_every is None:
        return []
    rules = CheckpointConfig(
        max_num_checkpoints_to_keep=options.keep or 1, keep_checkpoint_every_n_steps=options.keep_every or 0
    )

    def unkept(good: int | None) -> list[int]:
        steps = [KeptStep(entry.step, entry.created, entry.metrics, entry.step == good) for entry in committed]
        return Preservation(rules).to_delete(steps)

    if not unkept(None):  # nothing has to be read to know that
        return []
    by_step = {entry.step: entry for entry in committed}
    return [Doomed(by_step[step], "not kept") for step in unkept(_newest_good(committed))]


def _newest_good(committed: Sequence[Entry]) -> int:
    """The newest step that is good, read to be sure. Raises CheckpointError if none is: then nothing may go."""
    compute_on_cpu()
    for entry in committed:
        if entry.verified and not problem_of(entry):
            return entry.step
    raise CheckpointError("none of the checkpoints is good (see verify), so none is deleted")


def _others(options: argparse.Namespace, entries: Sequence[Entry]) -> list[Doomed]:
    why: dict[State, str] = {}
    if options.set_aside:
        why[State.SET_ASIDE] = "set aside"
    if options.leftovers:  # no run is training there, so no one goes on with them
        why |= {State.UNFINISHED: "unfinished save", State.DELETING: "unfinished deletion"}
    return [Doomed(entry, why[entry.state]) for entry in entries if entry.state in why]


def _plan(doomed: Sequence[Doomed], entries: Sequence[Entry], now: float) -> list[str]:
    going = {each.entry.path.name for each in doomed}
    staying = [entry.step for entry in entries if entry.state is State.COMMITTED and entry.path.name not in going]
    stay = f"{count(len(staying), 'step stays', 'steps stay')}: {shown(staying)}" if staying else "no step stays"
    if not doomed:
        return ["nothing to delete", stay]
    rows = [("directory", "age", "size", "why")]
    rows += [
        (each.entry.path.name, duration(now - each.entry.created), in_bytes(each.entry.bytes), each.why)
        for each in doomed
    ]
    return [*table(rows, (0, 3)), stay]


def _delete(entry: Entry) -> None:
    """Raises CheckpointError if it cannot be deleted."""
    try:
        if entry.state in (State.COMMITTED, State.TORN):
            storage.delete_step(entry.path)
        else:
            storage.remove(entry.path)
    except OSError as error:
        raise CheckpointError(f"{entry.path} could not be deleted: {in_words(error)}") from error
