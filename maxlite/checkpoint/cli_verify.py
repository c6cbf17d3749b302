"""`python -m maxlite.checkpoint verify`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from maxlite.checkpoint.cli_text import count, duration
from maxlite.checkpoint.devices import compute_on_cpu
from maxlite.checkpoint.errors import CheckpointError
from maxlite.checkpoint.inventory import Entry, State, find, nothing_in, survey
from maxlite.checkpoint.stats import in_bytes
from maxlite.config import Exit, InputError


class Verdict(NamedTuple):
    """On one step."""

    step: int
    good: bool
    problem: str  # in words; empty if it is good
    bytes: int
    seconds: float


def run(options: argparse.Namespace, clock: Callable[[], float] = time.monotonic) -> int:
    """Verifies, printing as it goes; returns the exit status. Raises InputError, OSError."""
    directory, only = find(options.path)
    entries = [
        entry
        for entry in survey(directory)
        if only in (None, entry.step) and entry.state in (State.COMMITTED, State.TORN)
    ]
    if not entries:
        raise nothing_in(options.path)
    compute_on_cpu()
    verdicts = []
    for verdict in verify(entries, clock):
        verdicts.append(verdict)
        if not options.json:
            print(_line(verdict, entries, verdicts), flush=True)
    bad = [verdict.step for verdict in verdicts if not verdict.good]
    if options.json:
        print(json.dumps([verdict._asdict() for verdict in verdicts], indent=1))
    else:
        good = count(len(verdicts) - len(bad), "step is good", "steps are good")
        print(f"{good}; not good: {', '.join(map(str, bad))}" if bad else good)
    return Exit.SAVE_FAILED if bad else Exit.DONE


def verify(entries: Sequence[Entry], clock: Callable[[], float]) -> Iterator[Verdict]:
    """Reads and checks every array of each step in turn. What a run deletes meanwhile is left out."""
    for entry in entries:
        begun = clock()
        problem = "no commit marker" if entry.state is State.TORN else problem_of(entry)
        if problem and not entry.path.exists():
            continue
        yield Verdict(entry.step, not problem, problem, entry.bytes, clock() - begun)


def problem_of(entry: Entry) -> str:
    """What is wrong with a committed step, in words, when all of it has been read; empty if it is good."""
    from maxlite.checkpoint.reading import check_step

    try:
        return check_step(entry.path, lambda line: print(line, file=sys.stderr))
    except (CheckpointError, InputError) as error:  # cannot be read now; written by a newer version
        return str(error)


def _line(verdict: Verdict, entries: Sequence[Entry], verdicts: Sequence[Verdict]) -> str:
    result = f"NOT GOOD: {verdict.problem}" if verdict.problem else "good"
    line = f"step {verdict.step}: {result} ({in_bytes(verdict.bytes)} in {verdict.seconds:.1f} s"
    done = {verdict.step for verdict in verdicts}
    left = [entry.bytes for entry in entries if entry.step not in done]
    read = sum(verdict.bytes for verdict in verdicts)
    if left and read:
        seconds = sum(verdict.seconds for verdict in verdicts) * sum(left) / read
        line += f"; {count(len(left), 'step', 'steps')} left, about {duration(seconds)}"
    return line + ")"
