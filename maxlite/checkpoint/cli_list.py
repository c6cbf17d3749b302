"""`python -m maxlite.checkpoint list`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from maxlite.checkpoint.cli_text import count, duration, json_number, table
from maxlite.checkpoint.inventory import Entry, State, find, nothing_in, survey
from maxlite.checkpoint.stats import in_bytes

METRICS = ("loss", "eval_loss")
HEADER = ("step", "age", "size", "commit", "files", "parent", *METRICS, "")
LEFT = (3, 4, len(HEADER) - 1)


def run(options: argparse.Namespace, clock: Callable[[], float] = time.time) -> int:
    """Prints what is there; returns the exit status. Raises InputError, OSError."""
    directory, step = find(options.path)
    entries = [entry for entry in survey(directory) if step is None or entry.step == step]
    if not entries:
        raise nothing_in(options.path)
    if options.json:
        print(json.dumps([to_json(entry) for entry in entries], indent=1))
    else:
        print(*lines(entries, clock()), sep="\n")
    return 0


def to_json(entry: Entry) -> dict[str, Any]:
    """One entry of `list --json`."""
    return {
        "step": entry.step,
        "committed": entry.state is State.COMMITTED,
        "verified": entry.verified,
        "bytes": entry.bytes,
        "created": entry.created,
        "state": str(entry.state),
        "problem": entry.problem or None,
        "parent_step": entry.parent_step,
        "metrics": {name: json_number(value) for name, value in entry.metrics.items()},
        "path": str(entry.path),
    }


def lines(entries: Sequence[Entry], now: float) -> list[str]:
    """The table, and a line of totals. `now`: seconds since 1970."""
    committed = [entry for entry in entries if entry.state is State.COMMITTED]
    totals = [count(len(committed), "checkpoint", "checkpoints")]
    if len(entries) > len(committed):
        totals.append(count(len(entries) - len(committed), "other directory", "other directories"))
    totals.append(f"{in_bytes(sum(entry.bytes for entry in entries))} in all")
    right = [entry.step for entry in committed if entry.verified]
    totals.append(f"newest with all files right: step {right[0]}" if right else "none has all files right")
    return [*table([HEADER, *(_row(entry, now) for entry in entries)], LEFT), "", "; ".join(totals)]


def _row(entry: Entry, now: float) -> tuple[str, ...]:
    is_checkpoint = entry.state is State.COMMITTED
    metrics = [f"{entry.metrics[name]:.4f}" if name in entry.metrics else "" for name in METRICS]
    return (
        str(entry.step),
        duration(now - entry.created),
        in_bytes(entry.bytes),
        str(entry.state),
        ("right" if entry.verified else "DAMAGED") if is_checkpoint else "",
        "" if entry.parent_step is None else str(entry.parent_step),
        *metrics,
        entry.problem if is_checkpoint else entry.path.name,
    )
